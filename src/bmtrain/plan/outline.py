"""A whole model without memory: its blocks, and what lies in memory outside of them."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from bmtrain.plan.blocks import COUNTED, BlockCosts, Cost
from bmtrain.plan.blocks import costs as block_costs
from bmtrain.plan.meter import Meter, tensors_in
from bmtrain.recompute.level import Level
from bmtrain.torch_internals import tree_flatten, tree_unflatten

Loss = Callable[[torch.nn.Module], torch.Tensor]
# Parameters of one storage: names and shapes, dtype, whether they are trained.
Group = tuple[tuple[tuple[str, tuple[int, ...]], ...], torch.dtype, bool]


@dataclasses.dataclass(frozen=True)
class BlockCall:
    """One call of a block.

    Attributes:
        number: of the block, in the order of first calls.
        costs: of the call.
        before: bytes alive outside of blocks when its forward pass begins.
        after: the same when its backward pass begins, the gradient of its output among them.
    """

    number: int
    costs: BlockCosts
    before: int
    after: int


@dataclasses.dataclass(frozen=True)
class Outline:
    """What a step takes, apart from what the machine adds.

    Attributes:
        blocks: per block its storages.
        whole: per block whether it keeps its activations and its parameters: a Block with
            use_checkpoint=False and zero_level=2.
        others: storages of parameters outside of blocks.
        calls: of blocks, in order.
        turn: peak bytes outside of blocks from the last block's forward to its backward.
        tail: peak bytes outside of blocks behind the first block's backward pass.
        shared: bytes of arguments that all blocks get.
        flops, attention: of the forward pass outside of blocks.
        num_uncalled: blocks that the call does not reach.
    """

    blocks: tuple[tuple[Group, ...], ...]
    whole: tuple[bool, ...]
    others: tuple[Group, ...]
    calls: tuple[BlockCall, ...]
    turn: int
    tail: int
    shared: int
    flops: float
    attention: float
    num_uncalled: int

    @property
    def groups(self) -> list[Group]:
        """All storages."""
        return [*(group for block in self.blocks for group in block), *self.others]

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(numel_of(group) for group in self.groups)


def along(one: Outline, other: Outline, steps: float) -> Outline:
    """`one` plus `steps` times what `other` has more: sizes grow in proportion to the batch.

    Peaks may change their place in between, which makes them a little less than this.
    """

    def mixed(a: float, b: float) -> float:
        return a + (b - a) * steps

    def size(a: int, b: int) -> int:
        return max(0, round(mixed(a, b)))

    calls = []
    for a, b in zip(one.calls, other.calls, strict=True):
        levels = {
            level: Cost(*map(size, dataclasses.astuple(cost), dataclasses.astuple(more)))
            for (level, cost), more in zip(
                a.costs.levels.items(), b.costs.levels.values(), strict=True
            )
        }
        costs = dataclasses.replace(
            a.costs,
            levels=levels,
            inputs=size(a.costs.inputs, b.costs.inputs),
            flops=mixed(a.costs.flops, b.costs.flops),
            attention=mixed(a.costs.attention, b.costs.attention),
        )
        calls.append(BlockCall(a.number, costs, size(a.before, b.before), size(a.after, b.after)))
    return dataclasses.replace(
        one,
        calls=tuple(calls),
        turn=size(one.turn, other.turn),
        tail=size(one.tail, other.tail),
        shared=size(one.shared, other.shared),
        flops=mixed(one.flops, other.flops),
        attention=mixed(one.attention, other.attention),
    )


def numel_of(group: Group) -> int:
    """Elements of the parameters of a storage, without padding."""
    return sum(torch.Size(shape).numel() for _, shape in group[0])


def groups_of(params: Sequence[tuple[str, torch.nn.Parameter]]) -> tuple[Group, ...]:
    """The storages of a block: one for each dtype and trainability, in order of appearance."""
    found: dict[tuple[torch.dtype, bool], list[tuple[str, tuple[int, ...]]]] = {}
    for name, param in params:
        key = param.dtype, param.requires_grad
        found.setdefault(key, []).append((name, tuple(param.shape)))
    return tuple((tuple(members), *key) for key, members in found.items())


def blocks_of(model: torch.nn.Module, whole: Sequence[str] = ()) -> list[torch.nn.Module]:
    """What becomes a Block: the members of every ModuleList that is not inside a block already.

    `whole` names further modules.
    """
    found: list[torch.nn.Module] = []

    def walk(module: torch.nn.Module, path: str) -> None:
        for name, child in module.named_children():
            place = f"{path}.{name}".lstrip(".")
            is_nested = isinstance(child, torch.nn.ModuleList | torch.nn.ModuleDict)
            if place in whole or (isinstance(module, torch.nn.ModuleList) and not is_nested):
                found.append(child)
            else:
                walk(child, place)

    walk(model, "")
    return found


def outline(
    model: torch.nn.Module,
    loss: Loss,
    *,
    compiled: bool,
    in_fp8: bool,
    whole: Sequence[str] = (),
    levels: Sequence[Level] = COUNTED,
    tell: Callable[[str], None] = lambda text: None,
) -> Outline:
    """Run `loss(model)` and its backward pass without memory, under `without_memory`.

    Args:
        model: with parameters without memory. It is spoiled.
        loss: makes the inputs and returns a scalar.
        compiled, in_fp8: of blocks.
        whole: paths of modules that are Blocks beside the members of ModuleLists, with
            use_checkpoint=False and zero_level=2.
        levels: that blocks may run at.
        tell: told what is noteworthy.
    """
    blocks = blocks_of(model, whole)
    kept_whole = {id(model.get_submodule(path)) for path in whole}
    watch = _Watch([*model.parameters(), *model.buffers()])
    for block in blocks:
        watch.hide(block)
    meter = watch.meter
    with meter, _dropping_gradients(model):
        result = loss(model)
        if not isinstance(result, torch.Tensor) or result.dim() != 0:
            raise TypeError("the loss is no scalar tensor")
        result.backward()
        watch.ends()
    del result
    order = watch.order
    priced: dict[Any, BlockCosts] = {}
    told: set[str] = set()
    calls = []
    for seen in watch.calls:
        key = seen.kind
        if key not in priced:
            module, args, kwargs, shared = watch.rebuilt(seen)
            priced[key] = block_costs(
                module,
                args,
                kwargs,
                shared,
                levels=(Level.NOTHING,) if id(module) in kept_whole else levels,
                compiled=compiled,
                in_fp8=in_fp8 and id(module) not in kept_whole,
            )
            if priced[key].reason and type(module).__name__ not in told:
                told.add(type(module).__name__)
                tell(f"{type(module).__name__} runs uncompiled: {priced[key].reason}")
        calls.append(BlockCall(order.index(seen.module), priced[key], seen.before, seen.after))
    inside = {id(param) for block in blocks for param in block.parameters()}
    uncalled = [block for block in blocks if not any(block is own for own in order)]
    seen_params: set[int] = set()
    storages = []
    for block in [*order, *uncalled]:
        own = [(n, p) for n, p in block.named_parameters() if id(p) not in seen_params]
        seen_params |= {id(p) for _, p in own}
        storages.append(groups_of(own))
    others = tuple(
        group
        for name, param in model.named_parameters()
        if id(param) not in inside
        for group in groups_of([(name, param)])
    )
    return Outline(
        tuple(storages),
        tuple(id(block) in kept_whole for block in [*order, *uncalled]),
        others,
        tuple(calls),
        watch.turn,
        watch.tail,
        sum(x.nbytes for x in watch.shared_specs()),
        meter.flops,
        meter.attention,
        len(uncalled),
    )


@dataclasses.dataclass
class _Seen:
    """A call of a block: the module, its arguments as shapes, and what was alive around it."""

    module: torch.nn.Module
    leaves: list[Any]
    tree: Any
    kind: Any
    before: int
    after: int = 0


@dataclasses.dataclass(frozen=True)
class _Spec:
    """A tensor argument: what is needed to make another like it, and the number of its storage."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    storage: int

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class _Watch:
    """Runs blocks out of sight of a meter, and notes what it sees around them."""

    def __init__(self, spare: Sequence[torch.Tensor]) -> None:
        self.meter = Meter(spare)
        self.calls: list[_Seen] = []
        self.order: list[torch.nn.Module] = []
        self.turn = self.tail = 0
        self._numbers = 0
        self._storages: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._is_first = True

    def hide(self, block: torch.nn.Module) -> None:
        """Replace the forward of a block: it runs uncounted, and its backward is not run."""
        original = block.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            seen = self._note(block, args, kwargs)
            with self.meter.paused(), torch.no_grad():
                out = original(*args, **kwargs)
            given = [x for x in tensors_in((args, kwargs)) if x.requires_grad]
            trained = [p for p in block.parameters() if p.requires_grad]
            leaves, tree = tree_flatten(out)
            places = [
                n
                for n, x in enumerate(leaves)
                if isinstance(x, torch.Tensor) and x.is_floating_point()
            ]
            for place in places:
                self.meter.add(leaves[place])
            if (given or trained) and torch.is_grad_enabled():
                # A scalar stands for the parameters: without one, blocks behind an embedding that
                # is not trained would have no backward pass.
                tie = torch.zeros((), requires_grad=bool(trained))
                made = _Opaque.apply(
                    self, seen, len(places), *(leaves[n] for n in places), *given, tie
                )
                for place, value in zip(places, made, strict=True):
                    leaves[place] = value
            self.meter.restart_peak()
            return tree_unflatten(leaves, tree)

        block.__dict__["forward"] = forward

    def ends(self) -> None:
        """The backward pass has ended."""
        if self._is_first:
            self.turn = self.meter.peak
        else:
            self.tail = self.meter.peak

    def block_turns(self, seen: _Seen) -> None:
        """The backward pass of a block begins."""
        if self._is_first:
            self.turn, self._is_first = self.meter.peak, False
        seen.after = self.meter.live
        self.meter.restart_peak()

    @property
    def shared(self) -> set[int]:
        """Numbers of the storages that several blocks got."""
        found: set[int] = set()
        first: dict[int, torch.nn.Module] = {}
        for seen in self.calls:
            for number in {x.storage for x in seen.leaves if isinstance(x, _Spec)}:
                if number in first and first[number] is not seen.module:
                    found.add(number)
                first.setdefault(number, seen.module)
        return found

    def shared_specs(self) -> list[_Spec]:
        """One argument for each of these storages."""
        wanted = self.shared
        found = {x.storage: x for s in self.calls for x in s.leaves if isinstance(x, _Spec)}
        return [spec for number, spec in found.items() if number in wanted]

    def rebuilt(
        self, seen: _Seen
    ) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any], list[torch.Tensor]]:
        """The call with new arguments: module, args, kwargs, and those that all blocks get."""
        seen.module.__dict__.pop("forward")
        wanted, leaves, common = self.shared, [], []
        made: dict[int, torch.Tensor] = {}
        for leaf in seen.leaves:
            if not isinstance(leaf, _Spec):
                leaves.append(leaf)
                continue
            if leaf.storage not in made:
                made[leaf.storage] = torch.empty_strided(
                    leaf.shape, leaf.stride, dtype=leaf.dtype, requires_grad=leaf.requires_grad
                )
            value = made[leaf.storage]
            leaves.append(value)
            if leaf.storage in wanted:
                common.append(value)
        args, kwargs = tree_unflatten(leaves, seen.tree)
        return seen.module, args, kwargs, common

    def _note(self, block: torch.nn.Module, args: Any, kwargs: Any) -> _Seen:
        if not any(block is known for known in self.order):
            self.order.append(block)
        leaves, tree = tree_flatten((args, kwargs))
        specs = [self._spec(x) if isinstance(x, torch.Tensor) else x for x in leaves]
        shapes = tuple(
            (x.shape, x.stride, x.dtype, x.requires_grad) if isinstance(x, _Spec) else repr(x)
            for x in specs
        )
        params = tuple(
            (n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in block.named_parameters()
        )
        seen = _Seen(block, specs, tree, (type(block), params, shapes), self.meter.live)
        self.calls.append(seen)
        return seen

    def _spec(self, x: torch.Tensor) -> _Spec:
        storage = x.untyped_storage()
        known = self._storages.get(id(storage))
        if known is None or known[0]() is not storage:
            self._numbers += 1
            self._storages[id(storage)] = weakref.ref(storage), self._numbers
        number = self._storages[id(storage)][1]
        return _Spec(tuple(x.shape), x.stride(), x.dtype, x.requires_grad, number)


class _Opaque(torch.autograd.Function):
    """The outputs of a block; gradients of its inputs, of which only the memory counts."""

    @staticmethod
    def forward(ctx: Any, watch: _Watch, seen: _Seen, count: int, *tensors: torch.Tensor) -> Any:
        ctx.watch, ctx.seen, ctx.count = watch, seen, count
        # As shapes: a tensor that is held here would count as alive.
        ctx.inputs = [(tuple(x.shape), x.dtype) for x in tensors[count:]]
        return tuple(x.view_as(x) for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.watch.block_turns(ctx.seen)
        made = [torch.empty(shape, dtype=dtype) for shape, dtype in ctx.inputs]
        return None, None, None, *[None] * ctx.count, *made


@contextlib.contextmanager
def _dropping_gradients(model: torch.nn.Module) -> Iterator[None]:
    """A context in which full gradients are dropped as soon as they are there, as reduced ones."""

    def drop(param: torch.Tensor) -> None:
        param.grad = None

    handles = [
        param.register_post_accumulate_grad_hook(drop)
        for param in model.parameters()
        if param.requires_grad
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def without_values(module: torch.nn.Module, dtype: torch.dtype | None) -> torch.nn.Module:
    """The module with parameters and buffers without memory, on the CPU, in place.

    Args:
        module: its tensors may be on any device, on meta too.
        dtype: of floating-point parameters and buffers; None leaves theirs.
    """
    made: dict[int, Any] = {}

    def like(x: torch.Tensor) -> torch.Tensor:
        kind = dtype if dtype is not None and x.is_floating_point() else x.dtype
        return torch.empty(x.shape, dtype=kind, device="cpu")

    for part in module.modules():
        for name, param in part._parameters.items():
            if param is not None:
                if id(param) not in made:
                    made[id(param)] = torch.nn.Parameter(like(param), param.requires_grad)
                    made[id(made[id(param)])] = made[id(param)]
                part._parameters[name] = made[id(param)]
        for name, buffer in part._buffers.items():
            if buffer is not None:
                if id(buffer) not in made:
                    made[id(buffer)] = like(buffer)
                    made[id(made[id(buffer)])] = made[id(buffer)]
                part._buffers[name] = made[id(buffer)]
    return module
