"""The plain PyTorch models that every backend trains: GPT-2 shapes, nothing of this library in them."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import nn


@dataclasses.dataclass(frozen=True)
class Shape:
    """Geometry of a GPT."""

    layers: int
    dim: int
    heads: int
    seq: int
    vocab: int = 50304

    @property
    def num_parameters(self) -> int:
        per_layer = 12 * self.dim**2 + 13 * self.dim
        return self.layers * per_layer + (2 * self.vocab + self.seq) * self.dim + 2 * self.dim

    @property
    def flops_per_token(self) -> float:
        """Forward and backward without recomputation: 6 per matrix element, and causal attention at half of the full square."""
        matrices = self.layers * 12 * self.dim**2 + self.vocab * self.dim
        return 6.0 * matrices + 6.0 * self.layers * self.seq * self.dim


SHAPES = {
    "tiny": Shape(4, 128, 4, 64, vocab=512),
    "gpt2": Shape(12, 768, 12, 1024),
    "2.7b": Shape(32, 2560, 32, 1024),
    "13b": Shape(40, 5120, 128, 512),
}


class Layer(nn.Module):
    """Pre-norm attention and a four times wider feed-forward: (batch, seq, dim) to the same."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(shape.dim), nn.LayerNorm(shape.dim)
        self.query, self.key, self.value, self.out = (nn.Linear(shape.dim, shape.dim) for _ in range(4))
        self.up, self.down = nn.Linear(shape.dim, 4 * shape.dim), nn.Linear(4 * shape.dim, shape.dim)

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm_attention(x)
        q, k, v = self._split(self.query(h)), self._split(self.key(h)), self._split(self.value(h))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x)), approximate="tanh"))


class Head(nn.Module):
    """Final norm and vocabulary projection with the loss: (batch, seq, dim) and targets (batch, seq) to the mean loss."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm, self.project = nn.LayerNorm(shape.dim), nn.Linear(shape.dim, shape.vocab, bias=False)

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = self.project(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


class GPT(nn.Module):
    """Token ids and targets, both (batch, seq), to the mean loss."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(shape.vocab, shape.dim), nn.Embedding(shape.seq, shape.dim)
        self.blocks = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.head = Head(shape)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        loss: torch.Tensor = self.head(x, targets)
        return loss


def initialise(model: nn.Module) -> None:
    """The same simple values for every backend."""
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() > 1:
                param.normal_(0.0, 0.02)
            else:
                param.fill_(0.1)
