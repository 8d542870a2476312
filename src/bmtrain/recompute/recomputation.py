"""How the module of a block runs: eagerly or compiled, keeping activations or computing them again.

The first run of a call saves tensors as any forward pass does. When it is over, and nothing has
happened that a second run could not repeat, they are dropped, and backward runs the call again for
them.

The second run must find what the first one has found. Lists, dicts and attributes of plain
objects, reached through modules, their hooks and arguments, are put back for as long as it runs; so
are buffers and generators. All else that Python code of the modules reads is compared: globals,
closures, attributes of classes, sets, arrays and tensors. A pass that changes some of that itself
keeps its activations. If the program changes it between forward and backward, backward is refused.
"""

from __future__ import annotations

import argparse
import array
import collections
import contextlib
import contextvars
import copy
import ctypes
import dataclasses
import dis
import enum
import functools
import inspect
import itertools
import operator
import re
import sys
import threading
import types
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing import sharedctypes
from typing import Any

import numpy as np
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from bmtrain.distributed import tensor_parallel  # noqa: F401 (it defines operators)
from bmtrain.errors import RecomputationError
from bmtrain.recompute.level import Level
from bmtrain.runtime import world
from bmtrain.runtime.log import warn
from bmtrain.runtime.seeding import (
    Draws,
    is_generator,
    is_same_state,
    read_generator,
    write_generator,
)
from bmtrain.runtime.world import World
from bmtrain.shard.engine import Stale
from bmtrain.shard.module import DistributedModule
from bmtrain.shard.slices import Slices
from bmtrain.shard.unshard import Kept, Unpack, Use
from bmtrain.torch_internals import (
    BatchNorm,
    DeviceContext,
    InstanceNorm,
    TorchDispatchMode,
    argument_names,
    at_end_of_backward,
    dispatch_modes,
    function_modes,
    global_module_hooks,
    has_global_module_hooks,
    hooks_of,
    in_backward,
    last_script_graph,
    sharing_versions,
    tree_map_only,
    version_of,
    versions_of,
)

_SCALARS = frozenset(
    {type(None), bool, int, float, complex, str, bytes, range, slice, type(Ellipsis), torch.Size}
)
_CONSTANT = _SCALARS | {torch.dtype, torch.device, torch.layout, torch.memory_format}
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)
# Objects of these packages hold no state of a forward pass: locks, loggers, process groups.
_FOREIGN = sys.stdlib_module_names | {
    "torch",
    "numpy",
    "triton",
    "bmtrain",
    "huggingface_hub",
    "transformers.utils.hub",
}
_FOLLOWED: frozenset[type] = frozenset(
    {
        types.SimpleNamespace,
        argparse.Namespace,
        collections.UserDict,
        collections.UserList,
        collections.ChainMap,
        weakref.WeakKeyDictionary,
        weakref.WeakValueDictionary,
        sharedctypes.Synchronized,
        sharedctypes.SynchronizedArray,
        type(world.ENVIRONMENT),
    }
)
_C_DATA: Any = ctypes.Structure.__base__
_STANDARD = frozenset(torch.nn.Module().__dict__)
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
)
# By these, code may read globals and modules that its strings name.
_READERS = {"globals", "sys", "importlib", "import_module"}
# By these, code may write tensors without a version that counts it.
_WRITERS = {"data", "numpy"}
_CACHE = type(functools.cache(len))
_MISSING = object()
_NUM_WARM = 4  # calls after which the executor keeps the same graph
_SDP = torch.backends.cuda
# Getter and setter of each. They select kernels, and so which tensors are saved for backward.
_SWITCHES: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (_SDP.flash_sdp_enabled, _SDP.enable_flash_sdp),
    (_SDP.mem_efficient_sdp_enabled, _SDP.enable_mem_efficient_sdp),
    (_SDP.math_sdp_enabled, _SDP.enable_math_sdp),
    (_SDP.cudnn_sdp_enabled, _SDP.enable_cudnn_sdp),
)


@dataclasses.dataclass(frozen=True)
class _Held:
    """A list or a dict, and what it held."""

    owner: Any
    contents: Any

    def is_unchanged(self) -> bool:
        now, then = self.owner, self.contents
        has_same_keys = len(now) == len(then) and all(map(operator.is_, now, then))
        return has_same_keys and (
            isinstance(now, list) or all(map(operator.is_, now.values(), then.values()))
        )

    def put(self, contents: Any) -> None:
        """Make these the contents. Methods of the built-in classes: overrides may refuse."""
        if isinstance(self.owner, list):
            list.__setitem__(self.owner, slice(None), contents)
            return
        kind = collections.OrderedDict if isinstance(self.owner, collections.OrderedDict) else dict
        kind.clear(self.owner)
        kind.update(self.owner, contents)


@dataclasses.dataclass(frozen=True)
class _Noticed:
    """Something that is compared: how to read it, what was read, and its name in messages, or one
    for each of several things.
    """

    read: Callable[[], Iterable[Any]]
    found: Sequence[Any]
    where: str
    names: Iterable[str] = ()


def _is_same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and type(a) in _SCALARS and bool(a == b))


