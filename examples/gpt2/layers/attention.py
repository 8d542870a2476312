"""Causal self-attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import bmtrain as bmt
from layers.linear import column_linear, row_linear, rows_of_all


class Attention(bmt.DistributedModule):
    """Every position attends to itself and to those before it: (batch, seq, dim_model) in and out.

    Each tensor-parallel rank works on its part of the heads, for the sequences of all those ranks.
    """

    def __init__(
        self,
        dim_model: int,
        dim_head: int,
        num_heads: int,
        bias: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.dim_head = dim_head
        # One matrix for queries, keys and values: one large product is faster than three small
        # ones. Its outputs lie head by head, so that a part of them is a number of whole heads.
        self.project_qkv = column_linear(
            dim_model, num_heads * 3 * dim_head, bias=bias, dtype=dtype
        )
        self.project_out = row_linear(num_heads * dim_head, dim_model, bias=bias, dtype=dtype)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Attend.

        Args:
            x: hidden states (batch, seq, dim_model).
            mask: None for plain causal attention, else bool (batch, 1, seq, seq), True where a
                query (dim 2) may see a key (dim 3).
        """
        # (batch of all ranks, seq, heads / ranks, 3, dim_head)
        qkv = self.project_qkv(x).unflatten(-1, (-1, 3, self.dim_head))
        # each (batch of all ranks, heads / ranks, seq, dim_head)
        query, key, value = qkv.permute(3, 0, 2, 1, 4).unbind(0)
        mask = None if mask is None else rows_of_all(mask)
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None
        )
        return self.project_out(out.transpose(1, 2).flatten(2))
