"""Blocks that compile by default: one program per structure, eager if it is not one graph."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import functools
import logging
import traceback
import types
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from bmtrain.compile import backend
from bmtrain.compile.fp8 import call_in_fp8
from bmtrain.distributed.agreement import told_apart
from bmtrain.recompute.level import Level
from bmtrain.recompute.recomputation import (
    ModuleCall,
    Runner,
    Snapshot,
    Trial,
    call,
    parts_with_blocks,
    policy,
)
from bmtrain.runtime.log import warn
from bmtrain.runtime.mesh import Axis
from bmtrain.runtime.world import World
from bmtrain.shard.gradient import refuse_create_graph
from bmtrain.shard.parameter import DistributedParameter
from bmtrain.shard.unshard import before_backward_of
from bmtrain.torch_internals import (
    DeviceContext,
    function_modes,
    has_global_module_hooks,
    hooks_of,
    in_transform,
    is_of_compiler,
    is_tracing,
    next_node_number,
    num_dispatch_modes,
    patches_compiler,
    run_any_number,
    too_many_forms_error,
)


class Programs:
    """The structures of all modules that compile by default.

    One per run, reached through `world.service(Programs)`.
    """

    def __init__(self, world: World) -> None:
        self._structures: dict[Hashable, Structure] = {}
        self._warned: set[type] = set()
        self._tensor_ranks = world.mesh.tp

    def structure(
        self,
        module: torch.nn.Module,
        params: Sequence[DistributedParameter],
        fp8: bool,
        options: dict[str, Any],
    ) -> Structure:
        """The structure that `module` shares with modules of its class and parameters.

        Parameters are alike if shape, dtype and `requires_grad` are the same.

        Args:
            fp8: whether linear layers run in FP8.
            options: of torch.compile.

        Raises what torch.compile does for options that it does not know.
        """
        is_whole = not any(param.storage_of.placement.tensor_parallel for param in params)
        split = None if is_whole else self._tensor_ranks
        key = (
            type(module),
            fp8,
            split,
            tuple([(param._original_shape, param.dtype, param.requires_grad) for param in params]),
            tuple((x, repr(y) if isinstance(y, dict) else y) for x, y in sorted(options.items())),
        )
        if key not in self._structures:
            self._structures[key] = Structure(type(module), fp8, self._warned, split, options)
        return self._structures[key]


class Structure(Runner):
    """Runs modules that share compiled code, or that are known to run uncompiled. A failure to
    compile is never an error.

    Compiled code is used only where a backward pass follows. Modules that are not one graph, that
    communicate, or on which the compiler fails, run uncompiled. Each rank decides alone, before any
    operator of the module has run. Ranks may decide differently without a deadlock, because a block
    issues the same all-gathers and reduce-scatters whether it runs compiled or not. A module with
    tensor-parallel layers communicates by itself: the ranks of `split` decide together.
    """

    is_compiled = True

    def __init__(
        self, kind: type, fp8: bool, warned: set[type], split: Axis | None, options: dict[str, Any]
    ) -> None:
        super().__init__(functools.partial(self.run, call))
        self._class, self._warned, self._split = kind, warned, split
        if options:
            # For its checks, which it leaves out for a callable backend; with copies, as it pops
            # entries.
            own: dict[str, Any] = {
                x: dict(y) if isinstance(y, dict) else y for x, y in options.items()
            }
            torch.compile(call, **own)
        self._options = {**options}
        self._options.pop("fullgraph", None)
        lower = backend.find(self._options.pop("backend", "inductor"))
        at_once = backend.AtOnce(lower, split)
        self._lower: backend.Lower = backend.InFp8(at_once, kind.__name__) if fp8 else at_once
        self._uncompiled = call_in_fp8 if fp8 else call
        self._programs: dict[Hashable, Program] = {}
        self._methods = Methods()
        self._present: Hashable = ()  # methods of the last call
        self._is_refused = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Structure:
        return self  # a copy of a block shares the block's programs

    def recomputing(self, level: Level) -> ModuleCall:
        """`plain` with recomputation at `level` inside.

        A call that falls back to eager keeps its activations, so Python code of the module may run
        in backward.
        """
        return functools.partial(self.run, recomputing(level))

    def accepts(self, modules: Sequence[torch.nn.Module], arguments: Iterable[Any]) -> bool:
        """Whether this call of a module, with its submodules `modules`, can run compiled.

        Collective over `split`, in calls with gradients.
        """
        if not torch.is_grad_enabled():
            return False
        is_refused = self._is_refused or is_watched(modules)
        if not is_refused:
            try:
                self._present = self._methods.of(modules)
            except NoProgramError as error:
                self._is_refused = is_refused = True
                self._say(f"({error})")
        if not is_refused and (found := changing(arguments)) is not None:
            is_refused = True
            self._say(
                f"where it is given a {type(found).__name__}, whose contents change: leave caches "
                "out in training (use_cache=False)"
            )
        if self._split is not None:
            text = f"{self._class.__name__}: {is_refused}"
            is_refused |= told_apart(text, self._split, "tensor-parallel code") is not None
        return not is_refused

    def run(
        self,
        function: ModuleCall,
        module: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """`function(module, args, kwargs)` compiled, or `module(*args, **kwargs)` uncompiled.

        After a failure to compile, all calls of this structure run uncompiled.
        """
        key = (function, module.training, self._present)
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = Program(function, self._lower, options=self._options)
        first_node = next_node_number()
        try:
            out = program(module, args, kwargs)
        except backend.RanksDifferError as error:
            reason = f"({error})"
        except NoProgramError as error:
            reason = f"({error})"
            if self._split is not None:
                # Without it, the other tensor-parallel ranks would wait before they run their code.
                with contextlib.suppress(backend.RanksDifferError):
                    backend.same_code(reason, self._split, reason)
        else:
            before_backward_of(out, first_node, refuse_create_graph)
            return out
        # If the module itself raises here, the user sees its error, and the structure may still
        # compile: the compiler may have failed on this error alone.
        out = self._uncompiled(module, args, kwargs)
        self._is_refused = True
        self._say(reason)
        return out

    def _say(self, why: str) -> None:
        if self._class not in self._warned:
            self._warned.add(self._class)
            warn(
                f"{self._class.__name__} runs uncompiled {why}. Block(..., compile=False) "
                "says so from the start."
            )


class Methods:
    """The methods of classes that modules reach. Compiled code has them inside, and torch does not
    notice when a program exchanges one.
    """

    def __init__(self) -> None:
        self._classes: dict[Hashable, Sequence[type]] = {}  # by those of the modules

    def of(self, modules: Sequence[torch.nn.Module]) -> Hashable:
        """Equal as long as the methods are the same.

        Raises:
            NoProgramError: if the modules have what the compiler computes wrongly.
        """
        kinds = tuple(dict.fromkeys(map(type, modules)))
        classes = self._classes.get(kinds)
        if classes is None:
            found = Snapshot()
            found.add_modules(modules)
            for x in found.known.values():
                if isinstance(x, collections.deque) and x.maxlen is not None:
                    raise NoProgramError("torch's compiler drops the wrong entries of a full deque")
            bases = [base for kind in kinds for base in kind.__mro__]
            classes = list({*found.classes, *bases} - {object, torch.nn.Module})
            self._classes[kinds] = classes
        return tuple(
            [x for kind in classes for x in vars(kind).values() if type(x) in _KINDS_OF_METHODS]
        )


_KINDS_OF_METHODS = (types.FunctionType, property, staticmethod, classmethod)


class NoProgramError(RuntimeError):
    """A call has no compiled code. None of its operators has run."""


class TooManyFormsError(NoProgramError):
    """The function has reached torch's recompile limit."""