class Snapshot:
    """Everything reachable at one time. Several calls share it while nothing changes.

    Attributes:
        held: restored for a recomputation.
        noticed: compared.
        tensors: with their names, compared by version; those of `buffers` may be copied.
        generators: the program's own, restored.
        classes: of the program, whose methods may run.
        hides_writes: whether versions may miss what the code writes.
        obstacle: what makes any recomputation impossible, or None.
        root: the module whose own hooks run once, as those of a block.
        known: everything that was added, by its id.
        hooks: of the modules that were added and of all modules.

    Args:
        is_brief: whether what is kept may keep the graphs that it is in.
        beside: another, which is used with this one: what it holds is left out.
    """

    def __init__(self, *, is_brief: bool = False, beside: Snapshot | None = None) -> None:
        self.root: torch.nn.Module | None = beside.root if beside else None
        self._kept: Callable[[Any], Any] = (lambda value: value) if is_brief else _without_graph
        self.classes: list[type] = []
        self.held: list[_Held] = []
        self.tensors: list[torch.Tensor] = []
        self.names: list[str] = []
        self.buffers: dict[int, str] = {}  # positions among `tensors`
        # positions of running statistics, which torch writes without a version that counts it
        self.statistics: set[int] = set()
        self.generators: list[Any] = []
        self.hooks: list[Any] = [*(beside.hooks if beside else global_module_hooks)]
        self.hides_writes = False
        self.obstacle: str | None = None
        # Alive: ids are used again.
        self.known: dict[int, Any] = beside.known.copy() if beside else {}
        # What names stand for in namespaces: how to read it, what was read, and its label.
        self._names: tuple[list[Any], list[Any], dict[tuple[int, str], str]] = [], [], {}
        reads, values, labels = self._names  # no cycle with this object, which holds tensors
        read = functools.partial(map, functools.partial.__call__, reads)
        self.noticed = [_Noticed(read, values, "", labels.values())]
        self._all_held: tuple[list[Any], list[Any], list[int], list[Any]] | None = None

    def changed(self) -> str | None:
        """The first that is compared and not as it was."""
        for each in self.noticed:
            now, found = [*each.read()], each.found
            if len(now) != len(found):
                return each.where
            if not all(map(operator.is_, now, found)):
                are_changed = [not is_same for is_same in map(_is_same, now, found)]
                if any(are_changed):
                    return next(itertools.compress(each.names, are_changed), each.where)
        return None

    def is_intact(self) -> bool:
        """Whether all that is restored is as it was."""
        if self._all_held is None:
            owners, dicts, lengths, found = self._all_held = [], [], [], []
            values: list[Any] = []
            for each in self.held:
                owners.append(each.owner)
                lengths.append(len(each.contents))
                found += each.contents
                if isinstance(each.owner, dict):
                    dicts.append(each.owner)
                    values += each.contents.values()
            found += values
        owners, dicts, lengths, found = self._all_held
        now = itertools.chain(*owners, *map(dict.values, dicts))
        return list(map(len, owners)) == lengths and all(map(operator.is_, now, found))

    def add_modules(self, modules: Iterable[torch.nn.Module]) -> None:
        """Attributes, buffers, children and hooks of modules, and what their code reads; what hooks
        reach is for `add_hooks`.
        """
        parts = list(modules)
        if self.root is None:
            self.root = parts[0]
        self.known.update((id(module), module) for module in parts)
        self.held += [_Held(hooks, hooks.copy()) for hooks in global_module_hooks]
        params = [module._parameters for module in parts]
        self._add_noticed(functools.partial(map, len, params), "the number of parameters")
        for module in parts:
            name, own = type(module).__name__, module.__dict__
            is_norm = isinstance(module, InstanceNorm) or calls_batch_norm(module)
            for key, buffer in module._buffers.items():
                if buffer is not None and id(buffer) not in self.known:
                    self.known[id(buffer)] = buffer
                    self.buffers[len(self.tensors)] = key
                    if is_norm and module.training:
                        self.statistics.add(len(self.tensors))
                    self._add_tensor(buffer, f"buffer {key!r} of {name}")
            registered = [own[key] for key in _HOOKS]
            for found in (module._modules, module._buffers, *registered):
                self.held.append(_Held(found, found.copy()))
            if module is not self.root:
                self.hooks += registered
            self._add_attributes(module)
            self._add_class(type(module))

    def add_hooks(self) -> None:
        """What hooks reach. Many collect results: no two calls find the same there."""
        for hooks in self.hooks:  # which grow by modules found here
            for hook in hooks.values():
                self.add(hook, "what a hook of a module reads")

    def _add_module(self, module: torch.nn.Module) -> None:
        """One that is not below the block: all of it, or of one around the block its attributes."""
        parts = [part for _, part in parts_with_blocks(module)]
        if self.root in parts:
            self.known[id(module)] = module
            self._add_attributes(parts[0])
            return
        self.add_modules([part for part in parts if id(part) not in self.known])
        for param in module.parameters():
            self.add(param, f"a parameter of {type(module).__name__}")

    def _add_attributes(self, module: torch.nn.Module) -> None:
        own = {key: self._kept(value) for key, value in module.__dict__.items()}
        self.held.append(_Held(module.__dict__, own))
        for key in own.keys() - _STANDARD:
            self.add(own[key], f"attribute {key!r} of {type(module).__name__}")

    def add(self, value: Any, where: str) -> None:
        """A value and everything it holds."""
        value = world.ENVIRONMENT if value is world.READ_ENVIRONMENT else value
        kind = type(value)
        if kind in _CONSTANT or id(value) in self.known:
            return
        if isinstance(value, type | enum.Enum | BaseException | types.ModuleType):
            return
        if isinstance(value, _FUNCTIONS):
            self._add_function(value)
            self.add(getattr(value, "__self__", None), where)
            return
        if isinstance(value, torch.nn.Module):  # not below the block
            self._add_module(value)
            return
        self.known[id(value)] = value
        if isinstance(value, torch.Tensor):
            if not isinstance(value, Slices):  # of those the call's own check knows
                self._add_tensor(value, where)
        elif isinstance(value, functools.partial):
            for part in (value.func, *value.args, *value.keywords.values()):
                self.add(part, where)
        elif is_generator(value):
            self.generators.append(value)
        elif kind in (list, dict, collections.OrderedDict):
            self._add_container(value, where)
        elif isinstance(value, tuple | frozenset):
            for entry in value:
                self.add(entry, where)
        elif isinstance(value, weakref.ReferenceType):
            self.add(value(), where)
        elif isinstance(value, set | collections.deque | list | dict):
            parts = value.values() if isinstance(value, dict) else value
            self._add_noticed(lambda: parts, where)
            for entry in list(parts):
                self.add(entry, where)
            self._add_object(value, kind, where)
        elif isinstance(value, bytearray | array.array | _C_DATA):
            self._add_noticed(lambda: (bytes(value),), where)
        elif isinstance(value, np.ndarray):
            self._add_noticed(lambda: (hash(value.tobytes()),), where)
        elif isinstance(value, threading.local):
            # On GPUs backward runs in a thread of autograd.
            self.obstacle = f"{where} has other values in other threads"
        elif isinstance(value, Iterator):
            self.obstacle = f"{where} is an iterator, which a pass uses up"
        elif _is_plain(kind) or isinstance(value, torch.distributions.Distribution):
            self._add_object(value, kind, where)

    def _add_tensor(self, tensor: torch.Tensor, where: str) -> None:
        self.tensors.append(tensor)
        self.names.append(where)

    def _add_noticed(self, read: Callable[[], Iterable[Any]], where: str) -> None:
        self.noticed.append(_Noticed(read, [*read()], where))

    def _add_container(self, value: Any, where: str) -> None:
        contents: Any = (
            [self._kept(entry) for entry in value]
            if isinstance(value, list)
            else {key: self._kept(entry) for key, entry in value.items()}
        )
        self.held.append(_Held(value, contents))
        for entry in contents if isinstance(contents, list) else contents.values():
            self.add(entry, where)

    def _add_object(self, value: Any, kind: type, where: str) -> None:
        slots = [
            name
            for base in kind.__mro__
            for name, found in vars(base).items()
            if isinstance(found, types.MemberDescriptorType) and base.__module__ != "builtins"
        ]
        if slots:
            self._add_noticed(lambda: [getattr(value, name, _MISSING) for name in slots], where)
            for name in slots:
                self.add(getattr(value, name, None), where)
        own = getattr(value, "__dict__", None)
        if isinstance(own, dict):
            self._add_container(own, where)
        self._add_class(kind)

    def _add_class(self, kind: type) -> None:
        """What methods of a class read beside their arguments, and its own data."""
        if id(kind) in self.known:
            return
        self.known[id(kind)] = kind
        overridden = set[str]()
        for base in kind.__mro__:
            is_plain, own = _is_plain(base), vars(base)
            if is_plain:
                self.classes.append(base)
            # Of torch's modules only the forward pass is anything that a program exchanges.
            names = [name for name in own if is_plain or name == "forward"]
            for name in names:
                function = _function_of(own[name])
                if function is None or name in overridden:
                    continue
                self._add_function(function)
                if "super" not in names_in(function.__code__):
                    overridden.add(name)
            names = [name for name in names if not name.startswith("__")]
            self._add_names(own, names, f"of class {base.__name__}", is_plain)

    def _add_function(self, function: Any) -> None:
        """What a function reads of globals and closures, and the functions that it calls."""
        function = getattr(function, "__func__", function)
        code = getattr(function, "__code__", None)
        if (
            code is None
            or id(function) in self.known
            or not (_is_plain(function) or function.__module__.startswith("torch.nn."))
        ):
            return
        self.known[id(function)] = function
        self.hides_writes |= _is_plain(function) and not _WRITERS.isdisjoint(names_in(code))
        if vars(function):
            self._add_container(vars(function), f"an attribute of {function.__name__}")
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            if name == "__class__":  # of `super()`, which does not change
                continue
            self._add_noticed(functools.partial(_contents, cell), f"{name!r} of a closure")
            self.add(_contents(cell)[0], f"{name!r} of a closure")
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self.add(value, f"a default of {function.__name__}")
        spaces = [(function.__globals__, "among globals", True)]
        seen = set[int]()
        for space, of, is_plain in spaces:  # which grow by modules and classes found in them
            # A variable of a script may bear the name of an attribute.
            names = names_in(code) if seen else _globals_in(code)
            self._add_names(space, names, of, is_plain)
            for name in names:
                value = space.get(name, sys.modules.get(name))  # imported by the function itself
                if isinstance(value, types.ModuleType | type):
                    if id(value) not in seen:
                        seen.add(id(value))
                        owners: Any = (value, type(value))  # it has the properties of a class
                        spaces += [(vars(x), f"of {name}", _is_plain(x)) for x in owners]
                elif not _is_data(value):
                    found = value if isinstance(value, _FUNCTIONS) else _function_of(value)
                    self.add(found, f"{name!r} {of}")

    def _add_names(
        self, space: Mapping[str, Any], names: Sequence[str], of: str, is_plain: bool
    ) -> None:
        """Whatever these names stand for there, functions too, which may be exchanged.

        Data that is not of the program (`is_plain`) is left out, but for the environment.
        """
        reads, values, labels = self._names
        for name in filter(space.__contains__, names):
            value, label = space[name], f"{name!r} {of}"
            is_data = _is_data(value)
            if is_data and (is_plain or value is world.ENVIRONMENT):
                self.add(value, label)
            if (is_plain or not is_data) and (id(space), name) not in labels:
                labels[id(space), name] = label
                reads.append(functools.partial(space.get, name, _MISSING))
                values.append(value)


