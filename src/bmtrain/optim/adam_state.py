"""Adam's state: flat tensors per run of parameters, and cohorts that are updated together."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch

from bmtrain.kernels.adam import AdamTensors
from bmtrain.optim.gradients import Gradients, Parts
from bmtrain.optim.runs import Run, contiguous_runs, local_numel
from bmtrain.shard.parameter import DistributedParameter
from bmtrain.shard.sharded import Sharded, cut_like
from bmtrain.shard.slices import Slices, local_of

# Names of a parameter's tensors. One whose state is exact has no master weights.
STATES = ("master", "exp_avg", "exp_avg_sq")

_flat = itertools.chain.from_iterable
_params_of = operator.itemgetter("params")


class RunState:
    """State of one run, in fp32 (fp64 for fp64 parameters): both moments, and master weights.

    Only half-precision parameters, and those whose state is on another device, have separate master
    weights.
    """

    def __init__(self, run: Run, device: torch.device) -> None:
        values = run.values
        dtype = torch.promote_types(values.dtype, torch.float32)
        self.mean = torch.zeros(run.numel, dtype=dtype, device=device)
        self.square = torch.zeros(run.numel, dtype=dtype, device=device)
        self.is_exact = values.dtype == dtype and values.device == device
        self.master = (
            values if self.is_exact else torch.empty(run.numel, dtype=dtype, device=device)
        )
        if not self.is_exact:
            self.master.copy_(values)

    def follow(self, run: Run) -> None:
        """Update the master weights from weights written externally, say by a checkpoint."""
        values = run.values.to(self.master.device)
        # Weights equal to the rounded master are the optimizer's own: keep the master, which has
        # more bits.
        self.master.copy_(
            torch.where(
                self.master.to(values.dtype) == values, self.master, values.to(self.master.dtype)
            )
        )

    def tensors(self, run: Run, piece: Run, grad: torch.Tensor) -> AdamTensors:
        """The tensors that an update of `piece`, a part of the run, reads and writes."""
        weight, state = (
            piece.values,
            [run.cut(x, piece) for x in (self.master, self.mean, self.square)],
        )
        return AdamTensors(weight, grad, weight if self.is_exact else state[0], *state[1:])

    def views(self, begin: int, end: int) -> dict[str, torch.Tensor]:
        """The state of elements [begin, end) of the run."""
        out = {"exp_avg": self.mean[begin:end], "exp_avg_sq": self.square[begin:end]}
        return out if self.is_exact else {"master": self.master[begin:end], **out}


class Cohort:
    """Parameters of one group with a gradient and the same step count, updated together.

    Attributes:
        number: index of the group.
        states: the states of the parameters.
        numel: elements of the parameters, without the padding between them.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.states: list[dict[str, Any]] = []
        self.numel = 0
        self._sharded: list[DistributedParameter] = []
        self._members: list[tuple[int, Run, Callable[[torch.Tensor], AdamTensors]]] = []

    @property
    def num_steps(self) -> int:
        """Steps taken, the same for all."""
        num_steps: int = self.states[0]["step"]
        return num_steps

    def add(self, place: int, piece: Run, tensors: Callable[[torch.Tensor], AdamTensors]) -> None:
        """Add a piece of part number `place`; `tensors` maps its gradient to AdamTensors."""
        self.numel += sum(local_numel(param) for param in piece.params)
        self._sharded.extend(
            param for param in piece.params if isinstance(param, DistributedParameter)
        )
        self._members.append((place, piece, tensors))

    def count_writes(self) -> None:
        """Count a write to each sharded parameter."""
        for param in self._sharded:
            param.count_write()

    def update(self, parts: Parts) -> Update:
        """The next step, with the gradients of these parts."""
        found = ((parts.parts[place], piece, tensors) for place, piece, tensors in self._members)
        return Update(
            self,
            [
                tensors(part.piece.cut(part.grad.reshape(-1), piece))
                for part, piece, tensors in found
            ],
        )


class Update(NamedTuple):
    """One step of a cohort, and the tensors that it reads and writes."""

    cohort: Cohort
    tensors: list[AdamTensors]