class CompiledOnly(Exception):
    """Compiled code exists, and nothing of it has run."""


class Gate:
    """A compiler backend whose new code raises CompiledOnly instead of running while it is shut."""

    def __init__(self, lower: backend.Lower) -> None:
        self._lower = lower
        self.is_shut = True

    def __call__(
        self, graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor], **options: Any
    ) -> backend.Lowered:
        """Lower the graph."""
        lowered, is_new = self._lower(graph, inputs, **options), True

        def run(*arguments: Any) -> Any:
            nonlocal is_new
            if is_new and self.is_shut:
                raise CompiledOnly
            is_new = False
            return lowered(*arguments)

        return run

    def run(
        self,
        program: Program,
        module: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        params: Sequence[torch.Tensor],
        runs: bool,
    ) -> Any:
        """Run a call whose new code runs as a trial: the module may keep one of its parameters,
        `params`, which are gathered copies.

        Raises:
            NoProgramError: if there is no code for it, or if it does. Nothing has happened then.
            CompiledOnly: if there is new code, and not `runs`.
        """
        try:
            return program(module, args, kwargs)
        except CompiledOnly:
            if not runs:
                raise
        trial = Trial([part for _, part in parts_with_blocks(module)], (*args, *kwargs.values()))
        self.is_shut = False
        try:
            out = program(module, args, kwargs)
        finally:
            self.is_shut = True
        if trial.keeps(params):
            trial.undo(type(module).__name__)
            raise NoProgramError("its forward pass keeps a parameter")
        return out