class Trial:
    """A pass that may not count; what it changes can be put back.

    Args:
        modules: that run.
        arguments: of the pass.
    """

    def __init__(self, modules: Sequence[torch.nn.Module], arguments: Sequence[Any]) -> None:
        self._modules, self._arguments = modules, arguments
        self._before = before = self._snapshot()
        tensors = [before.tensors[number] for number in before.buffers]
        self._buffers = [(x, x.detach().clone()) for x in tensors]
        generators = [*world.current().draws.generators, *before.generators]
        self._generators = [(each, read_generator(each)) for each in generators]

    def _snapshot(self) -> Snapshot:
        found = Snapshot(is_brief=True)
        found.add_modules(self._modules)
        found.add(tuple(self._arguments), "an argument")
        found.add_hooks()
        return found

    def keeps(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether code of the modules reaches one of these tensors now."""
        return not {id(x) for x in self._snapshot().tensors}.isdisjoint(map(id, tensors))

    def undo(self, name: str) -> None:
        """Put back what the pass has changed; what that cannot be, a warning says.

        Args:
            name: of the outermost module.
        """
        for held in self._before.held:
            if not held.is_unchanged():
                held.put(held.contents)
        with torch.no_grad():
            for buffer, value in self._buffers:
                buffer.copy_(value)
        for generator, state in self._generators:
            write_generator(generator, state)
        if changed := self._before.changed():
            warn(f"{name} changes {changed} in a forward pass that runs again.")


class Scripts:
    """Counts sightings of TorchScript on this rank. One per run, from `world.service(Scripts)`.

    TorchScript only tells which graph ran last.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Scripts:
        """Itself: a copy of a block belongs to the same run."""
        return self

    def __init__(self, world: World) -> None:
        self._idle: Any = None  # compiled on the first sighting
        self._graph: Any = None
        self._count = 0

    def count(self) -> int:
        """A counter that grows if TorchScript has run on this thread since the last call."""
        last = last_script_graph()
        if last is not None and last is not self._graph:
            self._count += 1
            # Run a no-op, so that a second call of the same function shows as another last graph.
            if self._idle is None:
                self._idle = torch.jit.CompilationUnit("def idle():\n    return\n").idle
                for _ in range(_NUM_WARM):
                    self._idle()
            self._idle()
            self._graph = last_script_graph()
        return self._count


class HostState:
    """The state that calls of one block read.

    Args:
        modules: returns all modules that run, with their paths.
        scripts: tells whether TorchScript has run.
    """

    def __init__(
        self, modules: Callable[[], Iterable[tuple[str, torch.nn.Module]]], scripts: Scripts
    ) -> None:
        self._modules, self.scripts = modules, scripts
        self._snapshot: Snapshot | None = None
        self.writes_buffers = True  # until a pass has been seen that does not
        #: whether the last call could be recomputed; None before the first
        self.is_repeatable: bool | None = None

    def __getstate__(self) -> dict[str, Any]:
        """State for a copy, which has other modules."""
        return {**self.__dict__, "_snapshot": None}

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any], draws: Draws) -> CallState:
        """A pass begins.

        Args:
            args, kwargs: of the pass; direct tensors among them are the caller's.
            draws: of the rank.
        """
        last = self._snapshot
        if last is None or not last.is_intact() or last.changed() is not None:
            last = self._snapshot = Snapshot()
            last.add_modules(module for _, module in self._modules())
        given = Snapshot(beside=last)
        for name, value in (*enumerate(args), *kwargs.items()):
            if not isinstance(value, torch.Tensor):
                given.add(value, f"argument {name}")
        if any(given.hooks):
            given.add_hooks()
        return CallState(self, last, given, draws)


