"""Differentiable communication between the stages of a pipeline: tensors and axes only.

The ranks of the axis are the stages, in order. What a function sends in forward, its backward
receives in the opposite direction. So every rank must run backward through the result of
`to_owners` if any rank does, or the others hang; the other operations depend on that node in the
graph (`ties`), so that autograd reaches them too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from bmtrain.distributed import collectives
from bmtrain.runtime.mesh import Axis
from bmtrain.runtime.world import World


@dataclasses.dataclass(frozen=True)
class Head:
    """Shape, dtype and requires_grad of a tensor, sent ahead of it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Head:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def empty(self, device: torch.device, *counts: int) -> torch.Tensor:
        """An uninitialised tensor to receive into, or (counts, ...) of them in one."""
        return torch.empty((*counts, *self.shape), dtype=self.dtype, device=device)


class Link:
    """This stage and one neighbour: their communicator, and the send in flight.

    A send waits for the one before it, so that at most one group of tensors is in flight.
    """

    def __init__(self, axis: Axis, device: torch.device) -> None:
        self.axis = axis
        self._other = 1 - axis.index
        self._device = device
        self._under_way: collectives.Transfer | None = None

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """Start sending; the transfer keeps the tensors alive until it is flushed."""
        self.flush()
        sends = [(x.contiguous(), self._other) for x in tensors]
        self._under_way = collectives.start(sends, [], self.axis, "a send")

    def flush(self) -> None:
        """Wait for the send in flight, and release its tensors."""
        transfer, self._under_way = self._under_way, None
        if transfer is not None:
            # Without this wait, the memory released here could be reused while it is being sent.
            transfer.wait()

    def receive(self, heads: Sequence[Head]) -> collectives.Transfer:
        """Start receiving into new tensors."""
        receives = [(head.empty(self._device), self._other) for head in heads]
        return collectives.start([], receives, self.axis, "a receive")

    def send_heads(self, heads: Sequence[Head]) -> None:
        """Send the neighbour the heads of the tensors that will follow."""
        collectives.send_object(list(heads), self._other, self.axis)

    def receive_heads(self) -> list[Head]:
        """Receive the heads that the neighbour sends."""
        heads: list[Head] = collectives.receive_object(self._other, self.axis)
        return heads


class Links:
    """The links of this stage; None where it has no neighbour.

    One per run, reached by `world.service(Links)`.
    """

    def __init__(self, world: World) -> None:
        mesh = world.mesh
        self.upstream = None if mesh.upstream is None else Link(mesh.upstream, world.device)
        self.downstream = None if mesh.downstream is None else Link(mesh.downstream, world.device)


