"""Block: a module whose parameters are sharded together and gathered while it runs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import operator
import re
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from bmtrain.block.adopt import (
    adopt,
    move_buffers,
    move_to_stage,
    open_slots,
    places_of,
    share_buffers,
)
from bmtrain.block.binding import Binding, ParameterTable
from bmtrain.block.context import Context
from bmtrain.block.shardable import check_shardable
from bmtrain.compile.fp8 import call_in_fp8, check_fp8, marked
from bmtrain.compile.programs import Structure
from bmtrain.errors import ConfigurationError
from bmtrain.recompute.host_state import HostState, parts_with_blocks, spare_buffers
from bmtrain.recompute.level import Level, level_of
from bmtrain.recompute.offload import is_movable
from bmtrain.recompute.plan import Option
from bmtrain.recompute.planner import Subject
from bmtrain.recompute.probe import Trials, measure
from bmtrain.recompute.recomputation import ModuleCall, Recomputation, Runner, Selective
from bmtrain.recompute.recomputation import call as call_module
from bmtrain.runtime import world
from bmtrain.runtime.log import warn
from bmtrain.shard.gradient import ShardPolicy
from bmtrain.shard.module import DistributedModule, has_blocks
from bmtrain.shard.outputs import PLAIN, before_backward_of, map_tensors, tied_to
from bmtrain.shard.parameter import DistributedParameter
from bmtrain.shard.sharded import ordinary
from bmtrain.shard.storage import Storage
from bmtrain.shard.unshard import Kept, Use, refuse_transforms
from bmtrain.torch_internals import (
    has_global_module_hooks,
    hooks_of,
    in_backward,
    next_node_number,
    untraced,
)

MODES = ("BLOCK", "PIPE")
# Block and inner module share these: calling, saving and loading go through the block, and hooks
# may be registered on either.
_SHARED_HOOKS = [name for name in vars(torch.nn.Module()) if "_hooks" in name]
# Methods of any module.
_METHODS = {x for x, found in vars(torch.nn.Module).items() if x[0] != "_" and callable(found)}


@dataclasses.dataclass
class BlockCall:
    """One call. Holds no arguments: it lives as long as the graph of the call, and would keep
    inputs resident that are recomputed or offloaded to the host.

    table, use: the sharded parameters, and what gathers them. runner, run: what runs the module,
    and its function for this call.
    """

    table: ParameterTable
    use: Use
    runner: Runner
    run: ModuleCall


class _Method(NamedTuple):
    """A method of any module, which an attribute or the class of the inner module may replace."""

    name: str

    def __get__(self, block: Block | None, kind: type) -> Any:
        own = getattr(DistributedModule, self.name)
        if block is None:
            return own
        inner = vars(block)["_inner"]
        found = inspect.getattr_static(inner, self.name)
        if self.name in vars(inner) or not isinstance(found, types.FunctionType):
            return getattr(inner, self.name)
        is_own = found is vars(torch.nn.Module)[self.name]
        return types.MethodType(own if is_own else found, block)


def _of_inner(function: Any) -> Callable[..., Any]:
    """A method of blocks that is the function of the inner module."""

    def method(self: Block, *args: Any) -> Any:
        return function(self._inner, *args)

    return method


class _WithMethods(DistributedModule):
    """Not in the body of Block: before Python 3.13, `vars` there would drop its `__class__`."""

    vars().update({name: _Method(name) for name in _METHODS - {"state_dict"}})


class Block(_WithMethods):
    """`Block(module)` computes what `module` computes, with its parameters sharded over ranks.

    Args:
        inner_module: any module; its parameters may be plain (on the CPU, on meta or on the rank's
            device) or distributed. It is changed in place: its parameters become this rank's
            shards.
        use_checkpoint: True recomputes the forward pass during backward instead of keeping
            activations, False keeps them, a Level says what is kept, "auto" recomputes what does
            not fit into the memory limit. Dropout replays exactly.
        zero_level: 3 releases full parameters after forward and gathers them again for backward, 2
            keeps them in between; None takes the default given to `init_distributed`.
        mode: "BLOCK" (or "PIPE", the same here), accepted from BMTrain programs.
        reduce_dtype: dtype in which gradients are summed over ranks; None takes the default.
        accumulate_dtype: dtype in which gradients of micro-batches add up; None takes the default.
        compile: whether calls with gradients run compiled code where the module compiles as one
            graph; None takes the default.
        fp8: whether linear layers compute in FP8, on GPUs that have it; None takes the default.

    The state dict, parameters, buffers and attributes have the names of the inner module.

    Raises:
        NotInitializedError: before `init_distributed`.
        ConfigurationError, ParameterError: for arguments or parameters that cannot work; the
            message names them.

    Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
    Models" (2020).
    """

    is_block = True
    _inner: Any
    _module = property(operator.attrgetter("_inner"))  # BMTrain's name

    def __init__(
        self,
        inner_module: torch.nn.Module,
        use_checkpoint: bool | str | Level = True,
        zero_level: int | None = None,
        mode: str = "BLOCK",
        *,
        reduce_dtype: torch.dtype | None = None,
        accumulate_dtype: torch.dtype | None = None,
        compile: bool | None = None,
        fp8: bool | None = None,
    ) -> None:
        self._context = context = world.current("Block").service(Context)
        super().__init__()
        if not isinstance(inner_module, torch.nn.Module):
            raise ConfigurationError(
                f"Block got {type(inner_module).__name__}: expected a torch.nn.Module."
            )
        if mode not in MODES:
            raise ConfigurationError(
                f"Block got mode {mode!r}: expected one of {', '.join(MODES)}."
            )
        defaults = context.defaults
        self._policy = ShardPolicy(
            zero_level=defaults.zero_level if zero_level is None else zero_level,
            reduce_dtype=reduce_dtype or defaults.reduce_dtype,
            accumulate_dtype=accumulate_dtype or defaults.accumulate_dtype,
        )
        _, inner = parts_with_blocks(inner_module)[0]
        # Not registered as a child: nn.Module would prefix its names. Sharing its dicts exposes its
        # parameters, buffers and children under their own names.
        self.__dict__["_inner"] = inner
        open_slots(inner)
        self._parameters, self._buffers, self._modules = (
            inner._parameters,
            inner._buffers,
            inner._modules,
        )
        self._non_persistent_buffers_set = inner._non_persistent_buffers_set
        for name in _SHARED_HOOKS:
            self.__dict__[name] = inner.__dict__[name]
        for name in ("training", "_is_full_backward_hook"):
            del self.__dict__[name]  # read from the inner module
        self.use_checkpoint = use_checkpoint
        self._fp8 = check_fp8(defaults.fp8 if fp8 is None else fp8, context.device)
        #: whether a call without gradients does nothing but gather and call the module
        self.runs_plainly = not self._fp8
        if not isinstance(compile, bool | None):
            raise ConfigurationError(
                f"compile is {compile!r}: expected True, False, or None for the default of "
                "init_distributed."
            )
        self._compiles = defaults.compile if compile is None else compile
        #: of torch.compile; None if it does not compile
        self._options: dict[str, Any] | None = {} if self._compiles else None
        self._eager = Runner(call_in_fp8 if self._fp8 else call_module)
        self._runner: Runner = self._eager
        self._shown: str | None = None
        self._stage: int | None = None  # pipeline stage; None outside of a pipeline
        self._shared: Use | None = None  # one use for all calls inside `together`
        #: puts full tensors in the place of the parameters: calls are those of the module then
        self.binding = Binding(functools.partial(parts_of, inner))
        self._host_state = HostState(functools.partial(parts_with_blocks, inner), context.scripts)
        self.shard()
        self._is_made = True

    @untraced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the inner module with its hooks and the block's, which are the same.

        Hooks run inside of a `__call__` of the module's class. `_forward` sets whose random numbers
        are drawn, as DistributedModule does here.
        """
        run = type(self._inner).__call__
        is_hooked = has_global_module_hooks() or any(hooks_of(self))
        if run is DistributedModule.__call__ or not is_hooked:
            run = torch.nn.Module.__call__
        return run(self, *args, **kwargs)

    def may_run_whole(self, is_asked: bool) -> bool:
        """Whether nothing was set for it but that activations are kept, or "auto"; if the program
        has asked for one graph, whether the block may be compiled.
        """
        is_default = isinstance(self._runner, Structure) or self._holds_blocks
        is_default = is_default and not self._options and self._level in (None, Level.NOTHING)
        return self._compiles and (is_asked or is_default)

    @property
    def storages(self) -> Sequence[Storage]:
        """The storages that are gathered for this block."""
        return self.binding.table().storages

    def shard(self) -> None:
        """Shard the parameters that are not sharded yet, those of new modules too. Collective."""
        context = self._context
        open_slots(self._inner)
        parts = self._parts()
        places = list(places_of(parts))
        new = [
            (place.path, place.value)
            for place in places
            if not isinstance(place.value, DistributedParameter)
        ]
        check_shardable(new, context.engine)
        context.sameness.check(new)
        adopt(places, self._policy, context.converted)
        for _, part in parts:
            move_buffers(part, context.device)
        self._holds_blocks = has_blocks(self._inner)
        if self._stage is not None:
            self.move_to_stage(self._stage)
        if self._options is None or self._holds_blocks:
            self._runner = self._eager
        else:
            self._runner = self._structure(self._options)

    def _structure(self, options: dict[str, Any]) -> Structure:
        params = [param for _, param in self.binding.table()]
        structure = self._context.programs.structure
        return structure(self._inner, params, bool(self._fp8), options)

    def _parts(self) -> list[tuple[str, torch.nn.Module]]:
        """The inner module and its plain descendants, with their paths."""
        return parts_of(self._inner)

    @property  # type: ignore[misc]  # never assigned
    def __class__(self) -> type:
        """The inner module's class: a block around a Layer is an instance of Block and Layer."""
        return self._inner.__class__

    def _get_name(self) -> str:
        return "Block"

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_inner":
                raise
            return getattr(self._inner, name)

    # A list or table of modules, as torch.nn.Sequential, is used as one by the module it is in. As
    # a key, of dicts that hooks look into, the block is its module.
    __getitem__, __setitem__, __delitem__, __iter__, __len__, __contains__, __bool__ = map(
        _of_inner,
        (operator.getitem, operator.setitem, operator.delitem, iter, len, operator.contains, bool),
    )
    __hash__, __eq__ = map(_of_inner, (hash, operator.eq))

    def __setattr__(self, name: str, value: Any) -> None:
        own = self.__dict__
        if name == "use_checkpoint":
            own["_level"] = level_of(value)
        if "_is_made" not in own or (
            name != "_inner" and (name in own or name in own["_parameters"])
        ):
            super().__setattr__(name, value)
        else:
            self._inner.__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if name != "_inner" and name in self.__dict__:
            super().__delattr__(name)
        else:
            self._inner.__delattr__(name)

    def sharded_modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """The inner module and its plain descendants, with their paths.

        Leaves out distributed modules, which save and load their own parameters.
        """
        yield "", self._inner
        for path, module in self._parts():
            if module is not self._inner and not isinstance(module, DistributedModule):
                yield path, module

    @property
    def forward(self) -> Callable[..., Any]:  # type: ignore[override]  # assignments go through __setattr__
        """Computes what the inner module computes for the same arguments.

        A function assigned here becomes the inner module's `forward`.
        """
        return functools.partial(self._forward, self._inner.forward)

    def _forward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.binding.is_running:  # a replacement of `forward` calls `original` from inside
            return original(*args, **kwargs)
        table = self.binding.table()
        if table.is_replaced:
            return original(*args, **kwargs)
        refuse_transforms()
        if not PLAIN.issuperset(map(type, (*args, *kwargs.values()))):
            args, kwargs = map_tensors(ordinary, (args, kwargs))
        use = Use(table.storages) if self._shared is None else self._shared
        if use.storages is not table.storages:
            raise RuntimeError(
                "the parameters of a block changed while its calls were made together"
            )
        # Recorders cannot see tensors inside compiled code. The choice is made once per call:
        # recomputation runs what forward ran, even if recording has stopped by then.
        runner = self._runner
        if runner is not self._eager and (
            self._context.recorder.is_listening
            or not runner.accepts([part for _, part in self._parts()], (*args, *kwargs.values()))
        ):
            runner = self._eager
        call = BlockCall(table, use, runner, runner.plain)
        level = self._level if torch.is_grad_enabled() else Level.NOTHING
        if level is None and use.hooks is not None:
            # What they do with what is kept is their business: they recompute it, or move it. Once
            # more the same level, if they are those of a checkpoint.
            level = Level.NOTHING
        draws = self._context.draws
        draws_own = self._inner.training and not (draws.are_own or self._holds_blocks)
        with draws.own() if draws_own else contextlib.nullcontext():
            # During an outer block's recomputation this call belongs to no pass of the planner.
            if level is None and not in_backward():
                return self._run_as_planned(call, args, kwargs)
            # Hold the buffers if compiled code falls back in the middle of the call: without it the
            # fallback gathers a second time, and ranks that did not fall back never join: a hang.
            with use.running():
                return self._run_at(level or Level.BLOCK, call, args, kwargs)

    def _run_as_planned(
        self, call: BlockCall, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        context = self._context
        axis = context.mesh.world if self._stage is None else context.mesh.pp_zero
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        subject = Subject(
            block=self,
            kind=self._kind(call, tensors),
            shape=tuple([dim for x in tensors for dim in x.shape]),
            num_dims=tensors[0].dim() if tensors else 0,
            # A measuring run must not appear in the recording, nor change what a pass reads.
            options=None
            if context.recorder.is_listening or self._is_repeatable(call) is None
            else functools.partial(self._measure, call, args, kwargs),
        )
        first_node = next_node_number()
        planner = context.planners.of(axis)
        try:
            with call.use.running():  # one gather for measuring and running
                turn = planner.next(subject)
                out = self._run_at(turn.level, call, args, kwargs)
        except Exception:
            planner.abort()
            raise
        before_backward_of(out, first_node, functools.partial(planner.turn_back, turn))
        return out

    def _measure(
        self,
        call: BlockCall,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        levels: Sequence[Level],
    ) -> dict[Level, Option]:
        """The cost of a call at each level, measured on the parameters that its use holds."""
        if self._holds_blocks or not self._is_repeatable(call):
            # Inner blocks communicate: not to be run by one rank for itself.
            return {Level.BLOCK: Option(0, 0, 0.0)}
        use = call.use
        # Views, not detached tensors: `detach` hides that parameters share one buffer, and the
        # compiler then takes such inputs for mutated.
        with torch.no_grad():
            views = [view.view_as(view) for view in use.gather_views()]
        for view, flag in zip(views, use.trainable, strict=True):
            view.requires_grad_(flag)
        begun = self._host_state.begin(args, kwargs, self._context.draws)
        trials = Trials(self._inner, call.runner, self._host_state, begun)
        with self.binding.running(call.table, views, is_compiled=call.runner.is_compiled):
            return measure(trials, levels, views, args, kwargs)

    def _is_repeatable(self, call: BlockCall) -> bool | None:
        """Whether a call can run a second time; None if that is not known yet."""
        return call.runner.is_compiled or self._holds_blocks or self._host_state.is_repeatable

    def _kind(self, call: BlockCall, tensors: Sequence[torch.Tensor]) -> object:
        """What determines how much a call keeps, apart from shapes."""
        if self._shown is None:
            self._shown = re.sub(r" at 0x[0-9a-f]+", "", repr(self._inner))
        arguments = [(x.requires_grad, x.is_leaf, x.dtype) for x in tensors]
        trainable = call.use.trainable
        return (
            self._shown,
            self._inner.training,
            call.runner.is_compiled,
            len(trainable),
            sum(trainable),
            *arguments,
        )

    def _run_at(
        self, level: Level, call: BlockCall, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the call, and connect its output to the graph.

        On several ranks, backward from any output then reaches this call's gathers and reduction,
        as it does on the other ranks: a rank that skipped them would hang the others. Before
        backward enters the call, its full parameters are lent to the module.
        """
        first_node = next_node_number()
        runner, use, context = call.runner, call.use, self._context
        moved: list[torch.Tensor] = []
        if level is Level.OFFLOADED:
            moved = [x for x in args if isinstance(x, torch.Tensor) and is_movable(x)]
        inside = runner.plain if level is Level.NOTHING else runner.recomputing(level)
        if inside is not None:
            call.run = inside
            hooks = use.saving() if torch.is_grad_enabled() else contextlib.nullcontext()
            if moved:
                hooks = context.pinned.saving(moved, use.keep)
            out, views = self._compute(call, hooks, args, kwargs)
        else:
            results, call.run = None, runner.plain
            if level is Level.CHEAP and not runner.is_compiled:
                call.run = results = Selective(runner.plain)
            begun = self._host_state.begin(args, kwargs, context.draws)
            body = functools.partial(self._compute, call, contextlib.nullcontext())
            keep = functools.partial(self._warn_of_keeping, results)
            recomputation = Recomputation(body, begun, use.place_of, use.keep, keep)
            saving = context.pinned.saving(moved, Kept) if moved else contextlib.nullcontext()
            with recomputation.first_run(args, kwargs, saving):
                out, views = body(args, kwargs)
        if not torch.is_grad_enabled():
            return out
        end, tied = next(itertools.compress(views, use.trainable), None), out
        if call.table.are_copies:
            again = use.is_gathered_again
            tied = tied_to(end, out, (args, kwargs), first_node, is_gathered_again=again)
        bind = functools.partial(self.binding.lend, call.table, marked if self._fp8 else list)
        node = None if end is None else end.grad_fn
        before_backward_of(tied, first_node, functools.partial(use.lend, bind, node))
        return tied

    def _warn_of_keeping(self, results: Selective | None, reason: str) -> None:
        """The call is not recomputed: its tensors are kept, so results need not be."""
        if results is not None:
            results.forget()
        name = type(self._inner).__name__
        if name not in self._context.kept:
            self._context.kept.add(name)
            warn(
                f"{name} keeps its activations, as with use_checkpoint=False, where {reason}: "
                "computing it again would give other values."
            )

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Calls inside share one gather, and one reduction after all their backward passes.

        For the micro-batches of one pass. The gathered parameters must stay resident from forward
        to backward (ZeRO-2).
        """
        self._shared = Use(self.storages)
        try:
            with self._shared.together():
                yield
        finally:
            self._shared = None

    def move_to_stage(self, stage: int) -> None:
        """Keep the parameters on the ranks of one pipeline stage, as ZeRO-2. Collective."""
        self._stage = stage
        move_to_stage(
            list(places_of(self._parts())), stage, dataclasses.replace(self._policy, zero_level=2)
        )

    def settle_buffers(self) -> None:
        """Copy buffers from the stage that runs the block to the other stages. Collective."""
        if self._stage is not None:
            share_buffers([part for _, part in self._parts()], self._stage, self._context.mesh.pipe)

    def _compute(
        self,
        call: BlockCall,
        hooks: contextlib.AbstractContextManager[object],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        is_again: bool = False,
    ) -> tuple[Any, list[torch.Tensor]]:
        """Run the module on gathered parameters.

        Args:
            is_again: only what autograd saves is wanted.

        Returns:
            The output and the gathered parameters.
        """
        use = call.use
        # A checkpoint around the block runs it in backward.
        buffers = (
            spare_buffers([part for _, part in self._parts()])
            if in_backward() and not is_again
            else contextlib.nullcontext()
        )
        with use.running(), buffers:
            views = use.gather_views() if is_again else use.gather_in_graph()
            # Leaves, so that the second run saves what the first has saved; its graph is dropped.
            if is_again:
                flags = zip(views, use.trainable, strict=True)
                views = [view.detach().requires_grad_(flag) for view, flag in flags]
            with (
                self.binding.running(call.table, views, is_compiled=call.runner.is_compiled),
                hooks,
            ):
                return call.run(self._inner, args, kwargs), views

    def compile(self, **options: Any) -> None:
        """Compile the inner module; `options` are the keywords of torch.compile.

        Blocks of equal structure share the compiled code.
        """
        self._runner = self._structure(options)
        self._options = options

    def train(self, mode: bool = True) -> Block:
        """Set the mode through the inner module, whose `train` may be overridden."""
        self._inner.train(mode)
        return self

    def extra_repr(self) -> str:
        """The inner class and the checkpoint setting."""
        return f"{type(self._inner).__name__}, use_checkpoint={self.use_checkpoint}"


CheckpointBlock = Block


def parts_of(module: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """A module and what is below it outside of other blocks, with their paths."""
    return list(_plain_subtree("", module))


def _plain_subtree(path: str, module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    yield path, module
    for name, child in module._modules.items():
        if child is not None and not isinstance(child, Block):
            yield from _plain_subtree(f"{path}{name}.", child)
