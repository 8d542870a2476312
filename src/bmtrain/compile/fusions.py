"""GELU and norms of compiled blocks, forward and backward, through kernels of this library; masks
of attention in a form that torch's fast kernels take.

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
from bmtrain.kernels.norm import MOST_COLUMNS, NARROW, norm, norm_backward

Wanted = Callable[[torch.Tensor], bool]
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


class Norm(torch.autograd.Function):
    """layer_norm over the last dimension, with weight and bias; rms_norm without a bias."""

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
    ) -> torch.Tensor:
        mean: torch.Tensor | None = None
        if weight.shape[0] > NARROW:
            out, mean, rstd, _ = norm([input], weight, bias, eps, bias is not None)
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
        grad_input, sums, _ = norm_backward([grad], [input], weight, mean, rstd)
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


def linear_gelu(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """`LinearGelu` with the signature of torch.nn.functional.linear."""
    return cast(torch.Tensor, LinearGelu.apply(input, weight, bias))


_NORMS: dict[Any, tuple[Callable[..., torch.Tensor], tuple[str, ...]]] = {
    **dict.fromkeys((F.layer_norm, torch.layer_norm), (layer_norm, ("weight", "bias"))),
    **dict.fromkeys((F.rms_norm, torch.rms_norm), (rms_norm, ("weight",))),
}


def is_on_gpu(tensor: torch.Tensor) -> bool:
    """Whether this library's kernels are used: on a GPU. On a CPU the compiler's code is kept."""
    return tensor.device.type != "cpu"


def rewrite(graph: torch.fx.GraphModule, wanted: Wanted = is_on_gpu) -> None:
    """Replace torch's functions by those of this file, in place, in a graph traced by Dynamo.

    Args:
        wanted: given a function's result, says whether to replace the function.
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
        elif node.target is F.scaled_dot_product_attention:
            _simplify_mask(node)
    graph.recompile()


def _simplify_mask(node: torch.fx.Node) -> None:
    """Leave a mask of zeros out, and make the last dimension of any other contiguous.

    The position bias of T5 is a permuted table of embeddings: for its strides torch would take the
    path that holds all scores in fp32. Its cross attention adds zeros.
    """
    mask = given(node).get("attn_mask")
    value = value_of(mask)
    if mask is None or value is None or not value.is_floating_point():
        return
    made: torch.fx.Node | None = None
    if mask.target is not torch.zeros or any(user.target is not node.target for user in mask.users):
        if value.stride(-1) == 1:
            return
        with node.graph.inserting_before(node):
            made = node.graph.call_method("contiguous", (mask,))
        made.meta = {**mask.meta, "example_value": value.contiguous()}
    node.args = tuple(made if each is mask else each for each in node.args)
    node.kwargs = {name: made if each is mask else each for name, each in node.kwargs.items()}


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
