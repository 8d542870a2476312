"""Linear: an affine map with ModelCenter's length scaling."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

import bmtrain as bmt
from model_center.config.rules import check_values
from model_center.layer.parameter import constant, normal, parameter


class Linear(bmt.DistributedModule, torch.nn.Linear):
    """`y = x W^T + b`: (..., dim_in) to (..., dim_out).

    It is a torch.nn.Linear to tools that look for one, LoRA for example.

    Args:
        dim_in: size of the last dimension of the input.
        dim_out: size of the last dimension of the output.
        length_scale: divide the product by sqrt(dim_in); the bias is not scaled.
        length_scale_before: with `length_scale`, divide the input instead, which is safer in fp16.
        dtype: of the parameters and the computation.
        int8: accepted; it does nothing, as in ModelCenter.
        init_mean: mean of the first weights, drawn from a normal distribution.
        init_std: their standard deviation.
        bias: whether to add one; it starts at 0.
    """

    def __init__(  # noqa: PLR0913 (ModelCenter's signature)
        self,
        dim_in: int,
        dim_out: int,
        length_scale: bool = False,
        length_scale_before: bool = False,
        dtype: torch.dtype = torch.half,
        int8: bool = False,
        init_mean: float = 0.0,
        init_std: float = 1,
        bias: bool = False,
    ) -> None:
        # not that of nn.Linear, which would make parameters of its own
        torch.nn.Module.__init__(self)
        sizes = {"dim_in": dim_in, "dim_out": dim_out}
        check_values("Linear", {**sizes, "init_mean": init_mean, "init_std": init_std})
        self.dim_in = self.in_features = dim_in
        self.dim_out = self.out_features = dim_out
        self.length_scale, self.length_scale_before = length_scale, length_scale_before
        self.weight = parameter((dim_out, dim_in), dtype, normal(init_mean, init_std))
        if bias:
            self.bias = parameter((dim_out,), dtype, constant(0.0))
        else:
            self.register_parameter("bias", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` (..., dim_in) to (..., dim_out)."""
        if not self.length_scale:
            return self.product(x, self.bias)
        scale = math.sqrt(self.dim_in)
        if self.length_scale_before:
            return self.product(x / scale, self.bias)
        out = self.product(x) / scale
        bias = self.bias
        return out if bias is None else out + bias

    def product(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """`x W^T + bias`, not scaled."""
        return F.linear(x, self.weight, bias)