class Program:
    """Compiled code of one structure, for one function and training mode.

    The shapes of the first call's tensors have a compiled function of their own, which stays
    specialised to them, and so have those of the next `num_special - 1` other ones. One function
    serves all other shapes. In that, sizes become dynamic once they vary, and so do integer
    attributes of modules (layer indices for example).

    Args:
        function: what is compiled.
        lower: the compiler backend.
        num_special: numbers of shapes with a function of their own.
        special: options of torch.compile for those functions.
        options: for all.
    """

    def __init__(
        self,
        function: ModuleCall,
        lower: backend.Lower,
        num_special: int = 1,
        special: dict[str, Any] | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        self._function, self._num_special = function, num_special
        compiled = functools.partial(
            torch.compile, fullgraph=True, backend=lower, **(options or {})
        )
        self._compiled = functools.partial(compiled, **(special or {}))
        self._special: dict[Hashable, Any] = {}  # by shapes
        self._of_others = compiled(_copy(run_any_number if patches_compiler() else _run))

    def __call__(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the call through compiled code.

        Raises:
            NoProgramError: if there is none. Nothing has happened then.
        """
        given = (*args, *kwargs.values())
        shapes = tuple([arg.shape if isinstance(arg, torch.Tensor) else None for arg in given])
        if shapes not in self._special and len(self._special) < self._num_special:
            self._special[shapes] = self._compiled(_copy(_run))
        compiled = self._special.get(shapes)
        if compiled is not None:
            try:
                return _run_or_refuse(compiled, self._function, module, args, kwargs)
            except TooManyFormsError:
                self._special[shapes] = None
        return _run_or_refuse(self._of_others, self._function, module, args, kwargs)


def _copy(function: Any) -> Any:
    return types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)


def _run(
    function: ModuleCall, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    return function(module, args, kwargs)


def _run_or_refuse(compiled: Callable[..., Any], *arguments: Any) -> Any:
    """Run compiled code.

    Raises:
        NoProgramError: if the compiler fails, which happens before any operator has run.
        RanksDifferError: if tensor-parallel ranks would run different code. None has run.
    """
    try:
        return compiled(*arguments)
    except too_many_forms_error() as error:
        raise TooManyFormsError("its arguments or attributes change too often") from error
    except backend.RanksDifferError:
        raise
    except Exception as error:
        # Most errors of the compiler have a class of their own; the others have it in their
        # traceback.
        frames = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
        if not is_of_compiler(error, frames):
            raise
        cause = getattr(error, "inner_exception", None) or error
        lines = str(cause).strip().splitlines() or [""]
        raise NoProgramError(f"{type(cause).__name__}: {lines[0]}") from error


def changing(arguments: Iterable[Any]) -> Any:
    """The first argument that is a mutable object, a cache for example; None if there is none.

    Compiled code would be specialised to its current contents.
    """
    for value in arguments:
        if isinstance(value, tuple | list | dict):
            found = changing(value.values() if isinstance(value, dict) else value)
        else:
            is_record = dataclasses.is_dataclass(value) or type(value).__module__.startswith(
                "torch."
            )
            found = None if isinstance(value, _FIXED) or callable(value) or is_record else value
        if found is not None:
            return found
    return None


_FIXED = (
    *(torch.Tensor, torch.nn.Module, type(None), bool, int, float, complex, str, bytes, range),
    *(slice, type, enum.Enum),
)


def is_watched(modules: Sequence[torch.nn.Module]) -> bool:
    """Whether hooks, modes or a tracer observe the computation; compiled code may bypass them."""
    return (
        num_dispatch_modes() > 0
        or any(not isinstance(mode, DeviceContext) for mode in function_modes())
        or in_transform()
        or torch.compiler.is_compiling()
        or is_tracing()
        or bool(has_global_module_hooks())
        or any(any(hooks_of(module)) for module in modules)
    )


def _call_recomputed(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return checkpoint(module, *args, use_reentrant=False, **kwargs)


def _call_recomputed_cheaply(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    return checkpoint(module, *args, use_reentrant=False, context_fn=_CHEAPLY, **kwargs)


class _Policy(functools.partial[Any]):
    """A `context_fn` with a name for the key of torch's cache: torch caches none without."""

    cache_hash = f"{policy.__module__}.{policy.__name__}"


_CHEAPLY = _Policy(create_selective_checkpoint_contexts, policy)


@functools.cache
def _hush() -> None:
    """Silence torch's warning about unchecked in-place operators; this package's tests cover them.

    torch gives it once for each `checkpoint` with a context_fn.
    """
    logging.getLogger("torch._higher_order_ops.wrap").addFilter(
        lambda record: "context_fn" not in record.getMessage()
    )


def recomputing(level: Level) -> ModuleCall:
    """What compiled code runs at a level: a function of module, args and kwargs."""
    if level is Level.NOTHING:
        return call
    _hush()
    return _call_recomputed if level.is_whole() else _call_recomputed_cheaply
