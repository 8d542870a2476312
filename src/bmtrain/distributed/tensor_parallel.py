"""Differentiable operations on the tensor-parallel axis, each a single opaque op to torch.compile.

Gradients are those of the sum of all ranks' losses. The axis is looked up in the current world when
an operation runs. Every forward call first checks on the CPU that all tensor-parallel ranks call
the same operation with equal shapes and dtypes, and raises on all of them if not. Without that
check the collective would hang or mix up data. Linear layers with `agreed` leave it out: the ranks
have compared the code that calls them, and all that it is given.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from bmtrain.distributed import collectives
from bmtrain.distributed.agreement import told_apart
from bmtrain.distributed.overlap import Overlap
from bmtrain.errors import ConfigurationError
from bmtrain.runtime import world
from bmtrain.runtime.mesh import Axis

_CALL = "a tensor-parallel call"  # the same for all of them: `check_alike` tells which


def axis() -> Axis:
    """The tensor-parallel axis of the current world."""
    return world.current("tensor parallelism").mesh.tp


def check_alike(what: str, facts: str) -> None:
    """Raise ConfigurationError on all tensor-parallel ranks unless their `what` and `facts` agree.

    A checksum travels on the CPU; the facts themselves, for the message, only if it differs.
    """
    each = told_apart(f"{what}: {facts}", axis(), _CALL)
    if each is None:
        return
    raise ConfigurationError(
        f"the tensor-parallel ranks do not match ({each}): expected the same call with "
        "equal shapes and dtypes on all of them; "
        "pad or cut the batch so that every rank has as many rows."
    )


def _agree(what: str, **facts: object) -> None:
    """`check_alike` for the arguments of an operation.

    Whether a gradient is needed is among them: it decides which collectives backward issues.
    """
    for name, fact in facts.items():
        if isinstance(fact, torch.Tensor):
            gradient = " with gradient" if fact.requires_grad else ""
            facts[name] = f"{tuple(fact.shape)} {fact.dtype}{gradient}"
    check_alike(what, ", ".join(f"{name} {fact}" for name, fact in facts.items()))


def _matrix(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


# Gather and scatter of rows, and reductions


@torch.library.custom_op("bmtrain::tp_gather_rows", mutates_args=(), schema="(Tensor x) -> Tensor")
def gather_rows(x: torch.Tensor) -> torch.Tensor:
    """Every rank's `x` (rows, ...), in rank order along dim 0: (ranks * rows, ...)."""
    _agree("gather_rows", x=x)
    return collectives.all_gather(x, axis()).flatten(0, 1)


@torch.library.custom_op("bmtrain::tp_scatter_rows", mutates_args=(), schema="(Tensor x) -> Tensor")
def scatter_rows(x: torch.Tensor) -> torch.Tensor:
    """Sum `x` (ranks * rows, ...) over ranks and return this rank's rows: (rows, ...)."""
    _agree("scatter_rows", x=x)
    return collectives.reduce_scatter(x, axis())


