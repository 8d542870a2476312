"""Snapshots of Python state at the start of a forward pass, restored for its recomputation."""

from __future__ import annotations

import argparse
import array
import collections
import contextlib
import copy
import dataclasses
import enum
import functools
import operator
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from bmtrain.errors import RecomputationError
from bmtrain.recompute.scripted import Slots, attributes_of, put_attributes
from bmtrain.runtime.seeding import is_generator
from bmtrain.shard.module import DistributedModule
from bmtrain.torch_internals import version_of

_FIXED = frozenset(
    {
        type(None),
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        range,
        slice,
        type(Ellipsis),
        torch.Size,
        torch.dtype,
        torch.device,
        torch.layout,
        torch.memory_format,
        types.FunctionType,
        types.BuiltinFunctionType,
        types.MethodType,
        types.ModuleType,
        functools.partial,
        weakref.ref,
    }
)
_STANDARD = frozenset(torch.nn.Module().__dict__) - {"training"}
_HOOKS = tuple(
    name for name in torch.nn.Module().__dict__ if name.startswith(("_forward", "_backward"))
)
# Objects of these packages hold no state of a forward pass: locks, loggers, process groups.
# Exceptions are `_FOLLOWED`.
_FOREIGN = sys.stdlib_module_names | {"torch", "numpy", "bmtrain"}
_FOLLOWED: frozenset[type] = frozenset(
    {types.SimpleNamespace, argparse.Namespace, collections.UserDict, collections.UserList}
)
# Elements. Small tensors of modules are copied in case the pass changes them, buffers of any size.
_SMALL = 4096


@dataclasses.dataclass
class _Seen:
    """A tensor that the pass may read, and its version; `copy` is dropped by `settle`."""

    tensor: Callable[[], torch.Tensor | None]
    version: int
    where: str
    copy: torch.Tensor | None = None

    def version_now(self) -> int:
        """The present version; `version` if the tensor is gone, so that no change is reported."""
        tensor = self.tensor()
        return self.version if tensor is None else version_of(tensor)


