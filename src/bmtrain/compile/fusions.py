"""GELU and norms of compiled blocks, forward and backward, through kernels of this library, and
gradients of small tables of embeddings.

`rewrite` replaces torch's functions by those of this file in the graph that Dynamo has traced. The
sums around them appear only in the joint graph: see `joining.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F

from bmtrain.compile.graph import can_wait, given, value_of
from bmtrain.kernels.gelu import gelu, gelu_backward
from bmtrain.kernels.norm import MOST_COLUMNS, NARROW, norm_backward_op, norm_op

Wanted = Callable[[torch.Tensor], bool]
MOST_ROWS = 64  # of a small table: all indices are looked at once for each
MOST_NUMEL = 4096  # of it: a wider one has addresses enough, and the gradient is read once a row
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class LinearGelu(torch.autograd.Function):
    """`gelu(input @ weight.T + bias)`: (..., k), (n, k) and (n,) -> (..., n).

    The kernel of GELU's gradient also computes the bias's gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
    ) -> torch.Tensor:
        rows = input.reshape(-1, input.shape[-1])
        product = torch.addmm(bias, rows, weight.t())
        ctx.save_for_backward(rows, weight, product)
        return gelu(product).view(*input.shape[:-1], weight.shape[0])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, weight, product = ctx.saved_tensors
        wants_input, wants_weight, _ = ctx.needs_input_grad
        grad_product, sums = gelu_backward(grad.reshape(product.shape), product)
        grad_input = (
            (grad_product @ weight).view(*grad.shape[:-1], weight.shape[1]) if wants_input else None
        )
        grad_weight = grad_product.t() @ rows if wants_weight else None
        return grad_input, grad_weight, sums.sum(0).to(weight.dtype)


class SmallTable(torch.autograd.Function):
    """Rows of a table of a few embeddings: (...) indices, (rows, dim) -> (..., dim).

    Each row's gradient is a sum over all indices, in fp32. The compiler's code adds up in memory,
    and all tokens would wait for one another at a few addresses.
    """

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, weight: torch.Tensor, padding_idx: int | None
    ) -> torch.Tensor:
        ctx.save_for_backward(input)
        ctx.rows, ctx.padding = weight.shape[0], padding_idx
        return F.embedding(input, weight, padding_idx)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (input,) = ctx.saved_tensors
        rows = torch.arange(ctx.rows, device=grad.device)[:, None]
        is_own = input.reshape(1, -1) == rows
        if ctx.padding is not None:
            is_own &= rows != ctx.padding % ctx.rows
        own = torch.where(is_own[:, :, None], grad.reshape(1, -1, grad.shape[-1]), 0)
        return None, own.sum(1, dtype=torch.float32).to(grad.dtype), None


class Norm(torch.autograd.Function):
    """layer_norm over the last dimension, with weight and bias; rms_norm without a bias."""

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
    ) -> torch.Tensor:
        mean: torch.Tensor | None = None
        if weight.shape[0] > NARROW:
            out, mean, rstd, _ = norm_op([input], weight, bias, eps, bias is not None)
        elif bias is not None:
            out, mean, rstd = torch.native_layer_norm(input, weight.shape, weight, bias, eps)
        else:
            wide = input.float()
            rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
            out = (wide * rstd * weight.float()).to(input.dtype)
        ctx.save_for_backward(input, weight, rstd, mean if bias is not None else None)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, weight, rstd, mean = ctx.saved_tensors
        grad_input, sums, _ = norm_backward_op([grad], [input], weight, mean, rstd)
        if mean is None:
            return grad_input, sums[0].sum(0).to(weight.dtype), None, None
        return grad_input, *sums.sum(1).to(weight.dtype).unbind(), None


