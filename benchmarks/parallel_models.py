"""The same GPT with its layers split over tensor-parallel ranks or pipeline stages, which only this
library trains; equal in size and arithmetic.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import bmtrain as bmt
from models import Shape


class ParallelLayer(nn.Module):
    """As `models.Layer`, with one matrix for queries, keys and values, head by head: (batch, seq,
    dim) to the same.
    """

    def __init__(self, shape: Shape, dtype: torch.dtype) -> None:
        super().__init__()
        dim = shape.dim
        self.dim_head = dim // shape.heads
        self.norm_attention, self.norm_mlp = (
            nn.LayerNorm(dim, dtype=dtype),
            nn.LayerNorm(dim, dtype=dtype),
        )
        self.project = bmt.nn.ColumnParallelLinear(dim, 3 * dim, dtype=dtype)
        self.out = bmt.nn.RowParallelLinear(dim, dim, dtype=dtype)
        self.up = bmt.nn.ColumnParallelLinear(dim, 4 * dim, dtype=dtype)
        self.down = bmt.nn.RowParallelLinear(4 * dim, dim, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.project(self.norm_attention(x)).unflatten(-1, (-1, 3, self.dim_head))
        q, k, v = heads.permute(3, 0, 2, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x)), approximate="tanh"))


class ParallelHead(nn.Module):
    """Final norm, projection on a part of the vocabulary and the loss, over the rows of all
    tensor-parallel ranks.
    """

    def __init__(self, shape: Shape, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(shape.dim, dtype=dtype)
        self.project = bmt.nn.ColumnParallelLinear(shape.dim, shape.vocab, bias=False, dtype=dtype)
        self.loss = bmt.loss.FusedCrossEntropy(parallel=True)

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.loss(self.project(self.norm(x)).flatten(0, 1), targets.flatten())
        return loss


class ParallelGPT(nn.Module):
    """This rank's token ids and targets, both (batch, seq), to the mean loss of all tensor-parallel
    ranks' rows.
    """

    def __init__(self, shape: Shape, dtype: torch.dtype) -> None:
        super().__init__()
        self.token = bmt.nn.VPEmbedding(shape.vocab, shape.dim, dtype=dtype)
        self.position = nn.Embedding(shape.seq, shape.dim, dtype=dtype)
        self.blocks = nn.ModuleList(ParallelLayer(shape, dtype) for _ in range(shape.layers))
        self.head = ParallelHead(shape, dtype)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        x = self.blocks(x)  # a TransformerBlockList, or a pipeline of stages
        loss: torch.Tensor = self.head(
            x, bmt.distributed.all_gather(targets, bmt.config["tp_comm"]).flatten(0, 1)
        )
        return loss
