"""The gradients of a list of parameters as few tensors."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from bmtrain.kernels.chunks import Batch
from bmtrain.optim.runs import Run, contiguous_runs, gradient_kind


class Part(NamedTuple):
    """A part of a run that has a gradient: (numel,), or strided if the program has put it there."""

    run: Run
    piece: Run
    grad: torch.Tensor


class Parts:
    """The gradients that there are now.

    They live no longer than the program keeps them: do not hold on to this.
    """

    def __init__(self, parts: Iterable[Part]) -> None:
        self.parts = list(parts)
        self.batch = Batch([(part.grad,) for part in self.parts])


class Gradients:
    """Looks for the gradients of runs. Which there are seldom changes, where they lie may do so at
    every step.

    places: the runs of sharded parameters with their parts that had a gradient when it was looked
    for last: the same object as long
        as the same parameters have one, in the memory of their storages or elsewhere.
    """

    def __init__(self, runs: Iterable[Run]) -> None:
        runs = list(runs)
        self.sharded = [run for run in runs if run.storage is not None]
        self.ordinary = [run for run in runs if run.storage is None]
        self.places: list[tuple[Run, Run]] = []
        self._params = [param for run in self.sharded for param in run.params]
        self._storages = [run.storage for run in self.sharded for _ in run.params]
        self._kinds: list[object] = []  # of the gradients at `places`

    def look(self) -> tuple[Parts, Parts]:
        """The gradients of sharded parameters, at `places`, and those of ordinary ones."""
        kinds = list(map(gradient_kind, self._params))
        if kinds != self._kinds:
            self.places, self._kinds = _places(self.sharded), kinds
        return _parts(self.places), _parts(_places(self.ordinary))

    @property
    def are_current(self) -> bool:
        """Whether the parameters still live where they did when this object was made."""
        return all(map(operator.is_, map(_storage_of, self._params), self._storages))


_storage_of = operator.attrgetter("storage_of")


class GradientsCache:
    """`Gradients` of the lists of parameters that were asked for lately: a training loop asks for
    the same ones at every step.
    """

    NUM_KEPT = 8

    def __init__(self) -> None:
        # by identities, which last as long as the runs hold the parameters
        self._known: dict[tuple[int, ...], Gradients] = {}

    def __call__(self, params: Sequence[torch.nn.Parameter]) -> Gradients:
        """Of these parameters."""
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
