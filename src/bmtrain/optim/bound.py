"""Weights that a state needs as they were: whether others have written them."""

from __future__ import annotations

from collections.abc import Sequence

from bmtrain.optim.runs import Run
from bmtrain.shard.parameter import DistributedParameter


class BoundWeights:
    """Watches the weights of runs of one parameter each.

    Writes through a parameter are counted for it, alike on all ranks. Those to its slice
    (`param.local`) are seen in the version of its storage's memory alone: where that has changed
    and no parameter in the storage has counted a write, any of them may have been written.
    """

    def __init__(self) -> None:
        self._runs: list[Run] = []
        self._seen: dict[int, int] = {}  # by id of the run: writes to its parameter
        # by id of the storage: its memory's version, and writes to all parameters in it
        self._memories: dict[int, tuple[int, int]] = {}

    def add(self, run: Run) -> None:
        """Watch this one too."""
        self._runs.append(run)

    def remember(self) -> None:
        """The weights are now as the states need them."""
        self._seen = {id(run): run.num_written for run in self._runs}
        self._memories = _memories(self._runs)

    def written(self) -> list[Run]:
        """Runs that may have been written since `remember`."""
        now = _memories(self._runs)
        in_slices = {
            owner
            for owner, (version, counted) in now.items()
            if version != self._memories[owner][0] and counted == self._memories[owner][1]
        }
        return [
            run
            for run in self._runs
            if run.num_written != self._seen[id(run)] or run.owner in in_slices
        ]


def _memories(runs: Sequence[Run]) -> dict[int, tuple[int, int]]:
    return {owner: _memory(run) for owner, run in {run.owner: run for run in runs}.items()}


def _memory(run: Run) -> tuple[int, int]:
    params = [] if run.storage is None else run.storage.params
    counted = sum(x.num_written for x in params if isinstance(x, DistributedParameter))
    return run.version, counted + run.num_written
