"""Moving rows and activations along the stages of a pipeline, differentiably. Tensors and axes only.

Ranks of the axis are stages, in order. What a function sends forward, its backward receives in the other direction; so every
rank must run backward through the result of `to_owners` if any does, and everything else hangs on that node (`ties`).
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from bmtrain.distributed import collectives
from bmtrain.runtime.mesh import Axis


@dataclasses.dataclass(frozen=True)
class Head:
    """What a receiver must know of a tensor before it comes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Head:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def empty(self, device: torch.device) -> torch.Tensor:
        """Memory for it."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


class Outbox:
    """Sends under way to the neighbours. A group of tensors waits for the group before it, so at most one is in flight."""

    def __init__(self, axis: Axis) -> None:
        self._axis = axis
        self._groups: collections.deque[list[collectives.Transfer]] = collections.deque()

    def send(self, tensors: Sequence[torch.Tensor], target: int) -> None:
        """Start sending; the tensors stay alive until they have arrived."""
        self.flush()
        self._groups.append([collectives.start_send(x.contiguous(), target, self._axis) for x in tensors])

    def flush(self) -> None:
        """Wait for what is under way."""
        while self._groups:
            for transfer in self._groups.popleft():
                transfer.wait()


class Arriving:
    """Tensors on their way from a neighbouring stage into memory made for them."""

    def __init__(self, heads: Sequence[Head], source: int, axis: Axis, device: torch.device) -> None:
        self.heads, self.source = heads, source
        self._transfers = [collectives.start_receive(head.empty(device), source, axis) for head in heads]

    def wait(self) -> list[torch.Tensor]:
        """The tensors."""
        for transfer in self._transfers:
            transfer.wait()
        return [transfer.tensor for transfer in self._transfers]


def to_first(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The rows `x` (n, ...) of all ranks in rank order, (ranks * n, ...), on the first rank; elsewhere a 0-dim token."""
    out: torch.Tensor = _ToFirst.apply(x, axis)
    return out


def pass_on(hidden: Sequence[torch.Tensor], target: int, outbox: Outbox, axis: Axis) -> torch.Tensor:
    """Send activations to stage `target`; the token that is returned stands for them in the graph here."""
    token: torch.Tensor = _PassOn.apply(target, outbox, axis, *hidden)
    return token


def take_over(arriving: Arriving, outbox: Outbox) -> tuple[torch.Tensor, ...]:
    """The activations that another stage passes on; they require grad if they did there."""
    tensors = arriving.wait()
    if not any(head.requires_grad for head in arriving.heads):
        return tuple(tensors)
    anchor = torch.zeros((), device=tensors[0].device, requires_grad=True)
    out: tuple[torch.Tensor, ...] = _TakeOver.apply(anchor, arriving, outbox, *tensors)
    return out


@dataclasses.dataclass(frozen=True)
class Share:
    """What each stage has `counts[stage]` of, for the rows of all ranks; `head` is that of one for the rows of one rank."""

    head: Head
    counts: tuple[int, ...]


def to_owners(
    held: Sequence[torch.Tensor | None], shares: Sequence[Share], ties: Sequence[torch.Tensor], axis: Axis, device: torch.device
) -> tuple[torch.Tensor, ...]:
    """Give every rank its own rows of what the stages hold.

    Args:
        held: one tensor per share, (counts[own stage], ranks * n, ...), or None for a count of 0.
        shares: what they are; the same on all ranks.
        ties: tensors whose gradients other ranks send or wait for; they get no gradient here, only their place in the order.
        axis: the pipeline.
        device: of the results.

    Returns one tensor (sum of counts, n, ...) per share.
    """
    anchor = torch.zeros((), device=device, requires_grad=any(share.head.requires_grad for share in shares))
    tensors = [
        _new(0, (axis.size * share.head.shape[0], *share.head.shape[1:]), share.head.dtype, device) if x is None else x
        for x, share in zip(held, shares, strict=True)
    ]
    out: tuple[torch.Tensor, ...] = _ToOwners.apply(anchor, tuple(shares), axis, len(tensors), *tensors, *ties)
    return out


