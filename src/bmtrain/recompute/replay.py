"""What a recomputation needs besides parameters: the forward pass as it was, to be run again."""

from __future__ import annotations

import contextlib
import copy
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from bmtrain.recompute.states import States
from bmtrain.recompute.surroundings import Surroundings
from bmtrain.runtime.seeding import default_generators
from bmtrain.torch_internals import saved_tensors_hooks

# What copies of arguments share with the originals: values that do not change, and things that are
# no values.
_SHARED = (
    torch.Tensor,
    torch.nn.Module,
    torch.Generator,
    torch.Stream,
    torch.Event,
    torch.dtype,
    torch.device,
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    range,
    slice,
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
)


class Replay:
    """One forward pass, to be run again.

    A pass may change what it is given and what its modules hold: a cache of keys and values grows,
    running statistics and counters move, random numbers are drawn. A recomputation starts from what
    was there before, and leaves alone what has become of it. Tensors are not copied, apart from
    buffers and other small ones of modules: they must not change in place.

    Args:
        modules: those that run.
        args, kwargs: of the pass.
        device: where it computes.
        moved: those among `args` that leave the device meanwhile, and may then change.
        draws: whether the generator of the device can be read, and set again.
    """

    def __init__(
        self,
        modules: Sequence[torch.nn.Module],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        device: torch.device,
        *,
        moved: Sequence[torch.Tensor] = (),
        draws: bool = True,
    ) -> None:
        # The tensors among `args` are handed in again: whoever keeps them may have moved them off
        # the device meanwhile.
        self._args = [None if isinstance(arg, torch.Tensor) else arg for arg in args]
        self._kwargs, self._modules = dict(kwargs), modules
        self._states = States()
        hooks = saved_tensors_hooks()  # they may keep copies: changes are their affair
        for place, arg in enumerate(args):
            if not isinstance(arg, torch.Tensor):
                self._states.add(arg, f"argument {place}")
            elif hooks is None and not any(arg is other for other in moved):
                self._states.watch(arg, f"argument {place}")
        for name, arg in kwargs.items():
            self._states.add(arg, f"argument {name!r}")
        for module in modules:
            self._states.add_module(module)
        generators = [*default_generators(device if draws else None), *self._states.generators]
        self._surroundings = Surroundings(device, generators)
        self._is_first = True

    @property
    def is_first(self) -> bool:
        """Whether nothing has run yet."""
        return self._is_first

    def check(self) -> None:
        """RecomputationError if the pass cannot be run again because a tensor that it read was
        changed in place.
        """
        self._states.check()

    def attributes(self) -> list[torch.Tensor]:
        """Tensors that the modules have as attributes now."""
        return [
            x
            for module in self._modules
            for x in module.__dict__.values()
            if isinstance(x, torch.Tensor)
        ]

    @contextlib.contextmanager
    def run(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        """For the body of one run: its arguments. The first run takes those given.

        Raises:
            RecomputationError: in a later one, for what `check` says.
        """
        if self._is_first:
            self._is_first = False
            yield args, kwargs
            self._states.settle()
            return
        self.check()
        begun = self._states.at_begin
        args = tuple(
            arg if isinstance(arg, torch.Tensor) else begun(own)
            for arg, own in zip(args, self._args, strict=True)
        )
        with self._surroundings.restored(), self._states.restored():
            yield args, {name: begun(arg) for name, arg in self._kwargs.items()}


@contextlib.contextmanager
def spare_buffers(modules: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Inside, buffers are copies: recomputation must not update running statistics a second
    time.
    """
    before = [dict(module._buffers) for module in modules]
    try:
        for module in modules:
            module._buffers.update(
                {name: b if b is None else b.clone() for name, b in module._buffers.items()}
            )
        yield
    finally:
        for module, buffers in zip(modules, before, strict=True):
            module._buffers.update(buffers)


def snapshot(value: Any, memo: dict[int, Any] | None = None) -> Any:
    """`value` with its containers and plain objects copied, in any depth; what cannot be copied is
    shared.
    """
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
