"""The affine map."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import bmtrain as bmt


class Linear(bmt.DistributedModule):
    """x @ weight.T + bias over the last dimension: (..., in_features) -> (..., out_features)."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, dtype: torch.dtype | None = None, init_std: float = 0.02
    ) -> None:
        super().__init__()
        self.weight = bmt.DistributedParameter(
            torch.empty(out_features, in_features, dtype=dtype),
            init_method=bmt.ParameterInitializer(torch.nn.init.normal_, mean=0.0, std=init_std),
        )
        if bias:
            self.bias = bmt.DistributedParameter(
                torch.empty(out_features, dtype=dtype), init_method=bmt.ParameterInitializer(torch.nn.init.zeros_)
            )
        else:
            self.register_parameter("bias", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)
