"""The gradients of a list of parameters as few tensors, which a training step finds where the last one did."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from bmtrain.kernels.chunks import Batch
from bmtrain.optim.runs import Run, contiguous_runs, is_shown


class Part(NamedTuple):
    """A part of a run that has a gradient: (numel,), or strided if the program has put it there."""

    run: Run
    piece: Run
    grad: torch.Tensor


class Parts:
    """Parts whose gradients stay in place as long as this object lives."""

    def __init__(self, parts: Iterable[Part]) -> None:
        self.parts = list(parts)
        self.batch = Batch([(part.grad,) for part in self.parts])


class Gradients:
    """Looks for the gradients of runs. Those of sharded parameters lie in memory of their storages, pass after pass."""

    def __init__(self, runs: Iterable[Run]) -> None:
        runs = list(runs)
        self.sharded = [run for run in runs if run.storage is not None]
        self.ordinary = [run for run in runs if run.storage is None]
        self._params = [param for run in self.sharded for param in run.params]
        self._storages = [run.storage for run in self.sharded for _ in run.params]
        self._seen: list[torch.Tensor | None] = []  # what `.grad` was when `lasting` was found
        self.lasting: Parts | None = None

    def look(self) -> tuple[Parts, Parts]:
        """The gradients of sharded parameters and those of ordinary ones.

        The former are `lasting`, the same object, as long as they are where their storages have put them. What the program has
        put there itself, as autograd does for ordinary parameters, is not kept alive beyond its use.
        """
        grads = [param.grad for param in self._params]
        found = self.lasting
        if found is None or not all(map(operator.is_, grads, self._seen)):
            found = _parts(self.sharded)
            if all(param.grad is None or is_shown(param) for param in self._params):
                self.lasting, self._seen = found, grads
            else:
                self.lasting, self._seen = None, []
        return found, _parts(self.ordinary)

    @property
    def are_current(self) -> bool:
        """Whether the parameters still live where they did when this object was made."""
        return all(map(operator.is_, map(_storage_of, self._params), self._storages))


_storage_of = operator.attrgetter("storage_of")


class GradientsCache:
    """`Gradients` of the lists of parameters that were asked for lately: a training loop asks for the same ones at every step."""

    NUM_KEPT = 8

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], Gradients] = {}  # by identities, which last as long as the runs hold the parameters

    def __call__(self, params: Sequence[torch.nn.Parameter]) -> Gradients:
        """Of these parameters."""
        key = tuple(map(id, params))
        found = self._known.get(key)
        if found is None or not found.are_current:
            if len(self._known) >= self.NUM_KEPT:
                self._known.clear()
            found = self._known[key] = Gradients(contiguous_runs(params))
        return found


def _parts(runs: Iterable[Run]) -> Parts:
    return Parts(Part(run, piece, grad) for run in runs for piece, grad in run.gradients())
