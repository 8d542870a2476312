"""Adam's state: flat tensors per run of parameters, and cohorts that are updated together."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch

from bmtrain.errors import ParameterError
from bmtrain.kernels.adam import AdamTensors
from bmtrain.kernels.adam_compact import CompactTensors
from bmtrain.optim.bound import BoundWeights
from bmtrain.optim.compact_state import NAMES, CompactState, cut_of
from bmtrain.optim.form import StateForm
from bmtrain.optim.gradients import Gradients, Parts
from bmtrain.optim.host_memory import Make
from bmtrain.optim.masters import follow_weights
from bmtrain.optim.runs import Run, contiguous_runs, local_numel
from bmtrain.shard.cut import Cut
from bmtrain.shard.parameter import DistributedParameter
from bmtrain.shard.residence import num_references
from bmtrain.shard.sharded import Sharded, cut_like
from bmtrain.shard.slices import Slices, local_of

AnyTensors = AdamTensors | CompactTensors
MakeTensors = Callable[[torch.Tensor], AnyTensors]

_flat = itertools.chain.from_iterable
_params_of = operator.itemgetter("params")


class RunState:
    """State of one run, in fp32 (fp64 for fp64 parameters): both moments, and master weights.

    Only half-precision parameters have separate master weights.

    Args:
        run: whose state it is.
        make: makes its tensors.
    """

    def __init__(self, run: Run, make: Make) -> None:
        values = run.values
        dtype = torch.promote_types(values.dtype, torch.float32)
        self.mean, self.square = (make(run.numel, dtype) for _ in range(2))
        self.is_exact = values.dtype == dtype
        # Weights that are their own masters are not held: see `Storage.is_held`.
        self.master = None if self.is_exact else make(run.numel, dtype).copy_(values)

    @property
    def flat(self) -> list[torch.Tensor]:
        """The memory of the state."""
        return [self.mean, self.square, *([] if self.master is None else [self.master])]

    @property
    def follows_weights(self) -> bool:
        """Whether it has master weights that can be told of weights written by others."""
        return not self.is_exact

    @property
    def needs_weights(self) -> bool:
        """Whether it means nothing without the weights that it was made with."""
        return False

    def follow(self, run: Run) -> None:
        """Update the master weights from weights written by others."""
        if self.master is not None:
            follow_weights(self.master, run.values)

    def tensors(self, run: Run, piece: Run, grad: torch.Tensor) -> AdamTensors:
        """The tensors that an update of `piece`, a part of the run, reads and writes."""
        weight = piece.values
        mean, square = (run.cut(x, piece) for x in (self.mean, self.square))
        master = weight if self.master is None else run.cut(self.master, piece)
        return AdamTensors(weight, grad, master, mean, square)

    def shown(self, begin: int, end: int) -> dict[str, torch.Tensor]:
        """The state of elements [begin, end) of the run, by name."""
        out = {"exp_avg": self.mean[begin:end], "exp_avg_sq": self.square[begin:end]}
        return out if self.master is None else {"master": self.master[begin:end], **out}

    def adopt(self, begin: int, end: int, old: Mapping[str, torch.Tensor]) -> None:
        """Take over the state of elements [begin, end), what there is of it."""
        for name, view in self.shown(begin, end).items():
            if name in old:
                view.copy_(old[name].reshape(-1))


AnyState = RunState | CompactState


class StateOf(Sharded):
    """A state of a sharded parameter. Whoever reads or writes it waits for an update that is under
    way, and until nothing copies from or to its memory.
    """

    _param: DistributedParameter
    _wait_for_copies: Callable[[], None]

    def __new__(
        cls,
        param: DistributedParameter,
        local: torch.Tensor,
        cut: Cut,
        wait_for_copies: Callable[[], None],
    ) -> StateOf:
        out: StateOf = super().__new__(cls, local, cut)  # type: ignore[assignment]
        out._param, out._wait_for_copies = param, wait_for_copies
        return out

    @property
    def local(self) -> torch.Tensor:
        self._param.storage_of.settle()
        self._wait_for_copies()
        return self._local


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
        self._members: list[tuple[int, Run, MakeTensors]] = []

    @property
    def num_steps(self) -> int:
        """Steps taken, the same for all."""
        num_steps: int = self.states[0]["step"]
        return num_steps

    @property
    def is_one(self) -> bool:
        """Whether its step counts are the same: the program may have set one."""
        return len({state["step"] for state in self.states}) == 1

    def add(self, place: int, piece: Run, tensors: MakeTensors) -> None:
        """Add a piece of part number `place`; `tensors` maps its gradient to what is updated."""
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
        found = [(parts.parts[place], piece, tensors) for place, piece, tensors in self._members]
        return Update(
            self,
            [(part.run, piece) for part, piece, _ in found],
            [
                tensors(part.piece.cut(part.grad.reshape(-1), piece))
                for part, piece, tensors in found
            ],
        )


class Update(NamedTuple):
    """One step of a cohort.

    Attributes:
        places: pieces of runs, with their runs.
        tensors: what an update of each piece reads and writes.
    """

    cohort: Cohort
    places: list[tuple[Run, Run]]
    tensors: list[AnyTensors]

    def with_copies(self, wanted: Callable[[Run], bool]) -> Update:
        """With copies of the gradients of those runs."""
        pairs = zip(self.places, self.tensors, strict=True)
        return self._replace(
            tensors=[
                tensors.with_weight(tensors.weight, tensors.grad.clone())
                if wanted(run)
                else tensors
                for (run, _), tensors in pairs
            ]
        )


class AdamLayout:
    """Lays out the state of all parameters of an optimizer; existing state is copied in.

    Args:
        groups: the optimizer's parameter groups.
        states: its `state`, by parameter; filled with a step count and views of the flat tensors.
        make_state: makes the state of a run that begins with the parameter of a number, counted
            over all groups.
        form: of the states; compact ones are made for each parameter by itself.
        wait_for_copies: returns when nothing copies from or to states in host memory.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        states: MutableMapping[torch.Tensor, dict[str, Any]],
        make_state: Callable[[Run, int], AnyState],
        form: StateForm,
        wait_for_copies: Callable[[], None],
    ) -> None:
        self._states, self._wait_for_copies = states, wait_for_copies
        # by id of the run: its group's index and its state
        self._runs: dict[int, tuple[int, AnyState]] = {}
        # by id of the storage or parameter: runs whose weights are rounded masters
        self._rounded: dict[int, list[Run]] = {}
        self._versions: dict[int, int] = {}  # of their memory when it was last looked at
        self._bound = BoundWeights()
        runs = [
            (number, run)
            for number, group in enumerate(groups)
            for long in contiguous_runs(group["params"])
            for run in (long.split(id) if form.is_compact else [long])
        ]
        flat = _flat(map(_params_of, groups))
        place_of = {id(param): place for place, param in enumerate(flat)}
        for number, run in runs:
            state = make_state(run, place_of[id(run.params[0])])
            self._runs[id(run)] = number, state
            if state.follows_weights:
                self._rounded.setdefault(run.owner, []).append(run)
            if state.needs_weights:
                self._bound.add(run)
            self._show(run, state)
        self._params = [list(group["params"]) for group in groups]
        self._shown = [states[param] for params in self._params for param in params]
        # of tensors: a step count is another object after each step
        self._names = sorted({name for shown in self._shown for name in shown} - {"step"})
        self._views = list(self._shown_views())
        self._gradients = Gradients([run for _, run in runs])
        for view in _flat(map(self._views_of, self._gradients.sharded)):
            view.count_holders()
        self._num_holders = self._count_holders()
        self.trust_weights()
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
        """Bring master weights and weights together that others have written.

        Master weights of a state that was loaded are compared with the weights once: those may
        come of elsewhere, before or after the state.

        Raises:
            ParameterError: for states that need the weights as they were.
        """
        self._refuse_written()
        versions = self._current_versions()
        for owner, runs in self._rounded.items():
            if versions[owner] != self._versions.get(owner):
                for run in runs:
                    self._runs[id(run)][1].follow(run)

    def held_owners(self) -> set[int]:
        """Ids of storages of whose weights or states the program holds memory.

        It can read that at any time without asking.
        """
        now = self._count_holders()
        return {
            run.owner
            for run in self._gradients.sharded
            if now[id(run)] > self._num_holders[id(run)]
            or any(x.is_held for x in self._views_of(run))
            or (run.storage is not None and run.storage.is_held)
        }

    def _count_holders(self) -> dict[int, int]:
        """By run, how many tensors and other objects share the memory of its state."""
        return {
            id(run): sum(map(num_references, self._runs[id(run)][1].flat))
            for run in self._gradients.sharded
        }

    def _views_of(self, run: Run) -> Iterator[StateOf]:
        for param in run.params:
            yield from (x for x in self._states[param].values() if isinstance(x, StateOf))

    def _refuse_written(self) -> None:
        """ParameterError, on all ranks, if a state that counts needs weights that are gone.

        Before the first step of a parameter the remainders are zero: its weights may be any.
        """
        for run in self._bound.written():
            if self._step_of(run.params[0]):
                raise ParameterError(
                    f"a parameter of shape {tuple(run.params[0].shape)} was written since the last "
                    "step or load of the optimizer: its master weights are the weights and a "
                    "remainder (master_weights='split'), which does not tell what of them is new. "
                    "Use master_weights='fp32', or load the weights first, then the optimizer's "
                    "state."
                )

    def close(self) -> None:
        """Record the weights' versions: the last write was the optimizer's."""
        self._versions = self._current_versions()
        self._bound.remember()

    def trust_weights(self) -> None:
        """The weights are those of the states, which are new or being loaded."""
        self._versions.clear()  # unknown: masters follow once
        self._bound.remember()

    def updates(self) -> list[Update]:
        """Updates of all parameters that have a gradient now.

        The plan is reused as long as the same sharded parameters have one, and step counts that are
        the same are so still.
        """
        sharded, replicated = self._gradients.look()
        places = self._gradients.places
        if (
            self._plan is None
            or self._plan[0] is not places
            or not all(cohort.is_one for cohort in self._plan[1])
        ):
            self._plan = places, self._grouped(places)
        others = self._grouped([(run, piece) for run, piece, _ in replicated.parts])
        return [
            *(cohort.update(sharded) for cohort in self._plan[1]),
            *(cohort.update(replicated) for cohort in others),
        ]

    def _show(self, run: Run, state: AnyState) -> None:
        """Replace the states of the run's parameters by views of the flat state."""
        for param in run.params:
            old, bounds = self._states[param], run.offset(param)
            own = {name: _local(old[name], param) for name in NAMES if name in old}
            state.adopt(*bounds, own)
            views = state.shown(*bounds)
            if isinstance(param, DistributedParameter):
                views = {
                    name: StateOf(param, view, cut_of(name, param.cut), self._wait_for_copies)
                    for name, view in views.items()
                }
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
        return _flat(map(dict.get, self._shown, itertools.repeat(name)) for name in self._names)

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