class States:
    """Lists, dicts, plain objects, attributes of modules, generators and tensors, when added.

    Contents are restored into the objects themselves, so all other references see the same state as
    in the forward pass.
    """

    def __init__(self) -> None:
        self.generators: list[Any] = []
        self._known: dict[int, Any] = {}
        self._contents: list[tuple[Any, Any]] = []
        self._tensors: list[_Seen] = []
        self._copies: dict[int, Callable[[], Any]] = {}

    def add(self, value: Any, where: str, *, owned: bool = False, direct: bool = True) -> None:
        """Record `value` and everything it holds.

        Args:
            where: names it in messages.
            owned: whether it belongs to a module, so that small tensors are copied.
            direct: whether its container can be given a copy in its place; a tuple cannot.
        """
        kind = type(value)
        if kind in _FIXED or id(value) in self._known:
            return
        if isinstance(
            value, torch.nn.Module | type | enum.Enum | BaseException | torch.nn.Parameter
        ):
            return
        self._known[id(value)] = value  # a strong reference: else the id could be reused
        if isinstance(value, torch.Tensor):
            self.add_tensor(value, where, keep=owned and direct and value.numel() <= _SMALL)
        elif is_generator(value):
            self.generators.append(value)
        elif isinstance(value, tuple | frozenset):
            self._add_all(value, where, owned, direct=False)
        else:
            self._add_contents(value, where, owned)

    def add_tensor(self, tensor: torch.Tensor, where: str, *, keep: bool = False) -> None:
        """Record the version of a tensor; `keep` a copy of one that needs no gradient."""
        kept = tensor.detach().clone() if keep and not tensor.requires_grad else None
        self._tensors.append(_Seen(lambda: tensor, version_of(tensor), where, kept))

    def watch(self, tensor: torch.Tensor, where: str) -> None:
        """Record the version of a tensor that autograd keeps, without keeping it alive here."""
        self._tensors.append(_Seen(weakref.ref(tensor), version_of(tensor), where))

    def add_module(self, module: torch.nn.Module) -> None:
        """Record attributes, buffers, children and hooks of a module, not of its descendants."""
        own, name = module.__dict__, type(module).__name__
        hooks = _Hooks(module)
        self._contents.append((hooks, _contents_of(hooks)))
        self._contents.append((module._modules, dict(module._modules)))
        self._contents.append((module._buffers, dict(module._buffers)))
        if isinstance(module, torch.jit.ScriptModule):
            self._contents.append((_Compiled(module), attributes_of(module)))
        for key, buffer in module._buffers.items():
            if buffer is not None and id(buffer) not in self._known:
                self._known[id(buffer)] = buffer
                self.add_tensor(buffer, f"buffer {key!r} of {name}", keep=True)
        attributes = {key: value for key, value in own.items() if key not in _STANDARD}
        for key, value in attributes.items():
            if type(value) not in _FIXED:
                attributes[key] = _without_graph(value)
                self.add(attributes[key], f"attribute {key!r} of {name}", owned=True)
        self._contents.append((module, attributes))

    def settle(self) -> None:
        """After the forward pass, drop copies of tensors that it has not changed."""
        for seen in self._tensors:
            tensor = seen.tensor()
            if seen.copy is not None and tensor is not None and seen.version_now() != seen.version:
                self._copies[id(tensor)] = seen.copy.clone
                seen.version = -1  # the copy is read from now on: later changes are harmless
            seen.copy = None

    def check(self) -> None:
        """Raise RecomputationError if a tensor that recomputation reads was changed in place."""
        for seen in self._tensors:
            if seen.version not in (-1, seen.version_now()):
                raise RecomputationError(
                    f"{seen.where}, a tensor that the forward pass of a block got, was "
                    "modified by an inplace operation before "
                    "backward came to the block, whose recomputation needs it as it "
                    "was: change a clone of it, make it a buffer "
                    "if the module itself changes it, or give the block use_checkpoint=False."
                )

    def at_begin(self, value: Any) -> Any:
        """`value`, or a copy of its state at the start of the pass."""
        make = self._copies.get(id(value))
        return value if make is None else make()

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the recorded state inside, then the present one again."""
        now: list[tuple[Any, Any]] = []
        try:
            for owner, noted in self._contents:
                contents = self._begun(noted) if self._copies else noted
                if _holds(owner, contents):
                    now.append((owner, contents))
                else:
                    now.append((owner, _contents_of(owner)))
                    _put(owner, contents)
            yield
        finally:
            for owner, contents in now:
                if not _holds(owner, contents):
                    _put(owner, contents)

    def _begun(self, contents: Any) -> Any:
        if isinstance(contents, dict):
            return {key: self.at_begin(value) for key, value in contents.items()}
        return (
            [self.at_begin(value) for value in contents] if isinstance(contents, list) else contents
        )

    def _add_contents(self, value: Any, where: str, owned: bool) -> None:
        if isinstance(value, list | collections.deque | set | dict):
            self._add_held(value, where, owned)
        elif isinstance(value, bytearray | array.array) or _is_ndarray(value):
            self._contents.append((value, copy.copy(value)))
        elif isinstance(value, Iterator) and not isinstance(value, types.GeneratorType):
            self._copies[id(value)] = functools.partial(copy.copy, copy.copy(value))
        elif _is_plain(type(value)):
            self._add_held(_Object(value), where, owned)
        if isinstance(value, list | dict | set) and _is_plain(type(value)):
            self._add_held(_Object(value), where, owned)

    def _add_held(self, owner: Any, where: str, owned: bool) -> None:
        contents = _contents_of(owner)
        if owned and isinstance(contents, dict):
            contents = {key: _without_graph(value) for key, value in contents.items()}
        elif owned:
            contents = [_without_graph(value) for value in contents]
        self._contents.append((owner, contents))
        self._add_all(
            contents.values() if isinstance(contents, dict) else contents, where, owned, direct=True
        )

    def _add_all(self, values: Iterable[Any], where: str, owned: bool, *, direct: bool) -> None:
        for value in values:
            if type(value) not in _FIXED:
                self.add(value, where, owned=owned, direct=direct)


def all_modules(module: torch.nn.Module) -> Sequence[torch.nn.Module]:
    """`module` and its descendants, each block replaced by its inner module."""
    found: dict[int, torch.nn.Module] = {}
    ways = [module]
    while ways:
        module = ways.pop()
        inner = module.__dict__.get("_hidden")
        module = inner[0] if isinstance(module, DistributedModule) and inner else module
        if id(module) not in found:
            found[id(module)] = module
            ways.extend(child for child in module._modules.values() if child is not None)
    return list(found.values())


class _Object:
    """The attributes of a plain object, apart from its entries as a list or dict."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def contents(self) -> dict[str, Any]:
        """Its present attributes."""
        return _attributes_of(self.value)

    def put(self, contents: dict[str, Any]) -> None:
        """Set its attributes to `contents`."""
        _put_attributes(self.value, _attributes_of(self.value).keys(), contents)


class _Compiled(_Object):
    """The attributes of a TorchScript module that live outside of Python."""

    def contents(self) -> dict[str, Any]:
        return attributes_of(self.value)

    def put(self, contents: dict[str, Any]) -> None:
        put_attributes(self.value, contents)


