"""Counts the bytes of tensors without memory: those alive, their peak, what autograd saves."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from bmtrain.loss.linear_cross_entropy import chunk_rows
from bmtrain.torch_internals import TorchDispatchMode, argument_names, tree_leaves


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in nested containers, data classes of transformers' among them."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


class Meter(TorchDispatchMode):
    """Counts the storages that operators make under it, from their making until they are freed.

    Attributes:
        live, peak: bytes.
        flops: of matrix products; attention: of attention, half of the square if it is causal.

    Args:
        spare: tensors that do not count, nor do views of them.
    """

    def __init__(self, spare: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        # Held, so that no storage made later gets the id of one of them.
        self._spare = {id(s): s for s in (tensor.untyped_storage() for tensor in spare)}
        self.live = self.peak = 0
        self.flops = self.attention = 0.0
        self._known: set[int] = set()
        self._is_paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func) == _READING:
            return 0  # there is no value: checks of values, such as of the range of targets, pass
        out = func(*args, **(kwargs or {}))
        if self._is_paused:
            return out
        for tensor in tensors_in(out):
            self.add(tensor)
        self.peak = max(self.peak, self.live + workspace(func, args))
        self._count_flops(func, args, kwargs or {}, out)
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

    def restart_peak(self) -> None:
        """Look for the peak from here on."""
        self.peak = self.live

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

    def _count_flops(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        name = str(func)
        if name.startswith(_PRODUCTS):
            first = args[1] if "addmm" in name or "baddbmm" in name else args[0]
            self.flops += 2.0 * tensors_in(out)[0].numel() * first.shape[-1]
        elif _is_fused_head(func):
            hidden, weight = args[0][:2]
            self.flops += 2.0 * hidden.numel() * weight.shape[0]
        elif name.startswith("aten._scaled_dot_product"):
            given = dict(zip(argument_names(func), args, strict=False)) | kwargs
            query, key = given["query"], given["key"]
            square = 4.0 * math.prod(query.shape) * key.shape[-2]
            self.attention += square / 2 if given.get("is_causal") else square


_READING = "aten._local_scalar_dense.default"  # the value of a tensor, for Python
_PRODUCTS = ("aten.mm.", "aten.addmm.", "aten.bmm.", "aten.baddbmm.", "aten._scaled_mm.")


def _is_fused_head(func: Any) -> bool:
    return str(func).startswith("bmtrain.linear_cross_entropy")


def workspace(func: Any, args: Any) -> int:
    """Bytes that an operator takes and frees inside, which no result shows."""
    if not _is_fused_head(func):
        return 0
    hidden, weight = args[0][:2]
    row = weight.shape[0] * hidden.element_size()
    return chunk_rows(hidden.shape[0], row) * row


class Saved(torch.autograd.graph.saved_tensors_hooks):
    """Counts what autograd saves in its body: each storage once.

    Attributes:
        num_bytes: so far.

    Args:
        spare: tensors that do not count: parameters, and what others hold anyway.
    """

    def __init__(self, spare: Iterable[torch.Tensor]) -> None:
        super().__init__(self._pack, lambda saved: saved)
        # Held, so that no storage made later gets the id of one of them.
        self._seen = {id(s): s for s in (tensor.untyped_storage() for tensor in spare)}
        self.num_bytes = 0

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        # The state of a random generator lies on the host.
        if id(storage) not in self._seen and tensor.dtype != torch.uint8:
            self._seen[id(storage)] = storage
            self.num_bytes += storage.nbytes()
        return tensor.detach()  # else a node would hold its own result, and so itself
