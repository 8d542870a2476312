"""Causal self-attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import bmtrain as bmt
from layers.linear import Linear


class Attention(bmt.DistributedModule):
    """Every position attends to itself and to those before it: (batch, seq, dim_model) in and out."""

    def __init__(self, dim_model: int, dim_head: int, num_heads: int, bias: bool = True, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.dim_head = dim_head
        self.num_heads = num_heads
        # One matrix for queries, keys and values: one large product is faster than three small ones.
        self.project_qkv = Linear(dim_model, 3 * num_heads * dim_head, bias=bias, dtype=dtype)
        self.project_out = Linear(num_heads * dim_head, dim_model, bias=bias, dtype=dtype)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Attend.

        Args:
            x: hidden states (batch, seq, dim_model).
            mask: None for plain causal attention, else bool (batch, 1, seq, seq), True where a query (dim 2) may see
                a key (dim 3).
        """
        batch, seq, _ = x.shape
        qkv = self.project_qkv(x).view(batch, seq, 3, self.num_heads, self.dim_head)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each (batch, heads, seq, dim_head)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None)
        return self.project_out(out.transpose(1, 2).reshape(batch, seq, self.num_heads * self.dim_head))