class _ToFirst(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        ctx.axis, ctx.like = axis, Head.of(x)
        if axis.index:
            collectives.exchange([(x.contiguous(), 0)], [], axis)
            return x.new_zeros(())
        parts = [x, *(torch.empty_like(x, memory_format=torch.contiguous_format) for _ in axis.ranks[1:])]
        collectives.exchange([], [(part, place) for place, part in enumerate(parts) if place], axis)
        return torch.cat(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.axis.index:
            own = ctx.like.empty(grad.device)
            collectives.exchange([], [(own, 0)], ctx.axis)
            return own, None
        parts = grad.contiguous().chunk(ctx.axis.size)
        collectives.exchange([(part, place) for place, part in enumerate(parts) if place], [], ctx.axis)
        return parts[0], None


class _PassOn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, target: int, outbox: Outbox, axis: Axis, *hidden: torch.Tensor) -> torch.Tensor:
        ctx.target, ctx.axis = target, axis
        ctx.heads = [Head.of(x) if wanted else None for x, wanted in zip(hidden, ctx.needs_input_grad[3:], strict=True)]
        outbox.send(hidden, target)
        return hidden[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        arriving = Arriving([head for head in ctx.heads if head is not None], ctx.target, ctx.axis, grad.device)
        grads = iter(arriving.wait())
        return (None, None, None, *(None if head is None else next(grads) for head in ctx.heads))


class _TakeOver(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, arriving: Arriving, outbox: Outbox, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.source, ctx.outbox, ctx.heads = arriving.source, outbox, arriving.heads
        out = tuple(x.detach() for x in tensors)
        ctx.mark_non_differentiable(*(x for x, head in zip(out, arriving.heads, strict=True) if not head.requires_grad))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, ...]:
        wanted = [grad for grad, head in zip(grads, ctx.heads, strict=True) if head.requires_grad]
        ctx.outbox.send(wanted, ctx.source)
        return (None,) * (3 + len(grads))


class _ToOwners(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, shares: tuple[Share, ...], axis: Axis, num_held: int, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.shares, ctx.axis, ctx.num_ties = shares, axis, len(tensors) - num_held
        pieces = [[piece.contiguous() for piece in held.chunk(axis.size, 1)] for held in tensors[:num_held]]
        results = [_new(sum(share.counts), share.head.shape, share.head.dtype, anchor.device) for share in shares]
        _swap(pieces, [list(result.split(share.counts)) for result, share in zip(results, shares, strict=True)], axis)
        ctx.mark_non_differentiable(*(x for x, share in zip(results, shares, strict=True) if not share.head.requires_grad))
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        axis, shares = ctx.axis, ctx.shares
        pieces = [list(grad.contiguous().split(share.counts)) for grad, share in zip(grads, shares, strict=True)]
        results = [
            [_new(share.counts[axis.index], share.head.shape, share.head.dtype, grads[0].device) for _ in axis.ranks]
            for share in shares
        ]
        _swap(pieces, results, axis)
        return (None, None, None, None, *(torch.cat(parts, 1) for parts in results), *(None,) * ctx.num_ties)


def _new(count: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty((count, *shape), dtype=dtype, device=device)


def _swap(pieces: Sequence[Sequence[torch.Tensor]], results: Sequence[Sequence[torch.Tensor]], axis: Axis) -> None:
    """For each share, `pieces[place]` goes to that place and `results[place]` comes from there; contiguous, may be empty."""
    sends, receives = [], []
    for outgoing, incoming in zip(pieces, results, strict=True):
        incoming[axis.index].copy_(outgoing[axis.index])
        sends += [(x, place) for place, x in enumerate(outgoing) if place != axis.index and x.numel()]
        receives += [(x, place) for place, x in enumerate(incoming) if place != axis.index and x.numel()]
    collectives.exchange(sends, receives, axis)
