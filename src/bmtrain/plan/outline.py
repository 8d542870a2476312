"""A whole model without memory: its blocks, and what lies in memory outside of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from bmtrain.plan.blocks import BlockCosts, Case, costs
from bmtrain.plan.meter import Meter
from bmtrain.recompute.level import Level
from bmtrain.torch_internals import tensors_in, tree_flatten, tree_unflatten

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
        others: storages of parameters outside of blocks.
        calls: of blocks, in order.
        turn: peak bytes outside of blocks from the last block's forward to its backward.
        tail: peak bytes outside of blocks behind the first block's backward pass.
        notes: what is uncertain.
    """

    blocks: tuple[tuple[Group, ...], ...]
    others: tuple[Group, ...]
    calls: tuple[BlockCall, ...]
    turn: int
    tail: int
    notes: tuple[str, ...]


def numel_of(groups: Iterable[Group]) -> int:
    """Elements of the parameters of storages, without padding."""
    return sum(torch.Size(shape).numel() for group in groups for _, shape in group[0])


def groups_of(params: Iterable[tuple[str, torch.nn.Parameter]]) -> tuple[Group, ...]:
    """The storages of a block: one for each dtype and trainability, in order of appearance."""
    found: dict[tuple[torch.dtype, bool], list[tuple[str, tuple[int, ...]]]] = {}
    for name, param in params:
        key = param.dtype, param.requires_grad
        found.setdefault(key, []).append((name, tuple(param.shape)))
    return tuple((tuple(members), *key) for key, members in found.items())


def blocks_of(model: torch.nn.Module, more: Sequence[str] = ()) -> list[torch.nn.Module]:
    """What becomes a Block: the members of every ModuleList that is not inside a block already.

    `more` names further modules.
    """
    found: list[torch.nn.Module] = []

    def walk(module: torch.nn.Module, path: str) -> None:
        for name, child in module.named_children():
            place = f"{path}.{name}".lstrip(".")
            is_nested = isinstance(child, torch.nn.ModuleList | torch.nn.ModuleDict)
            if place in more or (isinstance(module, torch.nn.ModuleList) and not is_nested):
                found.append(child)
            else:
                walk(child, place)

    walk(model, "")
    return found


def outline(
    model: torch.nn.Module,
    loss: Callable[[torch.nn.Module], torch.Tensor],
    *,
    compiled: bool,
    more: Sequence[str] = (),
) -> Outline:
    """Run `loss(model)` and its backward pass without memory, under `without_memory`.

    Args:
        model: with parameters without memory. It is spoiled.
        loss: makes the inputs and returns a scalar.
        compiled: whether blocks are.
        more: paths of modules that are Blocks beside the members of ModuleLists, and keep all
            activations at every level.
    """
    blocks = blocks_of(model, more)
    watch = _Watch([*model.parameters(), *model.buffers()])
    for block in blocks:
        watch.hide(block)

    def drop(param: torch.Tensor) -> None:
        param.grad = None  # as soon as it is there, as a full gradient once it is reduced

    trained = [param for param in model.parameters() if param.requires_grad]
    handles = [param.register_post_accumulate_grad_hook(drop) for param in trained]
    with watch.meter:
        result = loss(model)
        if not isinstance(result, torch.Tensor) or result.dim() != 0:
            raise TypeError("the loss is not a scalar tensor")
        result.backward()
        watch.take_turn()
    for handle in handles:
        handle.remove()
    priced: dict[Any, BlockCosts] = {}
    notes: dict[str, str] = {}
    for kind, case in watch.cases.items():
        case.module.__dict__.pop("forward", None)  # as it was before it was hidden
        found = costs(case, compiled=compiled)
        if any(case.module is model.get_submodule(path) for path in more):
            everything = dict.fromkeys(found.levels, found.levels[Level.NOTHING])
            found = dataclasses.replace(found, levels=everything)
        priced[kind] = found
        name, reason = type(case.module).__name__, found.reason
        if reason:
            notes.setdefault(name, f"{name} runs uncompiled: {reason}")
    order = watch.order
    order += [block for block in blocks if not any(block is own for own in order)]
    storages, seen = [], set[torch.nn.Parameter]()
    for block in order:
        own = [(name, param) for name, param in block.named_parameters() if param not in seen]
        seen.update(param for _, param in own)
        storages.append(groups_of(own))
    others = [pair for pair in model.named_parameters() if pair[1] not in seen]
    return Outline(
        tuple(storages),
        tuple(group for pair in others for group in groups_of([pair])),
        tuple(
            BlockCall(order.index(x.block), priced[x.kind], x.before, x.after) for x in watch.calls
        ),
        watch.turn,
        watch.tail,
        tuple(notes.values()),
    )


