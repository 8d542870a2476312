"""The two-layer perceptron of a transformer block."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import bmtrain as bmt
from layers.linear import column_linear, row_linear


class Feedforward(bmt.DistributedModule):
    """GELU between two linear maps: (rows, ..., dim_model) -> (rows of all ranks, ..., dim_ff /
    ranks) -> (rows, ..., dim_model).

    Ranks are the tensor-parallel ones; rows are those of dim 0, of which each rank has its own.
    """

    def __init__(
        self, dim_model: int, dim_ff: int, bias: bool = True, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.w_in = column_linear(dim_model, dim_ff, bias=bias, dtype=dtype)
        self.w_out = row_linear(dim_ff, dim_model, bias=bias, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w_out(F.gelu(self.w_in(x), approximate="tanh"))
