"""LayerNorm, and RMS norm as its form without bias."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import bmtrain as bmt
from bmtrain.kernels.norm import MOST_COLUMNS, norm
from model_center.config.rules import check_values
from model_center.kernels import is_fused
from model_center.layer.parameter import constant, parameter


def rms_layernorm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dim, the mean in fp32; as `hidden`.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019).
    """
    wide = hidden.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return scaled.to(hidden.dtype) * weight


class LayerNorm(bmt.DistributedModule):
    """Layer norm with a bias, RMS norm without: (..., dim_norm) to the same.

    Args:
        dim_norm: size of the last dimension.
        dtype: of the parameters.
        bias: layer norm with weight and bias, or RMS norm with a weight alone.
        eps: added to the variance or mean square.
        init_var: first value of the weight.

    Sources: Ba, Kiros and Hinton, "Layer Normalization" (2016); Zhang and Sennrich, "Root Mean
    Square Layer Normalization" (2019).
    """

    def __init__(
        self,
        dim_norm: int,
        dtype: torch.dtype = torch.half,
        bias: bool = True,
        eps: float = 1e-5,
        init_var: float = 1.0,
    ) -> None:
        super().__init__()
        check_values("LayerNorm", {"dim_norm": dim_norm, "eps": eps, "init_var": init_var})
        self.dim_norm, self.eps = dim_norm, eps
        self.weight = parameter((dim_norm,), dtype, constant(init_var))
        if bias:
            self.bias = parameter((dim_norm,), dtype, constant(0.0))
        else:
            self.register_parameter("bias", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension of `x`."""
        bias = self.bias
        if self.dim_norm <= MOST_COLUMNS and is_fused(x, self.weight, bias):
            return norm([x], self.weight, bias, self.eps, bias is not None)[0]
        if bias is None:
            return rms_layernorm(x, self.weight, self.eps)
        return F.layer_norm(x, (self.dim_norm,), self.weight, bias, self.eps)
