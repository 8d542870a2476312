"""The gradients of a list of parameters as few tensors."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from bmtrain.kernels.chunks import Batch
from bmtrain.optim.runs import Run, contiguous_runs, gradient_kind


class Part(NamedTuple):
    """A part of a run and its gradient: (numel,), or strided if the program assigned it."""

    run: Run
    piece: Run
    grad: torch.Tensor


class Parts:
    """The gradients at the time of the call.

    Do not keep this object: it would hold the memory of gradients that the program has freed.
    """

    def __init__(self, parts: Iterable[Part]) -> None:
        self.parts = list(parts)
        self.batch = Batch([(part.grad,) for part in self.parts])


class Gradients:
    """Collects the gradients of runs as few tensors.

    Which parameters have one seldom changes, so the parts are cached; where gradients are in memory
    may change at every step, so tensors are not.

    Attributes:
        places: the parts of sharded runs that had a gradient at the last `look`, with their runs.
            The same object as long as the same parameters have one, each still in its storage's
            memory or still outside of it.
    """

    def __init__(self, runs: Iterable[Run]) -> None:
        runs = list(runs)
        self.sharded = [run for run in runs if run.storage is not None]
        self.ordinary = [run for run in runs if run.storage is None]
        self.places: list[tuple[Run, Run]] = []
        self._params = [param for run in self.sharded for param in run.params]
        self._storages = [run.storage for run in self.sharded for _ in run.params]
        self._kinds: list[object] = []  # `gradient_kind` of each parameter at the last look

    def look(self) -> tuple[Parts, Parts]:
        """The gradients of sharded parameters, at `places`, and those of ordinary ones."""
        kinds = list(map(gradient_kind, self._params))
        if kinds != self._kinds:
            self.places, self._kinds = _places(self.sharded), kinds
        return _parts(self.places), _parts(_places(self.ordinary))

    @property
    def are_current(self) -> bool:
        """Whether the parameters are still in the storages they were in at construction."""
        return all(map(operator.is_, map(_storage_of, self._params), self._storages))


_storage_of = operator.attrgetter("storage_of")


class GradientsCache:
    """Caches `Gradients` by parameter list: a training loop asks for the same few at every step."""

    NUM_KEPT = 8

    def __init__(self) -> None:
        # by ids of parameters, which cannot be reused while the cached runs hold the parameters
        self._known: dict[tuple[int, ...], Gradients] = {}

    def __call__(self, params: Sequence[torch.nn.Parameter]) -> Gradients:
        """`Gradients` of these parameters."""
        key = tuple(map(id, params))
        found = self._known.get(key)
        if found is None or not found.are_current:
            if len(self._known) >= self.NUM_KEPT:
                self._known.clear()
            found = self._known[key] = Gradients(contiguous_runs(params))
        return found


def _places(runs: Iterable[Run]) -> list[tuple[Run, Run]]:
    return [(run, piece) for run in runs for piece in run.with_gradient()]


def _parts(places: Iterable[tuple[Run, Run]]) -> Parts:
    return Parts(Part(run, piece, piece.gradient()) for run, piece in places)
