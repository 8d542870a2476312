"""Counts the bytes of tensors without memory: those alive, and their peak."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from bmtrain.loss.linear_cross_entropy import chunk_rows
from bmtrain.recompute.memory import storages_of
from bmtrain.torch_internals import TorchDispatchMode, tensors_of


def workspace(func: Any, args: Any) -> int:
    """Bytes that an operator takes and frees inside, which no result shows: a chunk of logits."""
    if not str(func).startswith("bmtrain.linear_cross_entropy"):
        return 0
    hidden, weight = args[0][:2]
    row: int = weight.shape[0] * hidden.element_size()
    return chunk_rows(hidden.shape[0], row) * row


class Meter(TorchDispatchMode):
    """Counts the storages that operators make under it, from their making until they are freed.

    Attributes:
        live, peak: bytes.

    Args:
        spare: tensors that do not count, nor do views of them.
    """

    def __init__(self, spare: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self._spare = storages_of(spare)
        self.live = self.peak = 0
        self._known: set[int] = set()
        self._is_paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func) == "aten._local_scalar_dense.default":
            return 0  # there is no value: checks of values, such as of the range of targets, pass
        out = func(*args, **(kwargs or {}))
        if not self._is_paused:
            for tensor in tensors_of(out):
                self.add(tensor)
            self.peak = max(self.peak, self.live + workspace(func, args))
        return out

    def add(self, tensor: torch.Tensor) -> None:
        """Count the storage of a tensor, once."""
        storage = tensor.untyped_storage()
        if id(storage) in self._known or id(storage) in self._spare:
            return
        self._known.add(id(storage))
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._freed, id(storage), storage.nbytes())

    def take_peak(self) -> int:
        """The peak since the last call."""
        peak, self.peak = self.peak, self.live
        return peak

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """A context whose operators are not counted."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def _freed(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.live -= num_bytes
