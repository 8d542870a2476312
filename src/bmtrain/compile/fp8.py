"""FP8 linear layers: what replaces torch.nn.functional.linear inside a block with fp8=True.

Modules stay as they are. Weights have no FP8 copy: a gathered weight is quantised on each use, and
only the FP8 codes of inputs are saved for backward. An eager block runs under a function mode that
intercepts F.linear. For a compiled block the graph is rewritten before it is lowered, because the
compiler does not see function modes inside recomputed regions.

Source: Micikevicius et al., "FP8 Formats for Deep Learning" (2022): e4m3 in the forward pass, e5m2
for gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from bmtrain.errors import ConfigurationError
from bmtrain.kernels import fp8
from bmtrain.recompute.recomputation import call
from bmtrain.torch_internals import plain_functions


def check_fp8(wanted: bool, device: torch.device) -> bool:
    """Return `wanted` if it is valid on this device.

    Raises:
        ConfigurationError: if it is not a bool, or is True and the device has no FP8 matmul.
    """
    if not isinstance(wanted, bool):
        raise ConfigurationError(
            f"fp8 is {wanted!r}: expected True, False, or None for the default of init_distributed."
        )
    # GPUs from Ada on; CPUs use fp32
    if wanted and device.type != "cpu" and torch.cuda.get_device_capability(device) < (8, 9):
        raise ConfigurationError(
            "fp8=True needs a GPU with eight-bit products (compute capability 8.9 or "
            f"more), {device} is a "
            f"{torch.cuda.get_device_name(device)}: leave it out."
        )
    return wanted


def linear(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """F.linear in FP8: input (..., k), weight (n, k), bias (n,) -> (..., n).

    Falls back to torch's F.linear if n or k is not a multiple of 16, the input is empty, or a dtype
    is not bf16, fp16 or fp32.
    """
    is_possible = (
        weight.dim() == 2
        and input.dim() > 0
        and input.shape[-1] == weight.shape[1]
        and all(size % fp8.ALIGNMENT == 0 for size in weight.shape)
        and input.numel() > 0
        and {input.dtype, weight.dtype} <= {torch.bfloat16, torch.float16, torch.float32}
    )
    if not is_possible:
        return F.linear(input, weight, bias)
    kind = input.device.type
    # of the result: the same as without fp8
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype
    out = Fp8Linear.apply(input.reshape(-1, input.shape[-1]), weight, bias, dtype)
    return out.view(*input.shape[:-1], weight.shape[0])


class Fp8Linear(torch.autograd.Function):
    """`x @ weight.T + bias` in FP8 with just-in-time scales. Saves `x` in FP8 for backward.

    Forward uses fast accumulation. Gradients accumulate in fp32 throughout, because their errors
    add up over many tokens and layers.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        codes, unit = fp8.quantise(x, fp8.E4M3)
        weight_codes, weight_unit = fp8.quantise(weight, fp8.E4M3)
        ctx.save_for_backward(codes, unit, weight, weight_unit)
        ctx.dtypes = (x.dtype, None if bias is None else bias.dtype)
        return fp8.product(codes, unit, weight_codes, weight_unit, bias, dtype, fast=True)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        codes, unit, weight, weight_unit = ctx.saved_tensors
        x_dtype, bias_dtype = ctx.dtypes
        wants_x, wants_weight, wants_bias, _ = ctx.needs_input_grad
        codes_of_grad = fp8.quantise(grad, fp8.E5M2)
        grad_x = grad_weight = grad_bias = None
        if wants_x:
            grad_x = fp8.input_gradient(*codes_of_grad, weight, weight_unit, x_dtype)
        if wants_weight:
            grad_weight = fp8.weight_gradient(*codes_of_grad, codes, unit, weight.dtype)
        if wants_bias:
            grad_bias = grad.sum(0, dtype=torch.float32).to(bias_dtype)
        return grad_x, grad_weight, grad_bias, None


class Fp8Mode(TorchFunctionMode):
    """Under this mode, every call of torch.nn.functional.linear is a call of `linear`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (linear if func is F.linear else func)(*args, **(kwargs or {}))


def call_in_fp8(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`call` with linear layers in FP8."""
    with Fp8Mode():
        return call(module, args, kwargs)


class Fp8Weight(torch.Tensor):
    """A weight for which F.linear is `linear` without a mode.

    For module code that runs in backward, outside the mode: checkpoints and hooks inside a block.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with plain_functions():
            return (linear if func is F.linear else func)(*args, **(kwargs or {}))


def marked(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors as Fp8Weights; their gradients flow back to the tensors."""
    with torch.enable_grad():
        return [tensor.as_subclass(Fp8Weight) for tensor in tensors]


def rewrite(graph: torch.fx.GraphModule) -> int:
    """Replace torch's F.linear by `linear` in a graph; returns the number of replacements."""
    nodes = [
        node for node in graph.graph.nodes if node.op == "call_function" and node.target is F.linear
    ]
    for node in nodes:
        node.target = linear
    graph.recompile()
    return len(nodes)