def layer_norm(
    input: torch.Tensor,
    normalized_shape: Any,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> torch.Tensor:
    """`Norm` with the signature of torch's function."""
    return cast(torch.Tensor, Norm.apply(input, weight, bias, eps))


def rms_norm(
    input: torch.Tensor, normalized_shape: Any, weight: torch.Tensor, eps: float | None = None
) -> torch.Tensor:
    """`Norm` with the signature of torch's function."""
    eps = torch.finfo(input.dtype).eps if eps is None else eps
    return cast(torch.Tensor, Norm.apply(input, weight, None, eps))


def small_table(
    input: torch.Tensor, weight: torch.Tensor, padding_idx: int | None = None, *_: Any, **__: Any
) -> torch.Tensor:
    """`SmallTable` with the signature of torch.nn.functional.embedding."""
    return cast(torch.Tensor, SmallTable.apply(input, weight, padding_idx))


def linear_gelu(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """`LinearGelu` with the signature of torch.nn.functional.linear."""
    return cast(torch.Tensor, LinearGelu.apply(input, weight, bias))


_NORMS: dict[Any, tuple[Callable[..., torch.Tensor], tuple[str, ...]]] = {
    **dict.fromkeys((F.layer_norm, torch.layer_norm), (layer_norm, ("weight", "bias"))),
    **dict.fromkeys((F.rms_norm, torch.rms_norm), (rms_norm, ("weight",))),
}


def rewrite(graph: torch.fx.GraphModule, wanted: Wanted) -> None:
    """Replace torch's functions by those of this file, in place, in a graph traced by Dynamo.

    Args:
        wanted: given a function's result, says whether to replace the function: where kernels run.
            On a CPU the compiler's code is kept.
    """
    # The compiler fuses masks of dropout into its own backward kernels; it cannot into ours.
    drops = any(
        node.target is F.dropout
        and given(node).get("p", 0.5) != 0.0
        and given(node).get("training", True) is not False
        for node in graph.graph.nodes
    )
    for node in list(graph.graph.nodes):
        value = value_of(node)
        if (
            node.op != "call_function"
            or value is None
            or value.dtype not in _DTYPES
            or not wanted(value)
        ):
            continue
        if node.target is F.gelu and node.kwargs == {"approximate": "tanh"}:
            product = node.args[0]
            if not drops and _is_plain_linear(product) and can_wait(product, node):
                node.target, node.args, node.kwargs = linear_gelu, product.args, product.kwargs
                graph.graph.erase_node(product)
            else:
                node.target, node.kwargs = gelu, {}
        elif not drops and node.target in _NORMS:
            function, parameters = _NORMS[node.target]
            if _is_plain_norm(node, *parameters):
                node.target = function
        elif node.target is F.embedding and _is_small_table(node):
            node.target = small_table
    graph.recompile()


def _is_plain_linear(node: Any) -> bool:
    """Whether the node is F.linear with trainable weight and bias, and one user."""
    if not isinstance(node, torch.fx.Node) or node.target is not F.linear:
        return False
    tensors = _alike(node, "input", "weight", "bias")
    return (
        len(node.users) == 1
        and bool(tensors)
        and all(tensor.requires_grad for tensor in tensors[1:])
        and tensors[1].dim() == 2
    )


def _is_small_table(node: torch.fx.Node) -> bool:
    """Whether the node is F.embedding with a trainable table of few rows, and without options."""
    tensors = _alike(node, "weight")
    options = map(given(node).get, ("max_norm", "scale_grad_by_freq", "sparse"))
    return (
        bool(tensors)
        and tensors[0].requires_grad
        and tensors[0].shape[0] <= MOST_ROWS
        and tensors[0].numel() <= MOST_NUMEL
        and not any(options)
    )


def _is_plain_norm(node: torch.fx.Node, *parameters: str) -> bool:
    """Whether the norm is over the last dim only, with trainable parameters."""
    tensors = _alike(node, "input", *parameters)
    return (
        bool(tensors)
        and all(tensor.dim() == 1 and tensor.requires_grad for tensor in tensors[1:])
        and tensors[1].shape[0] <= MOST_COLUMNS
        and tensors[0].requires_grad
    )


def _alike(node: torch.fx.Node, *names: str) -> list[torch.Tensor]:
    """The tensors passed for these parameters.

    Empty if one is not given a tensor, or one of another dtype than the result: autocast would
    convert it.
    """
    arguments, result = given(node), value_of(node)
    found = [value_of(arguments.get(name)) for name in names]
    is_alike = result is not None and all(x is not None and x.dtype == result.dtype for x in found)
    return [x for x in found if x is not None] if is_alike else []
