"""A decoder of given sizes, for a forecast without a model's own code."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import nn

from bmtrain.errors import ConfigurationError
from bmtrain.loss.linear_cross_entropy import FusedLinearCrossEntropy
from bmtrain.runtime.arguments import SIZE, check


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a decoder.

    Args:
        layers, hidden, heads, vocab: numbers of layers, features, attention heads, tokens known.
        ff: width of the feed-forward network; None for four times `hidden`, gated 8 / 3 times.
        kv_heads: heads of keys and values; None for `heads`.
        gated: whether the feed-forward network is gated and norms are RMSNorm without biases, as in
            LLaMA, in place of GELU and LayerNorm with biases, as in GPT-2.
        tied: whether the head has the weight of the embedding.

    Raises:
        ConfigurationError: for sizes that are not positive or do not divide each other.
    """

    layers: int
    hidden: int
    heads: int
    vocab: int
    ff: int | None = None
    kv_heads: int | None = None
    gated: bool = True
    tied: bool = False

    def __post_init__(self) -> None:
        names = ("layers", "hidden", "heads", "vocab", "ff", "kv_heads")
        given = {name: (vars(self)[name], SIZE) for name in names if vars(self)[name] is not None}
        check("plan", **given)
        if self.hidden % self.heads:
            raise ConfigurationError(
                f"plan: hidden is {self.hidden} and heads {self.heads}: expected heads that "
                "divide it."
            )
        if self.heads % self.num_kv_heads:
            raise ConfigurationError(
                f"plan: heads is {self.heads} and kv_heads {self.kv_heads}: expected kv_heads that "
                "divide heads."
            )

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.kv_heads or self.heads

    @property
    def width(self) -> int:
        """Of the feed-forward network: a gated one has three matrices, so two thirds as wide."""
        if self.ff is not None:
            return self.ff
        return -(-8 * self.hidden // 3 // 256) * 256 if self.gated else 4 * self.hidden

    def build(self, fused_head: bool) -> Decoder:
        """The model."""
        return Decoder(self, fused_head)


class Layer(nn.Module):
    """Attention and a feed-forward network behind norms: (batch, seq, hidden) to the same."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.head_size = sizes.hidden // sizes.heads
        few, bias = sizes.num_kv_heads * self.head_size, not sizes.gated
        self.attention_norm, self.ff_norm = _norm(sizes), _norm(sizes)
        self.query = nn.Linear(sizes.hidden, sizes.hidden, bias=bias)
        self.key = nn.Linear(sizes.hidden, few, bias=bias)
        self.value = nn.Linear(sizes.hidden, few, bias=bias)
        self.out = nn.Linear(sizes.hidden, sizes.hidden, bias=bias)
        self.gate = nn.Linear(sizes.hidden, sizes.width, bias=False) if sizes.gated else None
        self.up = nn.Linear(sizes.hidden, sizes.width, bias=bias)
        self.down = nn.Linear(sizes.width, sizes.hidden, bias=bias)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        normed = self.attention_norm(x)
        query, key, value = (
            layer(normed).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        if self.gate is not None:
            query, key = _turned(query, turns), _turned(key, turns)
        grouped = query.shape[1] != key.shape[1]
        mixed = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=grouped
        )
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        normed = self.ff_norm(x)
        if self.gate is not None:
            return x + self.down(F.silu(self.gate(normed)) * self.up(normed))
        return x + self.down(F.gelu(self.up(normed), approximate="tanh"))


class Decoder(nn.Module):
    """Token ids and targets, both (batch, seq), to the mean cross-entropy."""

    def __init__(self, sizes: Sizes, fused_head: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocab, sizes.hidden)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.norm = _norm(sizes)
        self.head = nn.Linear(sizes.hidden, sizes.vocab, bias=False)
        if sizes.tied:
            self.head.weight = self.embedding.weight
        self.fused = FusedLinearCrossEntropy() if fused_head else None
        self.half_head = sizes.hidden // sizes.heads // 2

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        turns = torch.zeros(2, ids.shape[1], self.half_head)
        for layer in self.layers:
            x = layer(x, turns)
        rows, flat = self.norm(x).flatten(0, 1), targets.flatten()
        if self.fused is not None:
            fused: torch.Tensor = self.fused(rows, self.head.weight, flat)
            return fused
        return F.cross_entropy(self.head(rows).float(), flat)


def _norm(sizes: Sizes) -> nn.Module:
    return nn.RMSNorm(sizes.hidden) if sizes.gated else nn.LayerNorm(sizes.hidden)


def _turned(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Rotary positions: cosines and sines (2, seq, half of a head)."""
    cos, sin = turns
    left, right = x.float().chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1).to(x.dtype)
