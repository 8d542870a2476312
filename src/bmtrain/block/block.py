"""Block: a module whose parameters are sharded together and gathered while it runs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from bmtrain.block.adopt import Converted, adopt, move_buffers, move_to_stage, places_of, share_buffers
from bmtrain.block.binding import Binding, Slice, storages_of
from bmtrain.block.compiled import CompiledModule, SeveralGraphsError
from bmtrain.block.replay import Replay, spare_buffers
from bmtrain.errors import ConfigurationError
from bmtrain.runtime import world
from bmtrain.shard.backward import in_backward
from bmtrain.shard.module import DistributedModule
from bmtrain.shard.recording import Recorder
from bmtrain.shard.storage import ShardPolicy, Storage
from bmtrain.shard.unshard import Use

MODES = ("BLOCK", "PIPE")
# Registered on either the block or the inner module, they work for both: saving and loading go through the block.
_STATE_HOOKS = (
    "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip
Call = Callable[[torch.nn.Module, tuple[Any, ...], dict[str, Any]], Any]


@dataclasses.dataclass(frozen=True)
class _Run:
    """How a call runs: the slices that full tensors replace, who gathers those, what computes with them.

    packs: whether autograd saves tensors of this run until backward.
    lends: whether Python code of the module may run in backward, hooks and recomputation inside it, and need full parameters.
    """

    slices: list[Slice]
    use: Use
    call: Call
    packs: bool
    lends: bool = True


class Block(DistributedModule):
    """`Block(module)` computes what `module` computes, with its parameters sharded over ranks.

    Args:
        module: any module; its parameters may be plain (on the CPU, on meta or on the rank's device) or distributed. It is
            changed in place: its parameters become this rank's slices.
        use_checkpoint: recompute the forward pass during backward instead of keeping activations; dropout replays exactly.
        zero_level: 3 releases full parameters after forward and gathers them again for backward, 2 keeps them in between;
            None takes the default given to `init_distributed`.
        mode: "BLOCK" (or "PIPE", the same here), accepted from BMTrain programs.
        reduce_dtype: dtype in which gradients are summed over ranks; None takes the default.
        accumulate_dtype: dtype in which gradients of micro-batches add up; None takes the default.

    Names in the state dict, parameters, buffers and attributes are those of the inner module.

    Raises:
        NotInitializedError: before `init_distributed`.
        ConfigurationError, ParameterError: for arguments or parameters that cannot work; the message names them.

    Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020).
    """

    def __init__(
        self,
        module: torch.nn.Module,
        use_checkpoint: bool = True,
        zero_level: int | None = None,
        mode: str = "BLOCK",
        *,
        reduce_dtype: torch.dtype | None = None,
        accumulate_dtype: torch.dtype | None = None,
    ) -> None:
        current = world.current("Block")
        super().__init__()
        if not isinstance(module, torch.nn.Module):
            raise ConfigurationError(f"Block got {type(module).__name__}: expected a torch.nn.Module.")
        if mode not in MODES:
            raise ConfigurationError(f"Block got mode {mode!r}: expected one of {', '.join(MODES)}.")
        defaults = current.defaults
        self._policy = ShardPolicy(
            zero_level=defaults.zero_level if zero_level is None else zero_level,
            reduce_dtype=reduce_dtype or defaults.reduce_dtype,
            accumulate_dtype=accumulate_dtype or defaults.accumulate_dtype,
        )
        inner = module._inner if isinstance(module, Block) else module
        # A list hides the module from nn.Module, which would prefix its names; sharing its dicts shows its children as ours.
        self._hidden = [inner]
        self._parameters, self._buffers, self._modules = inner._parameters, inner._buffers, inner._modules
        self._non_persistent_buffers_set = inner._non_persistent_buffers_set
        for name in _STATE_HOOKS:
            self.__dict__[name] = inner.__dict__[name]
        del self.__dict__["training"]  # asked of the inner module
        self.use_checkpoint = use_checkpoint
        self._compiled: CompiledModule | None = None
        self._stage: int | None = None  # of the pipeline; None outside of one
        self._shared: Use | None = None  # of the calls that are made together
        self._binding = Binding(functools.partial(_parts_of, inner))
        self.shard()
        self._is_made = True

    @property
    def _inner(self) -> torch.nn.Module:
        hidden: list[torch.nn.Module] = self._hidden
        return hidden[0]

    @property
    def storages(self) -> Sequence[Storage]:
        """The storages that are gathered for this block."""
        return storages_of(self._binding.slices())

    def shard(self) -> None:
        """Shard the parameters that are not yet: those of modules that have been put in since, too. Collective."""
        current = world.current("Block")
        parts = self._parts()
        adopt(list(places_of(parts)), self._policy, current.service(Converted))
        for _, part in parts:
            move_buffers(part, current.device)
        if self._stage is not None:
            self.move_to_stage(self._stage)

    def _parts(self) -> list[tuple[str, torch.nn.Module]]:
        """The inner module and its plain descendants, by path."""
        return _parts_of(self._inner)

    @property  # type: ignore[misc]  # never assigned
    def __class__(self) -> type:
        """The inner module's: `isinstance(block, Layer)` is true of a block around a Layer, as `isinstance(block, Block)` is."""
        return self._inner.__class__

    def _get_name(self) -> str:
        return "Block"

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_hidden":
                raise
            return getattr(self._inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        own = self.__dict__
        if "_is_made" not in own or name in own or name in own["_parameters"]:
            super().__setattr__(name, value)
        else:
            self._inner.__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__:
            super().__delattr__(name)
        else:
            self._inner.__delattr__(name)

    def sharded_modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """The inner module and its plain descendants; distributed modules among them save and load their own parameters."""
        yield "", self._inner
        for path, module in self._parts():
            if module is not self._inner and not isinstance(module, DistributedModule):
                yield path, module

    @property
    def forward(self) -> Callable[..., Any]:  # type: ignore[override]  # assignments go through __setattr__
        """What the inner module returns for its arguments. A function assigned here becomes the inner module's `forward`."""
        return functools.partial(self._forward, self._inner.forward)

    def _forward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._binding.is_running:  # called by a function that has taken the place of `original`
            return original(*args, **kwargs)
        slices = self._binding.slices()
        use = Use(storages_of(slices)) if self._shared is None else self._shared
        # Compiled code cannot show its tensors. Recomputation runs what forward ran, whether anybody still listens or not.
        compiled = None if world.current("Block").service(Recorder).is_listening else self._compiled
        call = self._inner_call if compiled is None else compiled.plain
        if not (self.use_checkpoint and torch.is_grad_enabled()):
            return self._run(_Run(slices, use, call, packs=torch.is_grad_enabled()), args, kwargs)
        if compiled is not None and compiled.recomputes_inside:
            try:
                return self._run(_Run(slices, use, compiled.recomputing, packs=True, lends=False), args, kwargs)
            except SeveralGraphsError:  # said in a warning; from now on recomputed from outside
                return self._forward(original, *args, **kwargs)
        replay = Replay([part for _, part in self._parts()], args, kwargs)
        # Tensors go as arguments of their own: checkpoint keeps the random state of the devices that it finds there.
        run = _Run(slices, use, call, packs=False)
        return checkpoint(self._run_replayed, replay, run, kwargs, *args, use_reentrant=False)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Calls inside share one gather, and one reduction when the backward passes of all of them are done.

        For the micro-batches of one pass. The gathered parameters must survive from forward to backward (ZeRO-2).
        """
        self._shared = Use(self.storages)
        try:
            with self._shared.together():
                yield
        finally:
            self._shared = None

    def move_to_stage(self, stage: int) -> None:
        """Leave the parameters on the ranks of one pipeline stage, which keep them from forward to backward. Collective."""
        self._stage = stage
        move_to_stage(list(places_of(self._parts())), stage, dataclasses.replace(self._policy, zero_level=2))

    def settle_buffers(self) -> None:
        """Buffers have the values of the pipeline stage that runs the block on the ranks of the others too. Collective."""
        if self._stage is not None:
            share_buffers([part for _, part in self._parts()], self._stage, world.current("Block").mesh.pipe)

    def _run_replayed(self, replay: Replay, run: _Run, kwargs: dict[str, Any], *args: Any) -> Any:
        with replay.run(args, kwargs) as arguments:
            return self._run(run, *arguments)

    def _run(self, run: _Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the inner module on gathered parameters."""
        use, binding = run.use, self._binding
        again = spare_buffers([part for _, part in self._parts()]) if in_backward() else contextlib.nullcontext()
        first_node = torch._C._autograd._get_sequence_nr()
        with use.running(), again:
            views = use.open()
            with binding.running(run.slices, use, views):
                with use.packing() if run.packs else contextlib.nullcontext():
                    out = run.call(self._inner, args, kwargs)
                use.check_unchanged()
            out = _detached_from(use, out)
        if run.lends and torch.is_grad_enabled():
            end = next((view.grad_fn for view in views if view.requires_grad), None)
            lend = functools.partial(binding.lend, run.slices, use)
            _before_backward_of(out, first_node, lambda: use.lend(lend, end))
        return out

    @staticmethod
    def _inner_call(inner: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return inner(*args, **kwargs)

    def compile(self, **options: Any) -> None:
        """Compile the inner module with torch.compile's arguments; blocks of equal shape share the compiled code."""
        self._compiled = CompiledModule(options)

    def train(self, mode: bool = True) -> Block:
        """Set the mode of the inner module, whose method may do more than set a flag."""
        self._inner.train(mode)
        return self

    def extra_repr(self) -> str:
        """The inner class."""
        return f"{type(self._inner).__name__}, use_checkpoint={self.use_checkpoint}"


CheckpointBlock = Block


def _parts_of(module: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    return list(_plain_subtree("", module))


def _plain_subtree(path: str, module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    yield path, module
    for name, child in module._modules.items():
        if child is not None and not isinstance(child, Block):
            yield from _plain_subtree(f"{path}{name}.", child)


def _before_backward_of(out: Any, since: int, do: Callable[[], None]) -> None:
    """`do` whenever backward comes to a tensor of `out` whose node has a number from `since` on: it is no argument passed on."""

    def watch(x: torch.Tensor) -> torch.Tensor:
        if x.grad_fn is not None and x.grad_fn._sequence_nr() >= since:
            x.grad_fn.register_prehook(lambda _: do())
        return x

    _map_tensors(watch, out)


def _detached_from(use: Use, out: Any) -> Any:
    """Copies in place of outputs that lie in a full buffer, which other blocks will overwrite."""

    def copy(value: Any) -> Any:
        return value.clone() if isinstance(value, torch.Tensor) and use.owns(value) else value

    return _map_tensors(copy, out)


def _map_tensors(fn: Callable[[Any], Any], out: Any) -> Any:
    """`out` with `fn` applied to its tensors, in containers and dataclasses of any depth; the same object if none changes."""
    if isinstance(out, torch.Tensor):
        return fn(out)
    if dataclasses.is_dataclass(out) and not isinstance(out, type):
        fields = {field.name: getattr(out, field.name) for field in dataclasses.fields(out) if field.init}
        mapped = {name: _map_tensors(fn, value) for name, value in fields.items()}
        same = all(mapped[name] is value for name, value in fields.items())
        return out if same else dataclasses.replace(out, **mapped)
    leaves, spec = tree_flatten(out)
    if len(leaves) == 1 and leaves[0] is out:
        return out
    mapped_leaves = [_map_tensors(fn, leaf) for leaf in leaves]
    same = all(new is old for new, old in zip(mapped_leaves, leaves, strict=True))
    return out if same else tree_unflatten(mapped_leaves, spec)