@dataclasses.dataclass
class _Seen:
    """A call of a block: what it is like, and bytes alive around it."""

    block: torch.nn.Module
    kind: Any
    before: int
    after: int = 0


class _Watch:
    """Runs blocks out of sight of a meter, and notes what it sees around them.

    Attributes:
        calls: of blocks, in order.
        cases: of each kind of call one, with arguments of its own.
        order: the blocks, in the order of first calls.
        turn, tail: as in Outline.
    """

    def __init__(self, spare: Sequence[torch.Tensor]) -> None:
        self.meter = Meter(spare)
        self.calls: list[_Seen] = []
        self.cases: dict[Any, Case] = {}
        self.order: list[torch.nn.Module] = []
        self.turn = self.tail = 0
        # What blocks get beside their own inputs is alive until the end: all of them keep it.
        self._common: list[torch.Tensor] = []

    def hide(self, block: torch.nn.Module) -> None:
        """Replace the forward of a block: it runs uncounted, and its backward is not run."""
        original = block.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            with self.meter.paused(), torch.no_grad():
                seen = self._note(block, args, kwargs)
                out = original(*args, **kwargs)
            given = [x for x in tensors_in((args, kwargs)) if x.requires_grad]
            trained = any(param.requires_grad for param in block.parameters())
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
                tie = torch.zeros((), requires_grad=trained)
                made = _Opaque.apply(
                    self, seen, len(places), *(leaves[n] for n in places), *given, tie
                )
                for place, value in zip(places, made, strict=True):
                    leaves[place] = value
            self.meter.take_peak()
            return tree_unflatten(leaves, tree)

        block.__dict__["forward"] = forward

    def take_turn(self, seen: _Seen | None = None) -> None:
        """The backward pass of a block begins; with None, that of the loss has ended."""
        peak = self.meter.take_peak()
        if not self.turn:
            self.turn = peak
        elif seen is None:
            self.tail = peak
        if seen is not None:
            seen.after = self.meter.live

    def _note(self, block: torch.nn.Module, args: Any, kwargs: Any) -> _Seen:
        """A call of a block whose own input is its first tensor of numbers."""
        if not any(block is known for known in self.order):
            self.order.append(block)
        leaves, tree = tree_flatten((args, kwargs))
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        first = next((x for x in tensors if x.is_floating_point()), None)
        self._common += [x for x in tensors if x is not first]
        shapes = tuple(
            (tuple(x.shape), x.stride(), x.dtype, x.requires_grad)
            if isinstance(x, torch.Tensor)
            else repr(x)
            for x in leaves
        )
        params = tuple(
            (n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in block.named_parameters()
        )
        kind = type(block), params, shapes
        if kind not in self.cases:
            made = {
                id(x): torch.empty_strided(
                    x.shape, x.stride(), dtype=x.dtype, requires_grad=x.requires_grad
                )
                for x in tensors
            }
            copies = [made.get(id(x), x) for x in leaves]
            own = [] if first is None else [made[id(first)]]
            new_args, new_kwargs = tree_unflatten(copies, tree)
            self.cases[kind] = Case(block, new_args, new_kwargs, own)
        self.calls.append(_Seen(block, kind, self.meter.live))
        return self.calls[-1]


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
        ctx.watch.take_turn(ctx.seen)
        made = [torch.empty(shape, dtype=dtype) for shape, dtype in ctx.inputs]
        return None, None, None, *[None] * ctx.count, *made


def without_values(module: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """The module with parameters and buffers without memory, on the CPU, in place.

    Args:
        module: its tensors may be on any device, on meta too.
        dtype: of floating-point parameters and buffers.
    """
    made: dict[int, Any] = {}
    for part in module.modules():
        for held in (part._parameters, part._buffers):
            for name, x in held.items():
                if x is not None and id(x) not in made:
                    kind = dtype if x.is_floating_point() else x.dtype
                    new = torch.empty(x.shape, dtype=kind, device="cpu")
                    is_param = isinstance(x, torch.nn.Parameter)
                    made[id(x)] = torch.nn.Parameter(new, x.requires_grad) if is_param else new
                held[name] = made.get(id(x))
    return module
