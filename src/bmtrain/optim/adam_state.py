"""The state of an Adam: flat tensors beside the runs of parameters, and who takes the next step together."""

from __future__ import annotations

import functools
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import torch

from bmtrain.kernels.adam import AdamTensors
from bmtrain.kernels.chunks import Batch
from bmtrain.optim.gradients import Gradients, Parts
from bmtrain.optim.runs import Run, contiguous_runs


class RunState:
    """fp32 state of one run: the moments, and for half-precision parameters the exact weights."""

    def __init__(self, run: Run, device: torch.device) -> None:
        values = run.values
        self.mean = torch.zeros(run.numel, dtype=torch.float32, device=device)
        self.square = torch.zeros(run.numel, dtype=torch.float32, device=device)
        self.is_exact = values.dtype == torch.float32 and values.device == device
        self.master = values if self.is_exact else torch.empty(run.numel, dtype=torch.float32, device=device)
        if not self.is_exact:
            self.master.copy_(values)

    def follow(self, run: Run) -> None:
        """Take over weights that somebody else has written since the last update, a checkpoint for example."""
        values = run.values.to(self.master.device)
        # Weights that are the rounded masters are our own: those masters are more exact than what was written.
        self.master.copy_(torch.where(self.master.to(values.dtype) == values, self.master, values.float()))

    def tensors(self, run: Run, piece: Run, grad: torch.Tensor) -> AdamTensors:
        """What an update of `piece`, a part of the run, reads and writes."""
        weight, state = piece.values, [run.cut(x, piece) for x in (self.master, self.mean, self.square)]
        return AdamTensors(weight, grad, weight if self.is_exact else state[0], *state[1:])

    def views(self, begin: int, end: int) -> dict[str, torch.Tensor]:
        """The state of elements [begin, end) of the run."""
        out = {"exp_avg": self.mean[begin:end], "exp_avg_sq": self.square[begin:end]}
        return out if self.is_exact else {"master": self.master[begin:end], **out}


class Cohort:
    """Parameters of group `number` with equally many steps behind them, and a gradient: they take the next steps together."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.states: list[dict[str, Any]] = []  # of the parameters
        self.numel = 0  # of the parameters, without the padding between them
        self.tensors: list[AdamTensors] = []

    @property
    def num_steps(self) -> int:
        """Behind them."""
        num_steps: int = self.states[0]["step"]
        return num_steps

    @functools.cached_property
    def batch(self) -> Batch:
        """The tensors, for the kernels."""
        return Batch(self.tensors)


class AdamLayout:
    """Lays out the state of all parameters of an optimizer; state that exists already is copied in.

    Args:
        groups: the optimizer's parameter groups.
        states: its `state`, by parameter: gets a step count and views of flat tensors.
        make_state: makes the flat tensors of a run.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        states: MutableMapping[torch.Tensor, dict[str, Any]],
        make_state: Callable[[Run], RunState],
    ) -> None:
        self._states = states
        self._runs: dict[int, tuple[int, RunState]] = {}  # by identity of the run: the number of its group, and its state
        self._rounded: dict[int, list[Run]] = {}  # by storage or parameter: runs of weights that are the rounded masters
        runs = [(number, run) for number, group in enumerate(groups) for run in contiguous_runs(group["params"])]
        for number, run in runs:
            state = make_state(run)
            self._runs[id(run)] = number, state
            if not state.is_exact:
                self._rounded.setdefault(run.owner, []).append(run)
            self._show(run, state)
        self._gradients = Gradients([run for _, run in runs])
        self._versions = self._current_versions()
        self._plan: tuple[Parts, list[Cohort]] | None = None

    def follow(self) -> None:
        """Take over weights that somebody else has written since `close`."""
        versions = self._current_versions()
        for owner, runs in self._rounded.items():
            if versions[owner] != self._versions[owner]:
                for run in runs:
                    self._runs[id(run)][1].follow(run)

    def close(self) -> None:
        """The weights are as the optimizer has written them."""
        self._versions = self._current_versions()

    def cohorts(self) -> list[Cohort]:
        """All parameters that have a gradient now. Planned once for gradients that stay where they are."""
        sharded, replicated = self._gradients.look()
        if self._plan is not None and self._plan[0] is sharded:
            planned = self._plan[1]
        else:
            planned = self._grouped(sharded)
            self._plan = (sharded, planned) if sharded is self._gradients.lasting else None
        return [*planned, *self._grouped(replicated)]

    def _show(self, run: Run, state: RunState) -> None:
        """Make the flat state that of the parameters."""
        for param in run.params:
            old = dict(self._states[param])
            views = state.views(*run.offset(param))
            for name, view in views.items():
                if name in old:
                    view.copy_(old[name].reshape(-1))
            self._states[param] = {"step": int(old.get("step", 0)), **views}

    def _grouped(self, parts: Parts) -> list[Cohort]:
        cohorts: dict[tuple[int, int], Cohort] = {}
        for run, part, grad in parts.parts:
            number, state = self._runs[id(run)]
            for piece in part.split(self._step_of):
                key = number, self._step_of(piece.params[0])
                cohort = cohorts.setdefault(key, Cohort(number))
                cohort.states.extend(self._states[param] for param in piece.params)
                cohort.numel += sum(param.numel() for param in piece.params)
                cohort.tensors.append(state.tensors(run, piece, part.cut(grad.reshape(-1), piece)))
        return list(cohorts.values())

    def _step_of(self, param: torch.nn.Parameter) -> int:
        step: int = self._states[param]["step"]
        return step

    def _current_versions(self) -> dict[int, int]:
        return {owner: runs[0].version for owner, runs in self._rounded.items()}