def take_over(
    heads: Sequence[Head], transfer: collectives.Transfer, link: Link, ties: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """The activations that the neighbour sends, once received.

    They require grad if they do on the neighbour. To autograd they are a function of `ties`, which
    get no gradient: that puts this node on the path of any backward pass towards the ties, so that
    the neighbour's gradients are always sent.
    """
    transfer.wait()
    if not any(head.requires_grad for head in heads):
        return tuple(transfer.tensors)
    anchor = torch.zeros((), device=transfer.tensors[0].device, requires_grad=True)
    out: tuple[torch.Tensor, ...] = _TakeOver.apply(
        anchor, heads, link, len(heads), *transfer.tensors, *ties
    )
    return out


@dataclasses.dataclass(frozen=True)
class Share:
    """One kind of result: stage i holds `counts[i]` of them, for the rows of all ranks.

    `head` describes one of them for the rows of one rank.
    """

    head: Head
    counts: tuple[int, ...]


def to_owners(
    held: Sequence[torch.Tensor | None],
    shares: Sequence[Share],
    ties: Sequence[torch.Tensor],
    axis: Axis,
    device: torch.device,
) -> tuple[torch.Tensor, ...]:
    """Give every rank its own rows of what the stages hold.

    Args:
        held: one tensor per share, (counts[own stage], ranks * n, ...), or None for a count of 0.
        shares: their descriptions, the same on all ranks.
        ties: tensors whose gradients other ranks send or wait for. They get no gradient here; they
            only order their nodes after this one in backward.
        axis: the pipeline.
        device: of the results.

    Returns:
        One tensor (sum of counts, n, ...) per share.
    """
    anchor = torch.zeros(
        (), device=device, requires_grad=any(share.head.requires_grad for share in shares)
    )
    tensors = [
        # without any, of the rows of all ranks
        share.head.empty(device, 0).repeat_interleave(axis.size, 1) if x is None else x
        for x, share in zip(held, shares, strict=True)
    ]
    out: tuple[torch.Tensor, ...] = _ToOwners.apply(
        anchor, tuple(shares), axis, len(tensors), *tensors, *ties
    )
    return out


class ToFirst(torch.autograd.Function):
    """Gather the rows `x` (n, ...) of all ranks on the first one: (ranks * n, ...).

    The other ranks get a 0-dim token.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        ctx.axis, ctx.like = axis, Head.of(x)
        if axis.index:
            collectives.exchange([(x.contiguous(), 0)], [], axis)
            return x.new_zeros(())
        parts = [
            x,
            *(torch.empty_like(x, memory_format=torch.contiguous_format) for _ in axis.ranks[1:]),
        ]
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
        collectives.exchange(
            [(part, place) for place, part in enumerate(parts) if place], [], ctx.axis
        )
        return parts[0], None


class PassOn(torch.autograd.Function):
    """Send activations over a link; the token returned represents them in this rank's graph."""

    @staticmethod
    def forward(ctx: Any, link: Link, *hidden: torch.Tensor) -> torch.Tensor:
        ctx.link = link
        ctx.heads = [
            Head.of(x) if wanted else None
            for x, wanted in zip(hidden, ctx.needs_input_grad[1:], strict=True)
        ]
        link.send(hidden)
        return hidden[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        transfer = ctx.link.receive([head for head in ctx.heads if head is not None])
        transfer.wait()
        grads = iter(transfer.tensors)
        return (None, *(None if head is None else next(grads) for head in ctx.heads))


class _TakeOver(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        heads: Sequence[Head],
        link: Link,
        num_taken: int,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.link, ctx.heads, ctx.num_inputs = link, heads, 4 + len(tensors)
        out = tuple(x.detach() for x in tensors[:num_taken])
        ctx.mark_non_differentiable(
            *(x for x, head in zip(out, heads, strict=True) if not head.requires_grad)
        )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, ...]:
        ctx.link.send(
            [grad for grad, head in zip(grads, ctx.heads, strict=True) if head.requires_grad]
        )
        return (None,) * ctx.num_inputs


class _ToOwners(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        shares: tuple[Share, ...],
        axis: Axis,
        num_held: int,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.shares, ctx.axis, ctx.num_ties = shares, axis, len(tensors) - num_held
        pieces = [
            [piece.contiguous() for piece in held.chunk(axis.size, 1)]
            for held in tensors[:num_held]
        ]
        results = [share.head.empty(anchor.device, sum(share.counts)) for share in shares]
        _swap(
            pieces,
            [
                list(result.split(share.counts))
                for result, share in zip(results, shares, strict=True)
            ],
            axis,
        )
        ctx.mark_non_differentiable(
            *(x for x, share in zip(results, shares, strict=True) if not share.head.requires_grad)
        )
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        axis, shares = ctx.axis, ctx.shares
        pieces = [
            list(grad.contiguous().split(share.counts))
            for grad, share in zip(grads, shares, strict=True)
        ]
        results = [
            [share.head.empty(grads[0].device, share.counts[axis.index]) for _ in axis.ranks]
            for share in shares
        ]
        _swap(pieces, results, axis)
        return (
            None,
            None,
            None,
            None,
            *(torch.cat(parts, 1) for parts in results),
            *(None,) * ctx.num_ties,
        )


def _swap(
    pieces: Sequence[Sequence[torch.Tensor]], results: Sequence[Sequence[torch.Tensor]], axis: Axis
) -> None:
    """For each share, send `pieces[i]` to rank i and receive `results[i]` from it.

    All are contiguous; empty ones are skipped.
    """
    sends, receives = [], []
    for outgoing, incoming in zip(pieces, results, strict=True):
        incoming[axis.index].copy_(outgoing[axis.index])
        sends += [
            (x, place) for place, x in enumerate(outgoing) if place != axis.index and x.numel()
        ]
        receives += [
            (x, place) for place, x in enumerate(incoming) if place != axis.index and x.numel()
        ]
    collectives.exchange(sends, receives, axis)