class _Hooks(_Object):
    """The hooks of a module by kind; {} for a module without hooks, which is the usual case."""

    def contents(self) -> dict[str, Any]:
        own = self.value.__dict__
        return (
            {name: dict(own.get(name) or {}) for name in _HOOKS}
            if any(map(own.get, _HOOKS))
            else {}
        )

    def put(self, contents: dict[str, Any]) -> None:
        for name in _HOOKS:
            found = self.value.__dict__.get(name)
            if isinstance(found, dict):
                _put(found, contents.get(name, {}))


def _without_graph(value: Any) -> Any:
    """Detach a tensor, or the tensors of a tuple.

    A module may store a result of its last pass. Keeping its graph would chain the graphs of all
    passes and keep every one resident.
    """
    if isinstance(value, torch.Tensor) and value.grad_fn is not None:
        return value.detach().requires_grad_()
    if isinstance(value, tuple) and any(isinstance(entry, torch.Tensor | tuple) for entry in value):
        entries = [_without_graph(entry) for entry in value]
        return tuple(entries) if type(value) is tuple else tuple.__new__(type(value), entries)
    return value


def _holds(owner: Any, contents: Any) -> bool:
    """Whether `owner` holds exactly these objects. False if comparing costs as much as writing."""
    present = owner if type(owner) in (dict, collections.OrderedDict) else _contents_of(owner)
    if len(present) != len(contents) or not isinstance(present, dict | list):
        return False
    if isinstance(present, list):
        return all(map(operator.is_, present, contents))
    return all(map(operator.is_, present, contents)) and all(
        map(operator.is_, present.values(), contents.values())
    )


def _contents_of(owner: Any) -> Any:
    if isinstance(owner, torch.nn.Module):
        return {key: value for key, value in owner.__dict__.items() if key not in _STANDARD}
    if isinstance(owner, _Object):
        return owner.contents()
    if isinstance(owner, collections.OrderedDict):
        return dict(collections.OrderedDict.items(owner))
    if isinstance(owner, dict):
        return dict(dict.items(owner))
    return (
        copy.copy(owner)
        if isinstance(owner, bytearray | array.array) or _is_ndarray(owner)
        else list(owner)
    )


def _put(owner: Any, contents: Any) -> None:
    """Replace the contents of `owner`.

    Calls methods of the built-in classes: overrides may refuse, or have side effects.
    """
    if isinstance(owner, torch.nn.Module):
        _put_attributes(owner, {key for key in owner.__dict__ if key not in _STANDARD}, contents)
    elif isinstance(owner, _Object):
        owner.put(contents)
    elif isinstance(owner, dict):
        kind: Any = next(
            kind for kind in (Slots, collections.OrderedDict, dict) if isinstance(owner, kind)
        )
        kind.clear(owner)
        for key, value in contents.items():
            kind.__setitem__(owner, key, value)
    elif isinstance(owner, list):
        list.__setitem__(owner, slice(None), contents)
    elif isinstance(owner, collections.deque):
        collections.deque.clear(owner)
        collections.deque.extend(owner, contents)
    elif isinstance(owner, set):
        set.clear(owner)
        set.update(owner, contents)
    elif _is_ndarray(owner):
        owner[...] = contents
    else:
        owner[:] = contents


def _put_attributes(owner: Any, names: Iterable[str], attributes: dict[str, Any]) -> None:
    own, slots = getattr(owner, "__dict__", {}), _slots_of(type(owner))
    for name in list(names):
        if name not in attributes:
            own.pop(name) if name in own else object.__delattr__(owner, name)
    for name, value in attributes.items():
        if name in slots:
            object.__setattr__(owner, name, value)
        else:
            own[name] = value


def _attributes_of(value: Any) -> dict[str, Any]:
    slots = _slots_of(type(value))
    found = dict(getattr(value, "__dict__", {}))
    for name in slots:
        held = getattr(value, name, _MISSING)
        if held is not _MISSING:
            found[name] = held
    return found


_MISSING = object()


_KINDS: weakref.WeakKeyDictionary[type, Sequence[str]] = weakref.WeakKeyDictionary()


def _slots_of(kind: type) -> Sequence[str]:
    """Attributes of objects of this class that are not in their `__dict__`."""
    found = _KINDS.get(kind)
    if found is None:
        own = [vars(base) for base in kind.__mro__ if _is_plain(base) and "__slots__" in vars(base)]
        found = [
            name
            for each in own
            for name, slot in each.items()
            if isinstance(slot, types.MemberDescriptorType)
        ]
        _KINDS[kind] = found
    return found


def _is_plain(kind: type) -> bool:
    """Whether objects of this class are state of the program with restorable attributes."""
    return kind.__module__.partition(".")[0] not in _FOREIGN or kind in _FOLLOWED


def _is_ndarray(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)