class CallState:
    """The state at the beginning of one pass."""

    def __init__(self, owner: HostState, snapshot: Snapshot, given: Snapshot, draws: Draws) -> None:
        self.owner, self._parts = owner, (snapshot, given)
        self._num_scripts = owner.scripts.count()
        self._versions = [versions_of(snapshot.tensors), versions_of(given.tensors)]
        self._copies: list[dict[int, torch.Tensor]] = [{}, {}]  # of buffers, by position
        self._hides_writes = snapshot.hides_writes or given.hides_writes
        for part, copies in zip(self._parts, self._copies, strict=True):
            is_written = owner.writes_buffers or part.statistics
            copied: Iterable[int] = part.buffers if is_written else ()
            for number in range(len(part.tensors)) if self._hides_writes else copied:
                if not isinstance(part.tensors[number], Stale):
                    copies[number] = part.tensors[number].detach().clone()
        self._draws, self._are_own = draws, draws.are_own
        generators = [*draws.generators, *snapshot.generators, *given.generators]
        self._generators = list(zip(generators, map(draws.state, generators), strict=True))
        self._switches, self._default_device, self._autocast = _settings(draws.device)
        #: values of context variables, which a second run finds again, in any thread
        self.variables = contextvars.copy_context()

    def obstacle(self) -> str | None:
        """After the pass: why it cannot be recomputed from this state, or None."""
        # Its executor rewrites a function after the first calls, which then saves other tensors.
        if self.owner.scripts.count() != self._num_scripts:
            return "TorchScript runs in it"
        if any(map(_is_plain, map(type, (*function_modes(), *dispatch_modes())))):
            return "a mode of the program changes what functions do"
        for part in self._parts:
            if part.obstacle is not None:
                return part.obstacle
            if changed := part.changed():
                return f"its forward pass changes {changed}"
        for part, before, copies in zip(self._parts, self._versions, self._copies, strict=True):
            for number, version in enumerate(versions_of(part.tensors)):
                is_buffer, tensor = number in part.buffers, part.tensors[number]
                is_same = version == before[number] and number not in part.statistics
                if is_same and self._hides_writes and not isinstance(tensor, Stale):
                    # Buffers are read from copies anyway, without a wait for the device.
                    is_same = not is_buffer and _is_equal(tensor, copies[number])
                if is_same:
                    copies.pop(number, None)
                elif is_buffer and number in copies:
                    before[number] = -1  # the copy is read: later changes are harmless
                else:
                    self.owner.writes_buffers |= is_buffer
                    return f"its forward pass changes {part.names[number]}"
        self.owner.writes_buffers = any(self._copies)
        return None

    def check(self) -> None:
        """RecomputationError if the program has changed what cannot be put back."""
        for part, versions in zip(self._parts, self._versions, strict=True):
            if changed := part.changed():
                raise RecomputationError(
                    f"{changed}, which the forward pass of a block read, was changed before the "
                    "backward pass of the block, whose recomputation needs the old value: change "
                    "it after backward, or give the block use_checkpoint=False."
                )
            for where, tensor, version in zip(part.names, part.tensors, versions, strict=True):
                if version not in (-1, version_of(tensor)):
                    raise changed_in_place(where)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """The state of the beginning inside, then the present one again.

        Generators continue where the program left them: a recomputation draws nothing new.
        """
        is_intact = all(map(Snapshot.is_intact, self._parts))
        everything = [each for part in self._parts for each in part.held]
        changed = [] if is_intact else [x for x in everything if not x.is_unchanged()]
        now = [each.contents if is_intact else copy.copy(each.owner) for each in everything]
        # Copies of all buffers: batch norms write running statistics without counting it.
        own: dict[int, torch.Tensor] = {}
        for part, copies in zip(self._parts, self._copies, strict=True):
            for number in part.buffers:
                buffer = part.tensors[number]
                own[id(buffer)] = copies.get(number, buffer).detach().clone()
        for held in everything if own else ():
            if isinstance(held.contents, dict) and not own.keys().isdisjoint(
                map(id, held.contents.values())
            ):
                contents = {key: own.get(id(value), value) for key, value in held.contents.items()}
                changed.append(_Held(held.owner, contents))
        drawn = [(generator, self._draws.state(generator)) for generator, _ in self._generators]
        switches, device, autocast = _settings(self._draws.device)
        are_own = self._draws.are_own
        with contextlib.ExitStack() as stack:
            if device is not self._default_device:
                stack.enter_context(self._default_device or torch.device("cpu"))
            for kind, state in self._autocast.items():
                if state != autocast[kind]:
                    stack.enter_context(torch.autocast(kind, *state))
            try:
                self._draws.are_own = self._are_own
                _set(self._switches, switches)
                for (generator, state), (_, present) in zip(self._generators, drawn, strict=True):
                    if not is_same_state(state, present):
                        write_generator(generator, state)
                for each in changed:
                    each.put(each.contents)
                yield
            finally:
                self._draws.are_own = are_own
                if not (is_intact and all(map(Snapshot.is_intact, self._parts))):
                    for each, contents in zip(everything, now, strict=True):
                        if not _Held(each.owner, contents).is_unchanged():
                            each.put(contents)
                for generator, state in drawn:
                    if generator is not np.random or self._draws.state(generator) is not state:
                        write_generator(generator, state)
                _set(switches, [read() for read, _ in _SWITCHES])


