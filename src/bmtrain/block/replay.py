"""What a recomputation needs besides parameters: arguments and buffers as the forward pass found them."""

from __future__ import annotations

import contextlib
import copy
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch

# What copies of arguments share with the originals: values that do not change, and things that are no values.
_SHARED = (
    torch.Tensor, torch.nn.Module, torch.Generator, torch.Stream, torch.Event, torch.dtype, torch.device, type(None), bool, int,
    float, complex, str, bytes, range, slice, type, types.FunctionType, types.BuiltinFunctionType, types.MethodType,
    types.ModuleType,
)  # fmt: skip


class Replay:
    """One forward pass, to be run again.

    A pass may change what it is given: a cache of keys and values grows, running statistics move. A recomputation starts from
    copies of what was there before, and leaves alone what has become of it.

    Args:
        modules: those that run.
        args, kwargs: of the pass. Containers and plain objects are copied, the tensors inside are not.
    """

    def __init__(self, modules: Sequence[torch.nn.Module], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        # The tensors among `args` are handed in again: whoever keeps them may have moved them off the device meanwhile.
        self._arguments = snapshot(([None if isinstance(arg, torch.Tensor) else arg for arg in args], kwargs))
        self._buffers = [(module, name, b, _version(b), b.clone()) for module, name, b in _buffers_of(modules)]
        self._is_first = True

    @contextlib.contextmanager
    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        """For the body of one run: its arguments. The first run takes those given."""
        if self._is_first:
            self._is_first = False
            yield args, kwargs
            self._buffers = [entry for entry in self._buffers if _has_changed(*entry[:4])]
            return
        kept, kwargs = snapshot(self._arguments)
        args = tuple(arg if isinstance(arg, torch.Tensor) else own for arg, own in zip(args, kept, strict=True))
        now = [(module, name, module._buffers[name]) for module, name, *_ in self._buffers]
        try:
            for module, name, *_, before in self._buffers:
                module._buffers[name] = before
            yield args, kwargs
        finally:
            for module, name, buffer in now:
                module._buffers[name] = buffer


@contextlib.contextmanager
def spare_buffers(modules: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Inside, buffers are copies: recomputation must not update running statistics a second time."""
    before = [dict(module._buffers) for module in modules]
    try:
        for module in modules:
            module._buffers.update({name: b if b is None else b.clone() for name, b in module._buffers.items()})
        yield
    finally:
        for module, buffers in zip(modules, before, strict=True):
            module._buffers.update(buffers)


def snapshot(value: Any, memo: dict[int, Any] | None = None) -> Any:
    """`value` with its containers and plain objects copied, in any depth; what cannot be copied is shared."""
    memo = {} if memo is None else memo
    if isinstance(value, _SHARED):
        return value
    if id(value) in memo:
        return memo[id(value)]
    if type(value) is tuple:
        return tuple(snapshot(entry, memo) for entry in value)
    try:
        out = copy.copy(value)
    except Exception:  # a lock, a stream, the handle of a process group: no state of the call
        return value
    memo[id(value)] = out
    if isinstance(out, list):
        out[:] = [snapshot(entry, memo) for entry in out]
    if isinstance(out, dict):
        for key in list(out):
            dict.__setitem__(out, key, snapshot(out[key], memo))
    attributes = getattr(out, "__dict__", None)
    if isinstance(attributes, dict) and out is not value:
        attributes.update({name: snapshot(entry, memo) for name, entry in attributes.items()})
    return out


def _buffers_of(modules: Sequence[torch.nn.Module]) -> Iterator[tuple[torch.nn.Module, str, torch.Tensor]]:
    for module in modules:
        for name, buffer in module._buffers.items():
            if buffer is not None:
                yield module, name, buffer


def _version(buffer: torch.Tensor) -> int:
    return 0 if buffer.is_inference() else buffer._version


def _has_changed(module: torch.nn.Module, name: str, buffer: torch.Tensor, version: int) -> bool:
    return module._buffers.get(name) is not buffer or _version(buffer) != version
