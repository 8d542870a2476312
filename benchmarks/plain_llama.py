"""A plain PyTorch LLaMA, nothing of this library in it: the yardstick for model_center's."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import nn


@dataclasses.dataclass(frozen=True)
class LlamaShape:
    """Geometry of a LLaMA; the default is that of LLaMA 3 8B with 8 of its 32 layers."""

    layers: int = 8
    dim: int = 4096
    heads: int = 32
    key_heads: int = 8
    ff: int = 14336
    vocab: int = 128256
    base: float = 500000.0

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads


class Layer(nn.Module):
    """Pre-norm attention with grouped queries and a gated feed-forward network: (batch, seq, dim) to the same."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        self.norm_attention, self.norm_mlp = nn.RMSNorm(shape.dim, 1e-5), nn.RMSNorm(shape.dim, 1e-5)
        few = shape.key_heads * shape.head_dim
        self.query, self.out = (nn.Linear(shape.dim, shape.dim, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(shape.dim, few, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(shape.dim, shape.ff, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.ff, shape.dim, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        h = self.norm_attention(x)
        q, k, v = (part(h).unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2) for part in (self.query, self.key, self.value))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        h = self.norm_mlp(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Head(nn.Module):
    """Final norm and vocabulary projection: (batch, seq, dim) to (batch, seq, vocab)."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.norm, self.project = nn.RMSNorm(shape.dim, 1e-5), nn.Linear(shape.dim, shape.vocab, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.project(self.norm(x))
        return logits


class PlainLlama(nn.Module):
    """Token ids (batch, seq) to logits (batch, seq, vocab)."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        self.token = nn.Embedding(shape.vocab, shape.dim)
        self.blocks = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.head = Head(shape)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.token(ids)
        cos, sin = angles(self.shape, ids.shape[1], ids.device)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits: torch.Tensor = self.head(x)
        return logits


def angles(shape: LlamaShape, seq: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines, each (seq, head_dim / 2) in fp32."""
    rates = shape.base ** (-torch.arange(0, shape.head_dim, 2, device=device) / shape.head_dim)
    turned = torch.arange(seq, device=device)[:, None] * rates
    return turned.cos(), turned.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions, LLaMA's layout."""
    one, other = x.float().chunk(2, -1)
    return torch.cat([one * cos - other * sin, other * cos + one * sin], -1).to(x.dtype)