def _set(wanted: Iterable[Any], present: Iterable[Any]) -> None:
    for (_, write), value, found in zip(_SWITCHES, wanted, present, strict=True):
        if value != found:
            write(value)


def _settings(
    device: torch.device,
) -> tuple[list[Any], DeviceContext | None, dict[str, tuple[torch.dtype, bool, bool]]]:
    """What is set now: switches, default device, and by kind of device autocast's dtype, whether it
    is enabled and whether it caches casts.
    """
    default, autocast = None, {}
    for mode in function_modes():  # the innermost is the last
        default = mode if isinstance(mode, DeviceContext) else default
    for kind in (device.type, "cpu"):
        state = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        autocast[kind] = (*state, torch.is_autocast_cache_enabled())
    return [read() for read, _ in _SWITCHES], default, autocast


def changed_in_place(where: str) -> RecomputationError:
    """The error for a tensor that a recomputation cannot read any more."""
    return RecomputationError(
        f"{where}, an input of a block's forward pass, was modified by an inplace operation "
        "before the backward pass of the block, whose recomputation needs the old value: change "
        "a clone of it, make it a buffer if the module itself changes it, or give the block "
        "use_checkpoint=False."
    )


def parts_with_blocks(module: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """A module and all below it, with their paths; each block is replaced by its inner module."""
    found: dict[int, tuple[str, torch.nn.Module]] = {}
    ways = [("", module)]
    while ways:
        path, module = ways.pop()
        inner = module.__dict__.get("_inner")
        if isinstance(module, DistributedModule) and inner is not None:
            module = inner
        if id(module) not in found:
            found[id(module)] = (path, module)
            children = reversed(module._modules.items())
            ways += [(f"{path}{name}.", child) for name, child in children if child is not None]
    return list(found.values())


def _without_graph(value: Any) -> Any:
    """Detach a tensor, or the tensors of a tuple.

    A module may store a result of its last pass. Keeping its graph would chain the graphs of all
    passes and keep every one resident.
    """
    if isinstance(value, torch.Tensor) and value.grad_fn is not None:
        return value.detach().requires_grad_()
    if isinstance(value, tuple) and any(isinstance(entry, torch.Tensor | tuple) for entry in value):
        return tuple.__new__(type(value), map(_without_graph, value))
    return value


def _is_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """NaN equals NaN. So do sparse and nested tensors, which torch does not compare, and meta."""
    with contextlib.suppress(NotImplementedError):
        is_equal = torch.equal(a, b)
        if is_equal or not a.is_floating_point() or a.shape != b.shape:
            return is_equal
        return bool(((a == b) | a.isnan() & b.isnan()).all())
    return True


def _contents(cell: types.CellType) -> tuple[Any]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # not filled yet
        return (_MISSING,)


def calls_batch_norm(module: torch.nn.Module) -> bool:
    """Whether a module normalises batches, by torch's forward pass or one of its own."""
    # Static: the class of a scripted module has none, and raises; nor has a weak proxy's.
    code = getattr(inspect.getattr_static(type(module), "forward", None), "__code__", None)
    return isinstance(module, BatchNorm) or (code is not None and "batch_norm" in names_in(code))


@functools.cache
def names_in(code: types.CodeType) -> list[Any]:
    """The names of globals and attributes in a function's code, inner functions included, and
    constants: a string may be a name.
    """
    inner = [x for x in code.co_consts if isinstance(x, types.CodeType)]
    names = [*code.co_names, *code.co_consts]
    return list(dict.fromkeys([*names, *(name for x in inner for name in names_in(x))]))


@functools.cache
def _globals_in(code: types.CodeType) -> list[Any]:
    """The names of globals and imports in a function's code, inner functions included."""
    inner = [x for x in code.co_consts if isinstance(x, types.CodeType)]
    kinds = ("_GLOBAL", "IMPORT_NAME")
    found = [x.argval for x in dis.get_instructions(code) if x.opname.endswith(kinds)]
    if not _READERS.isdisjoint(found):
        found += code.co_consts
    if not {"eval", "exec"}.isdisjoint(found):
        found += re.findall(r"\w+", str(code.co_consts[1:]))  # the first is no value
    return list(dict.fromkeys([*found, *(name for x in inner for name in _globals_in(x))]))


def _function_of(value: Any) -> Any:
    """The function behind a method, property or decorated function; None for anything else."""
    for name in ("__func__", "fget", "func", "__wrapped__"):
        if not isinstance(value, types.FunctionType):
            value = getattr(value, name, value)
    return value if isinstance(value, types.FunctionType) else None


def _is_data(value: Any) -> bool:
    code = (*_FUNCTIONS, type, types.ModuleType, property, staticmethod, classmethod, _CACHE)
    return value is not _MISSING and not isinstance(value, code)


def _is_plain(thing: Any) -> bool:
    """Whether a class, function or module is the program's."""
    name = (thing.__name__ if isinstance(thing, types.ModuleType) else thing.__module__) or ""
    return _FOREIGN.isdisjoint({name, name.partition(".")[0]}) or thing in _FOLLOWED


ModuleCall = Callable[[torch.nn.Module, tuple[Any, ...], dict[str, Any]], Any]


class Runner:
    """Runs modules as they are; compiled runners derive from it.

    Attributes:
        plain: a function of a module, its args and its kwargs: `module(*args, **kwargs)`.
        is_compiled: whether it runs compiled code.
    """

    is_compiled = False

    def __init__(self, plain: ModuleCall) -> None:
        self.plain = plain

    def accepts(self, modules: Sequence[torch.nn.Module], arguments: Iterable[Any]) -> bool:
        """Whether it can run this call; `modules` are the parts of one module."""
        return True

    def recomputing(self, level: Level) -> ModuleCall | None:
        """A function like `plain` that recomputes by itself and keeps what `level` says.

        None if the caller must, by `Recomputation`.
        """
        return None


def call(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`module(*args, **kwargs)` without hooks, which run for the block around it, as then does a
    `__call__` of the module's class.
    """
    if has_global_module_hooks() or any(hooks_of(module)):
        return module.forward(*args, **kwargs)
    return module(*args, **kwargs)


# Operators whose results CHEAP keeps. Attention is one operator per backend; its log-sum-exp is
# kept with its output.
_KEPT_OF_TORCH = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "convolution",
    "_scaled_mm",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable",
    "_flash_attention_forward",
    "_efficient_attention_forward",
)
# Operators of tensor-parallel layers: recomputing them would repeat their communication.
_KEPT_OF_RANKS = (
    "tp_gather_linear",
    "tp_linear_scatter",
    "tp_linear_reduce",
    "tp_scatter_rows",
    "tp_all_reduce",
)
_KEPT = frozenset(
    getattr(namespace, name).default
    for namespace, names in ((torch.ops.aten, _KEPT_OF_TORCH), (torch.ops.bmtrain, _KEPT_OF_RANKS))
    for name in names
)


def policy(
    context: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    """CHEAP as a policy for torch's selective checkpointing, which compiled code uses."""
    return CheckpointPolicy.MUST_SAVE if op in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


# Their results are views that count writes for themselves.
_UNCOUNTED = {torch.ops.aten.unsafe_split.Tensor, torch.ops.aten.unsafe_split_with_sizes.default}


class Selective:
    """One call at CHEAP: the first run keeps expensive results, runs in backward reuse them.

    Not of compiled code: a mode that catches operators does not reach into it.

    A result that the module has since changed in place is recomputed. So is one that drew random
    numbers: skipping the draw would shift the numbers of everything after it.

    Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models"
    (2022).
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        self._kept: dict[Any, deque[_Result]] = defaultdict(deque)

    def __call__(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """`module(*args, **kwargs)`."""
        kept, recalls = self._kept, in_backward()
        if recalls:
            # A run in backward may stop before it has consumed all results. With
            # `retain_graph=True` a second run would pop the leftovers in the place of its own.
            self.forget()
        with _Keeping(kept, recalls=recalls):
            return self._call(module, args, kwargs)

    def forget(self) -> None:
        """Drop kept results: runs in backward may call other operators than the first run."""
        self._kept = defaultdict(deque)

    def num_bytes(self) -> int:
        """Bytes of the results kept now."""
        return sum(result.num_bytes() for results in self._kept.values() for result in results)


class _Result:
    """The detached result of an operator, and the versions of its tensors."""

    def __init__(self, value: Any) -> None:
        # Below autograd `detach` gives a new version counter. `is_unchanged` needs the shared one,
        # or it misses in-place changes of the original.
        with sharing_versions():
            self.value = tree_map_only(torch.Tensor, torch.Tensor.detach, value)
        parts = self.value if isinstance(self.value, tuple | list) else [self.value]
        self._tensors = [x for x in parts if isinstance(x, torch.Tensor)]
        self._versions = [x._version for x in self._tensors]

    def forget_shared(self, tensor: torch.Tensor) -> None:
        """Parts of a tensor may be changed without its version: count it as changed."""
        memory = tensor.untyped_storage().data_ptr()
        if any(x.untyped_storage().data_ptr() == memory for x in self._tensors):
            self._versions = []

    def is_unchanged(self) -> bool:
        return [x._version for x in self._tensors] == self._versions

    def num_bytes(self) -> int:
        return sum(x.untyped_storage().nbytes() for x in self._tensors)


class _Keeping(TorchDispatchMode):
    """Keeps results, or, where it `recalls`, gives those that are there."""

    def __init__(self, kept: dict[Any, deque[_Result]], *, recalls: bool) -> None:
        super().__init__()
        self._kept, self._recalls = kept, recalls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # An attention with dropout draws numbers; a mode is given arguments by place.
        is_kept = func in _KEPT and not (
            torch.Tag.nondeterministic_seeded in func.tags
            and dict(zip(argument_names(func), args, strict=False)).get("dropout_p")
        )
        if is_kept and self._recalls and self._kept.get(func):
            result = self._kept[func].popleft()
            if result.is_unchanged():
                return result.value
        out = func(*args, **(kwargs or {}))
        if func in _UNCOUNTED:
            for result in itertools.chain.from_iterable(self._kept.values()):
                result.forget_shared(args[0])
        if is_kept and not self._recalls:
            self._kept[func].append(_Result(out))
        return out


# Runs the module on these arguments; the flag says that it runs again.
Body = Callable[[tuple[Any, ...], dict[str, Any], bool], Any]


@dataclasses.dataclass(eq=False)
class _Saved:
    """What autograd holds in the place of a saved tensor.

    Attributes:
        value: the tensor itself or its place among the parameters, while the first run goes on;
            then what is kept of it, if the call is not recomputed.
    """

    index: int
    shape: torch.Size
    dtype: torch.dtype
    value: torch.Tensor | Unpack | None


@dataclasses.dataclass(frozen=True, eq=False)
class _Input:
    """A tensor among the arguments, as it was."""

    kept: Unpack
    requires_grad: bool
    is_leaf: bool


class _Enough(BaseException):
    """All tensors that backward needs of a call, its argument, have been computed. No error:
    programs catch those.
    """


@dataclasses.dataclass(eq=False)
class Recomputation:
    """One call.

    Args:
        body: runs the module.
        begun: the state in which the call begins.
        use: of the parameters. Keeps what is saved, if the call is not recomputed.
        on_kept: called with the reason if the call is not recomputed.
    """

    body: Body
    begun: CallState
    use: Use
    on_kept: Callable[[str], None]
    # arguments by place or name; of a tensor an _Input
    _given: dict[int | str, Any] = dataclasses.field(default_factory=dict)
    _saved: list[weakref.ref[_Saved]] = dataclasses.field(default_factory=list)
    _values: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)

    @contextlib.contextmanager
    def first_run(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], keep: Callable[[torch.Tensor], Unpack]
    ) -> Iterator[None]:
        """Inside, `body` runs for the first time. `keep` keeps tensors among the arguments for the
        second run.
        """
        inputs: dict[int, _Input] = {}
        self._given = dict(itertools.chain(enumerate(args), kwargs.items()))
        for key, x in self._given.items():
            if isinstance(x, torch.Tensor):
                # A module may ask whether two arguments are one tensor, as attention does.
                if id(x) not in inputs:
                    inputs[id(x)] = _Input(keep(x), x.requires_grad, x.grad_fn is None)
                self._given[key] = inputs[id(x)]
        obstacle: str | None = "an error"
        try:
            with saved_tensors_hooks(self._pack, self._unpack):
                yield
            obstacle = self.begun.obstacle()
            self.begun.owner.is_repeatable = obstacle is None
            if obstacle is not None:
                self.on_kept(obstacle)
        finally:
            for reference in self._saved:
                saved = reference()
                if saved is not None and obstacle is None:
                    saved.value = None
                elif saved is not None and isinstance(saved.value, torch.Tensor):
                    saved.value = self.use.keep(saved.value)

    def _pack(self, tensor: torch.Tensor) -> _Saved:
        value = self.use.place_of(tensor) or tensor
        saved = _Saved(len(self._saved), tensor.shape, tensor.dtype, value)
        self._saved.append(weakref.ref(saved))
        return saved

    def _unpack(self, saved: _Saved) -> torch.Tensor:
        if saved.value is not None:
            return saved.value if isinstance(saved.value, torch.Tensor) else saved.value()
        if saved.index not in self._values:
            self._compute_again()
        found = self._values.pop(saved.index, None)
        if found is None or (found.shape, found.dtype) != (saved.shape, saved.dtype):
            self._values.clear()
            raise RecomputationError(
                "the recomputation of a block did not reproduce the tensors of its forward pass "
                f"({'none' if found is None else tuple(found.shape)} for {tuple(saved.shape)}): "
                "let it depend on its arguments, parameters and attributes alone, or give the "
                "block use_checkpoint=False."
            )
        return found

    def _arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments again, apart from the graph."""
        args, kwargs = list[Any](), dict[str, Any]()
        again: dict[_Input, torch.Tensor] = {}
        for key, given in self._given.items():
            x = given
            if isinstance(given, _Input):
                if given not in again:
                    try:
                        x = given.kept()
                    except RuntimeError as error:
                        if isinstance(given.kept, Kept):
                            raise changed_in_place(f"argument {key!r}") from error
                        raise
                    x = x.detach().requires_grad_(given.requires_grad)
                    again[given] = x if given.is_leaf else x.view_as(x)
                x = again[given]
            if isinstance(key, str):
                kwargs[key] = x
            else:
                args.append(x)
        return tuple(args), kwargs

    def _compute_again(self) -> None:
        self.begun.check()
        with torch.enable_grad():
            args, kwargs = self._arguments()
        wanted = {saved.index for ref in self._saved if (saved := ref()) is not None}
        # Not the last that is wanted: what the graph has dropped is up to each rank's collector,
        # and all ranks must come to the same collectives in the module.
        values, last, count = self._values, len(self._saved) - 1, itertools.count()
        values.clear()
        at_end_of_backward(values.clear)  # what no node has asked for would stay with the graph

        def catch(tensor: torch.Tensor) -> torch.Tensor:
            index = next(count)
            if index in wanted:
                values[index] = tensor.detach()
            if index == last:
                raise _Enough(self)
            return tensor.detach()

        hooks = saved_tensors_hooks(catch, lambda tensor: tensor)
        try:
            with torch.enable_grad(), self.begun.restored(), hooks:
                self.begun.variables.copy().run(self.body, args, kwargs, True)
        except _Enough as enough:
            if enough.args[0] is not self:
                raise
