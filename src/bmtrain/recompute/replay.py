"""Replays a forward pass for recomputation, from the state in which it began."""

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

# Types that copies of arguments share with the originals: immutable, or not state of the call.
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

    A pass may change its arguments and its modules: a key-value cache grows, running statistics and
    counters move, random numbers are drawn. A recomputation starts from the state at the beginning
    of the pass and leaves the present state untouched. Tensors are not copied, apart from buffers
    and small tensors of modules: they must not change in place.

    Args:
        modules: all modules that run.
        args, kwargs: of the pass.
        device: where it computes.
        moved: tensors among `args` that are offloaded, and may change once they are.
        draws: whether the device's generator can be read and set, which it cannot during a capture.
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
        # Tensors among `args` come back as arguments of `run`, from autograd. A reference here
        # would keep those resident that hooks have offloaded.
        self._args = [None if isinstance(arg, torch.Tensor) else arg for arg in args]
        self._kwargs, self._modules = dict(kwargs), modules
        self._states = States()
        hooks = saved_tensors_hooks()  # the program's hooks may save copies: changes are allowed
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
        """Raise RecomputationError if a tensor that the pass read has changed in place since."""
        self._states.check()

    def attributes(self) -> list[torch.Tensor]:
        """Tensors that the modules hold as attributes now."""
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
        """Yields the arguments of one run. The first run gets those given.

        Raises:
            RecomputationError: in a later run, if `check` fails.
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
    """Replace buffers by copies inside: a second run must not update running statistics again."""
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
    """A deep copy of containers and plain objects; tensors and what cannot be copied are shared."""
    memo = {} if memo is None else memo
    if isinstance(value, _SHARED):
        return value
    if id(value) in memo:
        return memo[id(value)]
    if type(value) is tuple:
        return tuple(snapshot(entry, memo) for entry in value)
    try:
        out = copy.copy(value)
    except Exception:  # a lock or a process group: not state of the call
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
