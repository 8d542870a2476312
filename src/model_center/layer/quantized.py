"""Frozen linear layers whose weights are kept in 4 bits.

Source: Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs" (2023).
"""

from __future__ import annotations

from typing import Any

import torch

import bmtrain as bmt
from model_center.errors import ConfigError
from model_center.layer.linear import Linear
from model_center.optional import package

BLOCK_SIZE = 64  # elements that share a scale
KIND = "nf4"  # 4-bit NormalFloat


class QuantizedLinear(Linear):
    """A frozen linear layer with the values of another, the weight rounded to 4-bit NormalFloat.

    For a product the weight is made in the other layer's dtype, in forward and again in backward.
    Every rank holds all 4 bits of each element; the scales are sharded as other parameters are.

    Args:
        layer: whose weight and bias are taken. Collective if it is sharded.

    Attributes:
        weight: uint8, two elements in each.
        scales: fp32, one for `BLOCK_SIZE` elements.

    Raises:
        ConfigError: where bitsandbytes is missing.
    """

    scales: torch.nn.Parameter
    code: torch.Tensor

    def __init__(self, layer: Linear) -> None:
        torch.nn.Module.__init__(self)
        self.dim_in = self.in_features = layer.dim_in
        self.dim_out = self.out_features = layer.dim_out
        self.length_scale, self.length_scale_before = layer.length_scale, layer.length_scale_before
        packed, state = library().functional.quantize_4bit(
            whole(layer.weight), blocksize=BLOCK_SIZE, quant_type=KIND
        )
        self._dtype: torch.dtype = state.dtype
        self.register_parameter("weight", frozen(packed))
        self.register_parameter("scales", frozen(state.absmax))
        self.register_buffer("code", state.code, persistent=False)
        self.register_parameter("bias", None if layer.bias is None else frozen(whole(layer.bias)))

    def product(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """`x W^T + bias`, not scaled."""
        # Made anew: backward reads the one of its forward pass, with the scales gathered for that.
        state = library().functional.QuantState(
            absmax=self.scales,
            shape=torch.Size((self.dim_out, self.dim_in)),
            code=self.code,
            blocksize=BLOCK_SIZE,
            quant_type=KIND,
            dtype=self._dtype,
        )
        out: torch.Tensor = library().matmul_4bit(x, self.weight.t(), state, bias=bias)
        return out


def whole(param: torch.Tensor) -> torch.Tensor:
    """A copy of all values of a parameter. Collective if it is sharded."""
    if isinstance(param, bmt.DistributedParameter):
        return param.gather()
    return param.detach().clone()


def library() -> Any:
    """The package bitsandbytes, or ConfigError."""
    return package(
        "bitsandbytes",
        "a linear layer in 4 bits",
        ConfigError,
        instead="keep its weights in 16 bits",
    )


def frozen(values: torch.Tensor) -> torch.nn.Parameter:
    """A parameter that is not trained."""
    return torch.nn.Parameter(values, requires_grad=False)
