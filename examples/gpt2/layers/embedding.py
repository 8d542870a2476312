"""Rows looked up by number, and the same table used the other way round as the output head."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import bmtrain as bmt


class Embedding(bmt.DistributedModule):
    """A table of `num_embeddings` rows of `dim` numbers."""

    def __init__(self, num_embeddings: int, dim: int, dtype: torch.dtype | None = None, init_std: float = 0.02) -> None:
        super().__init__()
        self.weight = bmt.DistributedParameter(
            torch.empty(num_embeddings, dim, dtype=dtype),
            init_method=bmt.ParameterInitializer(torch.nn.init.normal_, mean=0.0, std=init_std),
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Integer ids (...) -> rows (..., dim)."""
        return F.embedding(ids, self.weight)

    def projection(self, x: torch.Tensor) -> torch.Tensor:
        """Hidden states (..., dim) -> one score per row of the table (..., num_embeddings)."""
        return F.linear(x, self.weight)
