"""Rows looked up by number."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import bmtrain as bmt
from layers.linear import first_values


class Embedding(bmt.DistributedModule):
    """A table of `num_embeddings` rows of `dim` numbers."""

    def __init__(
        self,
        num_embeddings: int,
        dim: int,
        dtype: torch.dtype | None = None,
        init_std: float = 0.02,
    ) -> None:
        super().__init__()
        self.weight = bmt.DistributedParameter(
            torch.empty(num_embeddings, dim, dtype=dtype), init_method=first_values(init_std)
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Integer ids (...) -> rows (..., dim)."""
        return F.embedding(ids, self.weight)
