"""GELU and norms of compiled blocks, forward and backward, through kernels of this library.

`rewrite` replaces torch's functions by those of this file in the graph that Dynamo has traced. The
sums around them appear only in the joint graph: see `joining.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F

from bmtrain.compile.graph import can_wait
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


class LayerNorm(torch.autograd.Function):
    """torch.nn.functional.layer_norm over the last dimension, with weight and bias."""

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
    ) -> torch.Tensor:
        if weight.shape[0] > NARROW:
            out, mean, rstd, _ = norm([input], weight, bias, eps, True)
        else:
            out, mean, rstd = torch.native_layer_norm(input, weight.shape, weight, bias, eps)
        ctx.save_for_backward(input, weight, mean, rstd)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, weight, mean, rstd = ctx.saved_tensors
        grad_input, sums, _ = norm_backward([grad], [input], weight, mean, rstd)
        return grad_input, *sums.sum(1).to(weight.dtype).unbind(), None


class RMSNorm(torch.autograd.Function):
    """torch.nn.functional.rms_norm over the last dimension, with a weight."""

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, weight: torch.Tensor, eps: float | None
    ) -> torch.Tensor:
        eps = torch.finfo(input.dtype).eps if eps is None else eps
        if weight.shape[0] > NARROW:
            out, _, rstd, _ = norm([input], weight, None, eps, False)
        else:
            wide = input.float()
            rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
            out = (wide * rstd * weight.float()).to(input.dtype)
        ctx.save_for_backward(input, weight, rstd)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, weight, rstd = ctx.saved_tensors
        grad_input, sums, _ = norm_backward([grad], [input], weight, None, rstd)
        return grad_input, sums[0].sum(0).to(weight.dtype), None


def layer_norm(
    input: torch.Tensor,
    normalized_shape: Any,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> torch.Tensor:
    """`LayerNorm` with the signature of torch's function."""
    return cast(torch.Tensor, LayerNorm.apply(input, weight, bias, eps))


def rms_norm(
    input: torch.Tensor, normalized_shape: Any, weight: torch.Tensor, eps: float | None = None
) -> torch.Tensor:
    """`RMSNorm` with the signature of torch's function."""
    return cast(torch.Tensor, RMSNorm.apply(input, weight, eps))


def linear_gelu(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """`LinearGelu` with the signature of torch.nn.functional.linear."""
    return cast(torch.Tensor, LinearGelu.apply(input, weight, bias))


def is_on_gpu(tensor: torch.Tensor) -> bool:
    """Whether this library's kernels are used: on a GPU. On a CPU the compiler's code is kept."""
    return tensor.device.type != "cpu"


def rewrite(graph: torch.fx.GraphModule, wanted: Wanted = is_on_gpu) -> None:
    """Replace torch's functions by those of this file, in place, in a graph traced by Dynamo.

    Args:
        wanted: given a function's result, says whether to replace the function.
    """
    drops = any(map(_drops, graph.graph.nodes))
    for node in list(graph.graph.nodes):
        value = _value(node)
        if (
            node.op == "call_function"
            and value is not None
            and value.dtype in _DTYPES
            and wanted(value)
        ):
            _rewrite_gelu(node, alone=drops)
            if not drops:
                _rewrite_norm(node)
    graph.recompile()


def _drops(node: torch.fx.Node) -> bool:
    """Whether the node is active dropout.

    The compiler fuses dropout masks into its own backward kernels; it cannot fuse them into ours.
    """
    return (
        node.target is F.dropout
        and _argument(node, "p", 0.5) != 0.0
        and _argument(node, "training", True) is not False
    )


def _rewrite_gelu(node: torch.fx.Node, alone: bool) -> None:
    if node.target is F.gelu and node.kwargs == {"approximate": "tanh"}:
        product = node.args[0]
        if (
            not alone
            and isinstance(product, torch.fx.Node)
            and _is_plain_linear(product)
            and can_wait(product, node)
        ):
            node.target, node.args, node.kwargs = linear_gelu, product.args, product.kwargs
            node.graph.erase_node(product)
        else:
            node.target, node.kwargs = gelu, {}


def _rewrite_norm(node: torch.fx.Node) -> None:
    if node.target in (F.layer_norm, torch.layer_norm) and _is_plain_norm(node, "weight", "bias"):
        node.target = layer_norm
    elif node.target in (F.rms_norm, torch.rms_norm) and _is_plain_norm(node, "weight"):
        node.target = rms_norm


def _is_plain_linear(node: torch.fx.Node) -> bool:
    """Whether the node is F.linear with trainable weight and bias, and one user."""
    tensors = _arguments(node, "input", "weight", "bias")
    return (
        node.target is F.linear
        and len(node.users) == 1
        and _alike(node, *tensors)
        and all(tensor.requires_grad for tensor in tensors[1:])
        and tensors[1].dim() == 2
    )


def _is_plain_norm(node: torch.fx.Node, *parameters: str) -> bool:
    """Whether the norm is over the last dim only, with trainable parameters."""
    tensors = _arguments(node, "input", *parameters)
    return (
        _alike(node, *tensors)
        and all(tensor.dim() == 1 and tensor.requires_grad for tensor in tensors[1:])
        and tensors[1].shape[0] <= MOST_COLUMNS
        and tensors[0].requires_grad
    )


_NAMES: dict[Any, tuple[str, ...]] = {
    F.dropout: ("input", "p", "training"),
    F.linear: ("input", "weight", "bias"),
    **dict.fromkeys(
        (F.layer_norm, torch.layer_norm), ("input", "normalized_shape", "weight", "bias")
    ),
    **dict.fromkeys((F.rms_norm, torch.rms_norm), ("input", "normalized_shape", "weight")),
}


def _arguments(node: torch.fx.Node, *names: str) -> list[torch.Tensor]:
    """The tensors passed for these parameters; empty if one of them is not given a tensor."""
    values = [_value(_argument(node, name)) for name in names]
    found = [value for value in values if value is not None]
    return found if len(found) == len(names) else []


def _argument(node: torch.fx.Node, name: str, usual: Any = None) -> Any:
    """The argument passed for a parameter; `usual` if there is none."""
    return (dict(zip(_NAMES.get(node.target, ()), node.args, strict=False)) | node.kwargs).get(
        name, usual
    )


def _alike(node: torch.fx.Node, *tensors: torch.Tensor) -> bool:
    """Whether there are tensors, all of the result's dtype, so that autocast converts none."""
    value = _value(node)
    return (
        bool(tensors)
        and value is not None
        and all(tensor.dtype == value.dtype for tensor in tensors)
    )


def _value(node: Any) -> torch.Tensor | None:
    """The example tensor that Dynamo has recorded for a node; None if it is not a tensor."""
    value = node.meta.get("example_value") if isinstance(node, torch.fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None
