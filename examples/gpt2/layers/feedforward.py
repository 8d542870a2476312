"""The two-layer perceptron of a transformer block."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import bmtrain as bmt
from layers.linear import Linear


class Feedforward(bmt.DistributedModule):
    """GELU between two linear maps: (..., dim_model) -> (..., dim_ff) -> (..., dim_model)."""

    def __init__(self, dim_model: int, dim_ff: int, bias: bool = True, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.w_in = Linear(dim_model, dim_ff, bias=bias, dtype=dtype)
        self.w_out = Linear(dim_ff, dim_model, bias=bias, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w_out(F.gelu(self.w_in(x), approximate="tanh"))