gather_rows.register_fake(lambda x: x.new_empty((axis().size * x.shape[0], *x.shape[1:])))
scatter_rows.register_fake(lambda x: x.new_empty((x.shape[0] // axis().size, *x.shape[1:])))
gather_rows.register_autograd(lambda ctx, grad: scatter_rows(grad))
scatter_rows.register_autograd(lambda ctx, grad: gather_rows(grad))


@torch.library.custom_op(
    "bmtrain::tp_all_reduce", mutates_args=(), schema="(Tensor x, str op) -> Tensor"
)
def all_reduce(x: torch.Tensor, op: str = "sum") -> torch.Tensor:
    """Reduce every rank's `x` by "sum" or "max"; only the sum is differentiable."""
    _agree("all_reduce", x=x, op=op)
    return collectives.all_reduce(x, op, axis())


def _keep_op(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.op = inputs[1]


def _all_reduce_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    if ctx.op != "sum":
        raise RuntimeError(f"all_reduce by {ctx.op} over the tensor-parallel ranks has no gradient")
    return all_reduce(grad, "sum"), None


all_reduce.register_fake(
    lambda x, op="sum": torch.empty_like(x, memory_format=torch.contiguous_format)
)
all_reduce.register_autograd(_all_reduce_backward, setup_context=_keep_op)


# Linear layers over the rows of all ranks


def own_features(x: torch.Tensor, count: int) -> torch.Tensor:
    """This rank's `count` features of `x` (..., ranks * count): a view (..., count)."""
    return x.narrow(-1, axis().index * count, count)


def _check_factors(what: str, x: torch.Tensor, weight: torch.Tensor, expected: int) -> None:
    """Check shape and dtype of a factor, which torch would report for one rank's part only.

    The error is the same on all tensor-parallel ranks, once they have agreed on the shapes.
    """
    if x.dim() < 2 or x.shape[-1] != expected:
        raise ConfigurationError(
            f"{what} got an input of shape {tuple(x.shape)} for a weight of "
            f"{tuple(weight.shape)} on each rank: expected "
            f"(rows, ..., {expected}); check gather_output and split_input of the layers around it."
        )
    if x.dtype != weight.dtype:
        raise ConfigurationError(
            f"{what} got an input of {x.dtype} for a weight of {weight.dtype}: "
            "expected equal dtypes; convert the input, or use autocast."
        )


@torch.library.custom_op(
    "bmtrain::tp_gather_linear",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor? bias, int num_chunks, bool agreed=False) -> Tensor",
)
def gather_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    num_chunks: int,
    agreed: bool = False,
) -> torch.Tensor:
    """All ranks' rows x (rows, ..., n) times weight (m, n)^T, plus bias: (ranks * rows, ..., m)."""
    if not agreed:
        _agree("gather_linear", x=x, weight=weight, bias=bias is not None, chunks=num_chunks)
    _check_factors("a linear map of gathered rows", x, weight, weight.shape[1])
    overlap, own = _overlap(), _matrix(x)
    gathering = overlap.gather(own, overlap.num_chunks(len(own), weight, num_chunks))
    product = overlap.multiply_gathered(gathering, weight.t(), bias)
    return product.view(axis().size * x.shape[0], *x.shape[1:-1], weight.shape[0])


@torch.library.custom_op(
    "bmtrain::tp_gather_linear_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor x, Tensor weight, int num_chunks, bool for_x, bool "
    "for_weight) -> (Tensor, Tensor)",
)
def _gather_linear_gradients(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    num_chunks: int,
    for_x: bool,
    for_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of x and weight; an empty tensor for one that is not needed.

    Gathers x again: forward does not save the gathered rows.
    """
    overlap, grad = _overlap(), _matrix(grad)
    rows = overlap.gather(_matrix(x), 1, whole=True) if for_weight else None
    num_chunks = overlap.num_chunks(len(_matrix(x)), weight, num_chunks)
    sums = overlap.multiply_scatter(grad, weight, num_chunks) if for_x else None
    grad_weight = weight.new_empty(0) if rows is None else grad.t() @ overlap.gathered(rows)
    return x.new_empty(0) if sums is None else overlap.scattered(sums).view(x.shape), grad_weight


@torch.library.custom_op(
    "bmtrain::tp_linear_scatter",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, bool split_input, int num_chunks, bool agreed=False) "
    "-> Tensor",
)
def linear_scatter(
    x: torch.Tensor, weight: torch.Tensor, split_input: bool, num_chunks: int, agreed: bool = False
) -> torch.Tensor:
    """x (ranks * rows, ..., n) times weight (m, n)^T, reduce-scattered over ranks: (rows, ..., m).

    With `split_input`, x has the features of all ranks (..., ranks * n), of which this rank uses
    its own.
    """
    x = _own_input("linear_scatter", x, weight, split_input, num_chunks, agreed)
    collectives.check_divided(x, axis())
    overlap, rows = _overlap(), _matrix(x)
    num_chunks = overlap.num_chunks(len(rows) // axis().size, weight, num_chunks)
    sums = overlap.multiply_scatter(rows, weight.t(), num_chunks)
    return overlap.scattered(sums).view(x.shape[0] // axis().size, *x.shape[1:-1], weight.shape[0])


@torch.library.custom_op(
    "bmtrain::tp_linear_scatter_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor x, Tensor weight, int num_chunks, bool for_x, bool "
    "for_weight) -> (Tensor, Tensor)",
)
def _linear_scatter_gradients(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    num_chunks: int,
    for_x: bool,
    for_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of x and weight; an empty tensor for one that is not needed."""
    overlap, own = _overlap(), _matrix(grad)
    rows = overlap.gather(own, overlap.num_chunks(len(own), weight, num_chunks), whole=for_weight)
    grad_x = overlap.multiply_gathered(rows, weight).view(x.shape) if for_x else x.new_empty(0)
    return grad_x, overlap.gathered(rows).t() @ _matrix(x) if for_weight else weight.new_empty(0)


@torch.library.custom_op(
    "bmtrain::tp_linear_reduce",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, bool split_input, bool agreed=False) -> Tensor",
)
def linear_reduce(
    x: torch.Tensor, weight: torch.Tensor, split_input: bool, agreed: bool = False
) -> torch.Tensor:
    """The sum over ranks of x (rows, ..., n) times weight (m, n)^T, on every rank: (rows, ..., m).

    With `split_input`, x has the features of all ranks (..., ranks * n).
    """
    own = _own_input("linear_reduce", x, weight, split_input, 1, agreed)
    product = _matrix(own) @ weight.t()
    collectives.all_reduce_(product, "sum", axis())
    return product.view(*x.shape[:-1], weight.shape[0])


def _own_input(
    what: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    split_input: bool,
    num_chunks: int,
    agreed: bool,
) -> torch.Tensor:
    """The features of x that this rank's weight multiplies, after all ranks agree on the shapes."""
    if not agreed:
        _agree(what, x=x, weight=weight, split_input=split_input, chunks=num_chunks)
    count = weight.shape[1]
    _check_factors(
        "a linear map with a sum over ranks",
        x,
        weight,
        axis().size * count if split_input else count,
    )
    return own_features(x, count) if split_input else x


def _overlap() -> Overlap:
    return world.current("tensor parallelism").service(Overlap)


def _keep_factors(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[0], inputs[1])
    ctx.options = inputs[2:]


def _gather_linear_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    for_x, for_weight, for_bias, *_ = ctx.needs_input_grad
    grad_x, grad_weight = _gather_linear_gradients(
        grad, *ctx.saved_tensors, ctx.options[1], for_x, for_weight
    )
    # Outside the opaque op, so that the compiler can fuse this sum with the kernel that produces
    # `grad`.
    grad_bias = _matrix(grad).sum(0) if for_bias else None
    return grad_x if for_x else None, grad_weight if for_weight else None, grad_bias, None, None


def _linear_scatter_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    (x, weight), (split_input, num_chunks, _) = ctx.saved_tensors, ctx.options
    for_x, for_weight, *_ = ctx.needs_input_grad
    own = own_features(x, weight.shape[1]) if split_input else x
    grad_x, grad_weight = _linear_scatter_gradients(
        grad, own, weight, num_chunks, for_x, for_weight
    )
    return (
        _input_gradient(grad_x, x, split_input) if for_x else None,
        grad_weight if for_weight else None,
        None,
        None,
        None,
    )


def _linear_reduce_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    (x, weight), (split_input, _) = ctx.saved_tensors, ctx.options
    for_x, for_weight, *_ = ctx.needs_input_grad
    own = own_features(x, weight.shape[1]) if split_input else x
    grad = all_reduce(grad, "sum")
    grad_x = _input_gradient(grad @ weight, x, split_input) if for_x else None
    return grad_x, _matrix(grad).t() @ _matrix(own) if for_weight else None, None, None


def _input_gradient(grad: torch.Tensor, x: torch.Tensor, split_input: bool) -> torch.Tensor:
    """The gradient of all features of x; zero for those that this rank does not use."""
    if not split_input:
        return grad
    before = axis().index * grad.shape[-1]
    return F.pad(grad, (before, x.shape[-1] - before - grad.shape[-1]))


gather_linear.register_fake(
    lambda x, weight, bias, num_chunks, agreed=False: x.new_empty(
        (axis().size * x.shape[0], *x.shape[1:-1], weight.shape[0])
    )
)
linear_scatter.register_fake(
    lambda x, weight, split_input, num_chunks, agreed=False: x.new_empty(
        (x.shape[0] // axis().size, *x.shape[1:-1], weight.shape[0])
    )
)
linear_reduce.register_fake(
    lambda x, weight, split_input, agreed=False: x.new_empty((*x.shape[:-1], weight.shape[0]))
)
for _gradients in (_gather_linear_gradients, _linear_scatter_gradients):
    _gradients.register_fake(
        lambda grad, x, weight, num_chunks, for_x, for_weight: (
            x.new_empty(x.shape if for_x else 0),
            weight.new_empty(weight.shape if for_weight else 0),
        )
    )
gather_linear.register_autograd(_gather_linear_backward, setup_context=_keep_factors)
linear_scatter.register_autograd(_linear_scatter_backward, setup_context=_keep_factors)
linear_reduce.register_autograd(_linear_reduce_backward, setup_context=_keep_factors)
