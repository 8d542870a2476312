"""Block: a module whose parameters are sharded together and gathered while it runs."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from bmtrain.block.adopt import Converted, Place, adopt, move_buffers, move_to_stage, places_of, storages_at
from bmtrain.block.compiled import CompiledModule, SeveralGraphsError
from bmtrain.errors import ConfigurationError
from bmtrain.runtime import world
from bmtrain.shard.backward import in_backward
from bmtrain.shard.module import DistributedModule
from bmtrain.shard.parameter import DistributedParameter
from bmtrain.shard.storage import ShardPolicy, Storage
from bmtrain.shard.unshard import Use

MODES = ("BLOCK", "PIPE")
Call = Callable[[torch.nn.Module, tuple[Any, ...], dict[str, Any]], Any]


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
        self.training = inner.training
        self.use_checkpoint = use_checkpoint
        self._compiled: CompiledModule | None = None
        self._shared: Use | None = None  # of the calls that are made together
        parts = list(_plain_subtree("", inner))
        self._places = list(places_of(parts))
        adopt(self._places, self._policy, current.service(Converted))
        self._rnns = [part for _, part in parts if isinstance(part, torch.nn.RNNBase)]
        for _, part in parts:
            move_buffers(part, current.device)

    @property
    def _inner(self) -> torch.nn.Module:
        hidden: list[torch.nn.Module] = self._hidden
        return hidden[0]

    @property
    def storages(self) -> Sequence[Storage]:
        """The storages that are gathered for this block."""
        return storages_at(self._places)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_hidden":
                raise
            return getattr(self._inner, name)

    def sharded_modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """The inner module and its plain descendants; distributed modules among them save and load their own parameters."""
        yield "", self._inner
        for path, module in _plain_subtree("", self._inner):
            if module is not self._inner and not isinstance(module, DistributedModule):
                yield path, module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the inner module returns for these arguments."""
        use = Use(self.storages) if self._shared is None else self._shared
        call = self._inner_call if self._compiled is None else self._compiled.plain
        if not (self.use_checkpoint and torch.is_grad_enabled()):
            return self._run(use, torch.is_grad_enabled(), call, kwargs, *args)
        if self._compiled is not None and self._compiled.recomputes_inside:
            try:
                return self._run(use, True, self._compiled.recomputing, kwargs, *args)
            except SeveralGraphsError:  # said in a warning; from now on recomputed from outside
                return self.forward(*args, **kwargs)
        # Tensors go as arguments of their own: checkpoint keeps the random state of the devices that it finds there.
        return checkpoint(self._run, use, False, call, kwargs, *args, use_reentrant=False)

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
        move_to_stage(self._places, stage, dataclasses.replace(self._policy, zero_level=2))

    def _run(self, use: Use, pack: bool, call: Call, kwargs: dict[str, Any], *args: Any) -> Any:
        """Run the inner module on gathered parameters; `pack` when autograd saves tensors of this run until backward."""
        with use.running(), self._bound(use), self._spare_buffers() if in_backward() else contextlib.nullcontext():
            with use.packing() if pack else contextlib.nullcontext():
                out = call(self._inner, args, kwargs)
            return _detached_from(use, out)

    @staticmethod
    def _inner_call(inner: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return inner(*args, **kwargs)

    @contextlib.contextmanager
    def _bound(self, use: Use) -> Iterator[None]:
        """Inside, the inner modules find full tensors where their parameters are."""
        views = use.open()
        before: list[tuple[Place, torch.nn.Parameter]] = []
        for place in self._places:
            param = place.module._parameters[place.name]
            if isinstance(param, DistributedParameter):
                before.append((place, param))
                view = views[use.position(param.storage_of, param.index_in_storage)]
                place.module._parameters[place.name] = view  # type: ignore[assignment]
        try:
            self._refresh_rnns()
            yield
        finally:
            for place, param in before:
                place.module._parameters[place.name] = param
            self._refresh_rnns()

    @contextlib.contextmanager
    def _spare_buffers(self) -> Iterator[None]:
        """Inside, buffers are copies: recomputation must not update running statistics a second time."""
        modules = [module for _, module in _plain_subtree("", self._inner)]
        before = [dict(module._buffers) for module in modules]
        try:
            for module in modules:
                module._buffers.update({name: b if b is None else b.clone() for name, b in module._buffers.items()})
            yield
        finally:
            for module, buffers in zip(modules, before, strict=True):
                module._buffers.update(buffers)

    def _refresh_rnns(self) -> None:
        """torch's recurrent modules read their weights from a list of their own."""
        for rnn in self._rnns:
            rnn._flat_weights = [rnn._parameters[name] for name in rnn._flat_weights_names]

    def compile(self, **options: Any) -> None:
        """Compile the inner module with torch.compile's arguments; blocks of equal shape share the compiled code."""
        self._compiled = CompiledModule(options)

    def train(self, mode: bool = True) -> Block:
        """Set training mode on the inner module too."""
        self._inner.train(mode)  # which may be more than a flag
        self.training = mode
        return self

    def extra_repr(self) -> str:
        """The inner class."""
        return f"{type(self._inner).__name__}, use_checkpoint={self.use_checkpoint}"


CheckpointBlock = Block


def _plain_subtree(path: str, module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    yield path, module
    for name, child in module._modules.items():
        if child is not None and not isinstance(child, Block):
            yield from _plain_subtree(f"{path}{name}.", child)


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
