"""Layer normalisation."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import bmtrain as bmt


class Layernorm(bmt.DistributedModule):
    """Bring the last dimension to mean 0 and variance 1, then scale and shift it: (..., dim) ->
    (..., dim).
    """

    def __init__(
        self, dim: int, bias: bool = True, dtype: torch.dtype | None = None, eps: float = 1e-5
    ) -> None:
        super().__init__()
        self.dim = dim
        self.eps = eps
        self.weight = bmt.DistributedParameter(
            torch.empty(dim, dtype=dtype), init_method=bmt.ParameterInitializer(torch.nn.init.ones_)
        )
        if bias:
            self.bias = bmt.DistributedParameter(
                torch.empty(dim, dtype=dtype),
                init_method=bmt.ParameterInitializer(torch.nn.init.zeros_),
            )
        else:
            self.register_parameter("bias", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (self.dim,), self.weight, self.bias, self.eps)
