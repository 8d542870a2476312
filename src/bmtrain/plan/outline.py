"""A whole model without memory: its blocks, and what lies in memory outside of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from bmtrain.plan.blocks import BlockCosts, Case, costs
from bmtrain.plan.meter import Meter
from bmtrain.torch_internals import tensors_of, tree_leaves, tree_map_only

# Parameters of one storage: names and shapes, dtype, whether they are trained.
Group = tuple[tuple[tuple[str, tuple[int, ...]], ...], torch.dtype, bool]
WHOLE = ("",)  # the path of a model that is one block


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
        whole: of the same step as one graph, if the model is small; the model is its one block.
    """

    blocks: tuple[tuple[Group, ...], ...]
    others: tuple[Group, ...]
    calls: tuple[BlockCall, ...]
    turn: int
    tail: int
    notes: tuple[str, ...]
    whole: Outline | None = None


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

    `more` names further modules; with WHOLE the model itself is the only one.
    """
    if more is WHOLE:
        return [model]
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
    priced, notes = dict[Any, BlockCosts](), list[str]()
    for kind, case in watch.cases.items():
        case.module.__dict__.pop("forward", None)  # as it was before it was hidden
        keeps = any(case.module is model.get_submodule(path) for path in more)
        found = priced[kind] = costs(case, compiled=compiled, keeps=keeps)
        if found.reason:
            notes.append(f"{type(case.module).__name__} runs uncompiled: {found.reason}")
    order = [*dict.fromkeys([*(seen.block for seen in watch.calls), *blocks])]
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
        tuple(dict.fromkeys(notes)),
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
        turn, tail: as in Outline.
    """

    def __init__(self, spare: Sequence[torch.Tensor]) -> None:
        self.meter = Meter(spare)
        self.calls: list[_Seen] = []
        self.cases: dict[Any, Case] = {}
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
            given = [x for x in tensors_of((args, kwargs)) if x.requires_grad]
            found = [x for x in tensors_of(out) if x.is_floating_point()]
            for x in found:
                self.meter.add(x)
            # A scalar stands for the parameters: without one, blocks behind an embedding that is
            # not trained would have no backward pass.
            trained = any(param.requires_grad for param in block.parameters())
            tie = torch.zeros((), requires_grad=trained)
            made = _Opaque.apply(self, seen, len(found), *found, *given, tie)
            known = dict(zip(map(id, found), made, strict=True))
            self.meter.take_peak()
            return tree_map_only(torch.Tensor, lambda x: known.get(id(x), x), out)

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
        tensors = tensors_of((args, kwargs))
        first = next((x for x in tensors if x.is_floating_point()), None)
        self._common += [x for x in tensors if x is not first]
        shapes = tuple(
            (tuple(x.shape), x.stride(), x.dtype, x.requires_grad)
            if isinstance(x, torch.Tensor)
            else repr(x)
            for x in tree_leaves((args, kwargs))
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
            own = [] if first is None else [made[id(first)]]
            mine, named = tree_map_only(torch.Tensor, lambda x: made[id(x)], (args, kwargs))
            self.cases[kind] = Case(block, mine, named, own)
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