class AdamLayout:
    """Lays out the state of all parameters of an optimizer; existing state is copied in.

    Args:
        groups: the optimizer's parameter groups.
        states: its `state`, by parameter; filled with a step count and views of the flat tensors.
        make_state: makes the flat tensors of a run.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        states: MutableMapping[torch.Tensor, dict[str, Any]],
        make_state: Callable[[Run], RunState],
    ) -> None:
        self._states = states
        # by id of the run: its group's index and its state
        self._runs: dict[int, tuple[int, RunState]] = {}
        # by id of the storage or parameter: runs whose weights are rounded masters
        self._rounded: dict[int, list[Run]] = {}
        runs = [
            (number, run)
            for number, group in enumerate(groups)
            for run in contiguous_runs(group["params"])
        ]
        for number, run in runs:
            state = make_state(run)
            self._runs[id(run)] = number, state
            if not state.is_exact:
                self._rounded.setdefault(run.owner, []).append(run)
            self._show(run, state)
        self._params = [list(group["params"]) for group in groups]
        self._shown = [states[param] for params in self._params for param in params]
        self._views = list(self._shown_views())
        self._gradients = Gradients([run for _, run in runs])
        self._versions = self._current_versions()
        self._plan: tuple[list[tuple[Run, Run]], list[Cohort]] | None = None

    def is_current(
        self, groups: Sequence[dict[str, Any]], states: MutableMapping[torch.Tensor, dict[str, Any]]
    ) -> bool:
        """Whether the groups still hold the same parameters, and the states are this layout's."""
        return (
            states is self._states
            and list(map(len, map(_params_of, groups))) == list(map(len, self._params))
            and all(map(operator.is_, _flat(map(_params_of, groups)), _flat(self._params)))
            and all(map(operator.is_, map(states.get, _flat(self._params)), self._shown))
            and all(map(operator.is_, self._shown_views(), self._views))
        )

    def follow(self) -> None:
        """Update master weights whose weights were written externally since `close`."""
        versions = self._current_versions()
        for owner, runs in self._rounded.items():
            if versions[owner] != self._versions[owner]:
                for run in runs:
                    self._runs[id(run)][1].follow(run)

    def close(self) -> None:
        """Record the weights' versions: the last write was the optimizer's."""
        self._versions = self._current_versions()

    def updates(self) -> list[Update]:
        """Updates of all parameters that have a gradient now.

        The plan is reused as long as the same sharded parameters have one.
        """
        sharded, replicated = self._gradients.look()
        places = self._gradients.places
        if self._plan is None or self._plan[0] is not places:
            self._plan = places, self._grouped(places)
        others = self._grouped([(run, piece) for run, piece, _ in replicated.parts])
        return [
            *(cohort.update(sharded) for cohort in self._plan[1]),
            *(cohort.update(replicated) for cohort in others),
        ]

    def _show(self, run: Run, state: RunState) -> None:
        """Replace the states of the run's parameters by views of the flat state."""
        for param in run.params:
            old = dict(self._states[param])
            views = state.views(*run.offset(param))
            for name, view in views.items():
                if name in old:
                    view.copy_(_local(old[name], param).reshape(-1))
            if isinstance(param, DistributedParameter):
                views = {name: Sharded(view, param.cut) for name, view in views.items()}
            self._states[param] = {"step": int(old.get("step", 0)), **views}

    def _grouped(self, places: Sequence[tuple[Run, Run]]) -> list[Cohort]:
        cohorts: dict[tuple[int, int], Cohort] = {}
        for place, (run, part) in enumerate(places):
            number, state = self._runs[id(run)]
            for piece in part.split(self._step_of):
                key = number, self._step_of(piece.params[0])
                cohort = cohorts.setdefault(key, Cohort(number))
                cohort.states.extend(self._states[param] for param in piece.params)
                cohort.add(place, piece, functools.partial(state.tensors, run, piece))
        return list(cohorts.values())

    def _step_of(self, param: torch.nn.Parameter) -> int:
        step: int = self._states[param]["step"]
        return step

    def _shown_views(self) -> Iterator[Any]:
        """The tensors in the states of all parameters; None where a state has none of a name."""
        return _flat(map(dict.get, self._shown, itertools.repeat(name)) for name in STATES)

    def _current_versions(self) -> dict[int, int]:
        return {owner: runs[0].version for owner, runs in self._rounded.items()}


def _local(value: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """This rank's elements of a state: a sharded tensor, a full tensor, or a slice already."""
    if (
        isinstance(param, DistributedParameter)
        and not isinstance(value, Slices)
        and value.shape == param.shape
    ):
        return cut_like(value, param).local
    return local_of(value)
