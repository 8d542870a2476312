"""Differentiable collectives.

Gradients are those of the sum of all ranks' losses with respect to each rank's input. Every rank of
the communicator must call, with equal shapes and dtypes, and must run backward through the result
if any rank does; backward hangs otherwise. A communicator is an `Axis` of the mesh; None is the
whole world.

`local_gradient=True` gives BMTrain's gradients instead: those of this rank's own loss, with the
other ranks' tensors as constants. Backward then communicates in `broadcast` only, where BMTrain
sums all ranks' gradients on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from bmtrain.distributed import collectives
from bmtrain.errors import ConfigurationError
from bmtrain.runtime import world
from bmtrain.runtime.arguments import COUNT
from bmtrain.runtime.mesh import Axis


def all_gather(
    x: torch.Tensor, comm: Axis | None = None, *, local_gradient: bool = False
) -> torch.Tensor:
    """Every rank's `x`, stacked: `(ranks, *x.shape)`. Backward reduce-scatters the gradient.

    Args:
        x: on the rank's device, of the same shape and dtype on every rank.
        comm: the ranks, an axis such as config["comm"]; None is all.
        local_gradient: backward takes this rank's part of its own gradient, as in BMTrain.

    Raises:
        ConfigurationError: for a `comm` that is no communicator of the open run.
    """
    axis = _axis("all_gather", comm)
    out: torch.Tensor = _Linear.apply(
        x,
        lambda x: collectives.all_gather(x, axis),
        lambda grad: grad[axis.index] if local_gradient else reduce_scatter(grad, "sum", axis),
    )
    return out


def reduce_scatter(x: torch.Tensor, op: str = "sum", comm: Axis | None = None) -> torch.Tensor:
    """Reduce `x` (ranks * n, ...) over ranks and return this rank's part along dim 0: (n, ...).

    Backward all-gathers the gradient.

    Args:
        x: on the rank's device, of the same shape and dtype on every rank.
        op: "sum", "avg", "max", "min" or "prod".
        comm: the ranks, an axis such as config["comm"]; None is all.

    Raises:
        ConfigurationError: for an unknown `op`, a dim 0 that the ranks do not divide, or a `comm`
            that is no communicator of the open run.
    """
    axis = _axis("reduce_scatter", comm)
    if op in ("sum", "avg"):
        out: torch.Tensor = _Linear.apply(
            x, lambda x: collectives.reduce_scatter(x, axis), lambda grad: all_gather(grad, axis)
        )
        return out / axis.size if op == "avg" else out
    # Not every backend has reduce-scatter for these; all-reduce works on all of them.
    collectives.check_divided(x, axis)
    return all_reduce(x, op, axis).chunk(axis.size)[axis.index].clone()


def all_reduce(
    x: torch.Tensor, op: str = "sum", comm: Axis | None = None, *, local_gradient: bool = False
) -> torch.Tensor:
    """The reduction of every rank's `x` by sum, avg, max, min or prod: a new tensor of x's shape.

    If several ranks hold the same extremum, they share its gradient equally, as in torch.amax.

    Args:
        x: on the rank's device, of the same shape and dtype on every rank.
        op: "sum", "avg", "max", "min" or "prod".
        comm: the ranks, an axis such as config["comm"]; None is all.
        local_gradient: backward passes on this rank's gradient g only, as in BMTrain: g for sum,
            g / ranks for avg, g times the product of the other ranks' values for prod; for max and
            min, g where `x` is the extremum.

    Raises:
        ConfigurationError: for an unknown `op`, or a `comm` that is no communicator of the open
            run.
    """
    axis = _axis("all_reduce", comm)
    if op not in collectives.OPS:
        known = ", ".join(collectives.OPS)
        raise ConfigurationError(f"unknown reduction {op!r}: expected one of {known}.")
    out: torch.Tensor
    if op == "prod":
        out = _Product.apply(x, axis, local_gradient)
    elif op in ("max", "min"):
        out = _Extremum.apply(x, op, axis, local_gradient)
    else:
        out = _Linear.apply(
            x,
            lambda x: collectives.all_reduce(x, "sum", axis),
            lambda grad: grad if local_gradient else all_reduce(grad, "sum", axis),
        )
    return out / axis.size if op == "avg" else out


def broadcast(
    src: torch.Tensor, root: int, comm: Axis | None = None, *, local_gradient: bool = False
) -> torch.Tensor:
    """The `src` of the rank at index `root`, on every rank.

    Backward sums the gradients of all ranks at the root. The root's `src` decides whether the
    result requires grad; the other ranks' `src` get zero gradients.

    Args:
        src: on the rank's device, of the same shape and dtype on every rank.
        root: an index in `comm`.
        comm: the ranks, an axis such as config["comm"]; None is all.
        local_gradient: backward gives that sum to every rank's `src`, as in BMTrain. The result
            then requires grad on all ranks if `src` does on any.

    Raises:
        ConfigurationError: for a `comm` that is no communicator of the open run, or has no rank
            `root`.
    """
    axis = _axis("broadcast", comm, root)
    can_require_grad = src.is_floating_point() or src.is_complex()
    if torch.is_grad_enabled() and can_require_grad and axis.size > 1:
        wanted = torch.tensor([src.requires_grad], dtype=torch.uint8, device="cpu")
        if local_gradient:
            collectives.all_reduce_(wanted, "max", axis)
        else:
            collectives.broadcast_(wanted, root, axis)
        if wanted.item() != src.requires_grad:
            src = src.detach().requires_grad_(bool(wanted.item()))

    def run(x: torch.Tensor) -> torch.Tensor:
        out = x.clone(memory_format=torch.contiguous_format)
        collectives.broadcast_(out, root, axis)
        return out

    def adjoint(grad: torch.Tensor) -> torch.Tensor:
        total = all_reduce(grad, "sum", axis)
        return total if local_gradient or axis.index == root else torch.zeros_like(total)

    out: torch.Tensor = _Linear.apply(src, run, adjoint)
    return out


def send_activations(
    hidden_state: torch.Tensor, next_rank: int, comm: Axis | None = None
) -> torch.Tensor:
    """Send `hidden_state`, with its dtype and shape, to the rank at index `next_rank`.

    That rank must call `recv_activations`. Returns a 0-dim zero on its device: backward through it
    waits for the gradient from the receiver's backward and passes it on to `hidden_state`. Ignore
    it if `hidden_state` needs no gradient.

    Args:
        hidden_state: on the rank's device, of any shape and dtype.
        next_rank: an index in `comm`.
        comm: the ranks, an axis such as config["comm"]; None is all.

    Raises:
        ConfigurationError: for a `comm` that is no communicator of the open run, or has no rank
            `next_rank`.
    """
    axis = _axis("send_activations", comm, next_rank)
    wants_grad = torch.is_grad_enabled() and hidden_state.requires_grad
    collectives.send_object(
        (tuple(hidden_state.shape), hidden_state.dtype, wants_grad), next_rank, axis
    )
    token: torch.Tensor = _Send.apply(hidden_state, next_rank, axis)
    return token


def recv_activations(prev_rank: int, comm: Axis | None = None) -> torch.Tensor:
    """Receive what the rank at index `prev_rank` sends by `send_activations`, on this device.

    The result requires grad if the sender's `hidden_state` does and gradients are enabled here; its
    backward then sends the gradient back, exactly once.

    Args:
        prev_rank: an index in `comm`.
        comm: the ranks, an axis such as config["comm"]; None is all.

    Raises:
        ConfigurationError: for a `comm` that is no communicator of the open run, or has no rank
            `prev_rank`.
    """
    axis = _axis("recv_activations", comm, prev_rank)
    shape, dtype, wants_grad = collectives.receive_object(prev_rank, axis)
    # No input requires grad on this rank. The anchor makes the result require it, and never gets a
    # gradient itself.
    anchor = torch.zeros((), device=world.device(), requires_grad=wants_grad)
    buffer = torch.empty(shape, dtype=dtype, device=world.device())
    out: torch.Tensor = _Receive.apply(anchor, buffer, prev_rank, axis)
    return out


def checked(what: str, comm: Axis, place: int = 0) -> Axis:
    """The communicator.

    Raises:
        ConfigurationError: for what is none, or does not have an index `place`.
    """
    world.current(what)
    if not isinstance(comm, Axis):
        raise ConfigurationError(
            f"{what} got the communicator {comm!r}: expected one of the run after "
            "init_distributed(), bmtrain.config['comm'] for example."
        )
    if not COUNT.holds(place) or place >= comm.size:
        raise ConfigurationError(
            f"{what} got rank {place!r} of a communicator of {comm.size} ranks: expected 0 "
            f"to {comm.size - 1}."
        )
    return comm


def _axis(what: str, comm: Axis | None, place: int = 0) -> Axis:
    """The same; None is all ranks."""
    return checked(what, world.current(what).mesh.world if comm is None else comm, place)


class _Linear(torch.autograd.Function):
    """`run(x)`, a linear function of all ranks' `x`; its adjoint is differentiable too."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        run: Callable[[torch.Tensor], torch.Tensor],
        adjoint: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        ctx.adjoint, ctx.shape = adjoint, x.shape
        return run(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.adjoint(grad).reshape(ctx.shape), None, None


class _Extremum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, op: str, axis: Axis, local: bool) -> torch.Tensor:
        out = collectives.all_reduce(x, op, axis)
        ctx.axis, ctx.local = axis, local
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        x, out = ctx.saved_tensors
        reached = x == out
        if ctx.local:
            return torch.where(reached, grad, torch.zeros_like(grad)), None, None, None
        count = collectives.all_reduce(reached.to(grad.dtype), "sum", ctx.axis)
        total = collectives.all_reduce(grad, "sum", ctx.axis)
        return torch.where(reached, total / count, torch.zeros_like(total)), None, None, None


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, local: bool) -> torch.Tensor:
        ctx.axis, ctx.local = axis, local
        # With local gradients, ranks may run backward alone: gathering the other ranks' values
        # there would hang, so the product is computed now.
        ctx.save_for_backward(_product_of_others(x, axis) if local else x)
        return collectives.all_reduce(x, "prod", axis)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (saved,) = ctx.saved_tensors
        if ctx.local:
            return grad * saved, None, None
        return (
            collectives.all_reduce(grad, "sum", ctx.axis) * _product_of_others(saved, ctx.axis),
            None,
            None,
        )


def _product_of_others(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The product over the other ranks. Not product / x, which fails where `x` is zero."""
    parts = collectives.all_gather(x, axis)
    parts[axis.index] = 1
    return parts.prod(0)


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, target: int, axis: Axis) -> torch.Tensor:
        ctx.target, ctx.axis = target, axis
        ctx.like = x.new_empty(0), x.shape
        collectives.send(x.contiguous(), target, axis)
        return x.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        kind, shape = ctx.like
        received = kind.new_empty(shape)
        collectives.receive_(received, ctx.target, ctx.axis)
        return received, None, None


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, buffer: torch.Tensor, source: int, axis: Axis
    ) -> torch.Tensor:
        ctx.source, ctx.axis = source, axis
        collectives.receive_(buffer, source, axis)
        ctx.mark_dirty(buffer)
        return buffer

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None, None, None]:
        collectives.send(grad.contiguous(), ctx.source, ctx.axis)
        return None, None, None, None
