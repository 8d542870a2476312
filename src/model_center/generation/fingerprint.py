"""A fingerprint of what a pass takes from the host: equal ones mean that a recording is right."""

from __future__ import annotations

import argparse
import collections
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

import bmtrain as bmt
from bmtrain.torch_internals import TORCH_VERSION, function_modes, version_of

# What the host knows of a module beside its own attributes; hooks are for the caller to ask for.
_STANDARD = frozenset(torch.nn.Module().__dict__) - {"training"}
# Objects of these packages are the same if they are the same object: locks, process groups.
_FOREIGN = sys.stdlib_module_names | {"torch", "numpy", "bmtrain"}
# Values that are compared: equal ones are the same to a pass, if they are of one type.
_VALUES = frozenset(
    {type(None), bool, int, float, complex, str, bytes, torch.Size, torch.device, types.MethodType}
)
_CONTAINERS = (list, tuple, set, frozenset, collections.deque)
_FOLLOWED = (types.SimpleNamespace, argparse.Namespace)  # of `_FOREIGN`, but the program's state
_MISSING = object()
# How a GPU's matrix products may round: from torch 2.9 on one name says it, and reading the older
# ones raises where a program has set the new one.
_MATMUL = (
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_reduced_precision_reduction",
    "fp32_precision" if TORCH_VERSION >= (2, 9) else "allow_tf32",
)
_SWITCHES: tuple[Callable[[], Any], ...] = (
    torch.get_default_dtype,
    torch.is_inference_mode_enabled,
    torch.are_deterministic_algorithms_enabled,
    torch.backends.cuda.flash_sdp_enabled,
    torch.backends.cuda.mem_efficient_sdp_enabled,
    torch.backends.cuda.math_sdp_enabled,
    torch.backends.cuda.cudnn_sdp_enabled,
    lambda: [getattr(torch.backends.cuda.matmul, name) for name in _MATMUL],
    function_modes,
)


class HostStateFingerprint:
    """What a pass of a model takes from the host, at the time when this is made.

    That is all that its modules hold: their children, numbers, texts, containers and objects of the
    program, functions that were put in place of methods, and where their buffers and other tensors
    are; and torch's switches. A recording that was made then is right where they are equal to those
    of now and parameters are where they were. What the program keeps elsewhere, in global
    variables, is not looked at.

    Args:
        model: with all modules of the pass.
        device: where it computes. Tensors that are elsewhere may be read by the host, so that their
            values count, not only their places.
    """

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        notes = _Notes(device)
        for read in _SWITCHES:
            notes.add(read())
        for kind in dict.fromkeys((device.type, "cpu")):
            notes.add(torch.is_autocast_enabled(kind))
            notes.add(torch.get_autocast_dtype(kind))
        notes.add_modules(model)
        self._facts = notes.facts

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, HostStateFingerprint) or len(self._facts) != len(other._facts):
            return False
        return all(
            one is now or (type(one) is type(now) and type(one) in _VALUES and bool(one == now))
            for one, now in zip(self._facts, other._facts, strict=True)
        )

    __hash__ = None  # type: ignore[assignment]  # values are compared, objects need none


class _Notes:
    """Facts in a fixed order: objects, of which two are the same or are equal values."""

    def __init__(self, device: torch.device) -> None:
        self.facts: list[Any] = []
        self._device = device
        self._known: dict[int, Any] = {}  # that were gone through, alive: addresses are used again

    def add_modules(self, model: torch.nn.Module) -> None:
        """A module and those below it that are not known yet."""
        found = [x._module if isinstance(x, bmt.Block) else x for x in model.modules()]
        modules = {id(module): module for module in found if id(module) not in self._known}
        self._known |= modules
        for module in modules.values():
            self._add_module(module)

    def _add_module(self, module: torch.nn.Module) -> None:
        """Its class, children, buffers and attributes, and what is beside values in parameters."""
        kind = type(module)
        if isinstance(module, torch.jit.ScriptModule):
            self.facts.append(object())  # its attributes are not to be seen: nothing is the same
            return
        self.facts += (kind, kind.forward, *module._modules, *map(id, module._modules.values()))
        for name, param in module._parameters.items():
            self.facts.append(None if param is None else name)
            if isinstance(param, bmt.DistributedParameter):
                # which of them has which memory of a storage, addresses do not tell
                self.facts.append(param)
            elif param is not None:
                self._add_all(dict, vars(param).values())
        for name, value in (*module._buffers.items(), *module.__dict__.items()):
            if name not in _STANDARD:
                self.facts.append(name)
                if type(value) in _VALUES:  # most are, and there are thousands
                    self.facts.append(value)
                else:
                    self.add(value)

    def add(self, value: Any) -> None:
        """A value and all that it holds."""
        kind = type(value)
        if kind in _VALUES:
            self.facts.append(value)
        elif kind is torch.Tensor:
            self._add_tensor(value)
        elif isinstance(value, torch.nn.Module):
            self.facts.append(id(value))
            if id(value) not in self._known:  # kept in a list, say: no parameter of the model's
                self.add_modules(value)
                self._add_all(list, value.parameters())
        elif isinstance(value, dict):
            self._add_parts(value, value.items())
        elif isinstance(value, _CONTAINERS):
            self._add_parts(value, (value,))
        elif isinstance(value, torch.nn.Parameter) and not isinstance(
            value, bmt.DistributedParameter
        ):
            self._add_tensor(value)
        elif _is_plain(kind):
            self._add_parts(value, _attributes(value))
        else:
            self.facts.append(value)

    def _add_parts(self, value: Any, parts: Iterable[Iterable[Any]]) -> None:
        """Of a container or an object, once: it may hold itself."""
        if id(value) in self._known:
            self.facts.append(type(value))
            return
        self._known[id(value)] = value
        self._add_all(type(value), (each for part in parts for each in part))

    def _add_all(self, kind: type, values: Iterable[Any]) -> None:
        self.facts.append(kind)
        begin = len(self.facts)
        for value in values:
            self.add(value)
        self.facts.append(len(self.facts) - begin)

    def _add_tensor(self, tensor: torch.Tensor) -> None:
        is_beside = tensor.device == self._device
        self.facts += (tensor.device, tensor.dtype, tensor.shape, tensor.layout)
        if tensor.layout is torch.strided:
            self.facts += (*tensor.stride(), tensor.data_ptr())
        else:
            self.facts.append(tensor)
        self.facts.append(None if is_beside else version_of(tensor))


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """Of a plain object, those in slots too."""
    yield from getattr(value, "__dict__", {}).items()
    for base in type(value).__mro__:
        for name, slot in vars(base).items():
            if isinstance(slot, types.MemberDescriptorType):
                held = getattr(value, name, _MISSING)
                if held is not _MISSING:
                    yield name, held


def _is_plain(kind: type) -> bool:
    """Whether objects of this class are of the program, and to be looked into."""
    if kind in _FOLLOWED:
        return True
    is_opaque = issubclass(kind, type | torch.Tensor)
    return not is_opaque and kind.__module__.partition(".")[0] not in _FOREIGN
