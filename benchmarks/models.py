"""The plain PyTorch models that every backend trains: GPT-2 and LLaMA 3 shapes, nothing of this
library in them.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

# Of hidden states (rows, dim), the projection to logits (rows, vocab) and targets (rows,): the mean
# cross-entropy.
HeadLoss = Callable[[torch.Tensor, nn.Linear, torch.Tensor], torch.Tensor]


def projected_cross_entropy(
    hidden: torch.Tensor, project: nn.Linear, targets: torch.Tensor
) -> torch.Tensor:
    """Mean cross-entropy of the logits, in fp32."""
    return F.cross_entropy(project(hidden).float(), targets)


class Geometry(ABC):
    """What a measurement must know of a model, and how to build it."""

    seq: int
    vocab: int

    @property
    @abstractmethod
    def num_parameters(self) -> int: ...

    @property
    @abstractmethod
    def flops_per_token(self) -> float:
        """Forward and backward without recomputation: 6 per matrix element, and causal attention at
        half of the full square.
        """

    @abstractmethod
    def model(self, loss: HeadLoss = projected_cross_entropy) -> nn.Module:
        """A module of token ids and targets, both (batch, seq), to the loss; `.blocks` are its
        layers, `.head` its end.
        """


@dataclasses.dataclass(frozen=True)
class Shape(Geometry):
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
        matrices = self.layers * 12 * self.dim**2 + self.vocab * self.dim
        return 6.0 * matrices + 6.0 * self.layers * self.seq * self.dim

    def model(self, loss: HeadLoss = projected_cross_entropy) -> GPT:
        return GPT(self, loss)


@dataclasses.dataclass(frozen=True)
class LlamaShape(Geometry):
    """Geometry of a LLaMA; the default is that of LLaMA 3 8B."""

    layers: int = 32
    dim: int = 4096
    heads: int = 32
    key_heads: int = 8
    ff: int = 14336
    vocab: int = 128256
    base: float = 500000.0
    seq: int = 8192

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def _matrices_of_a_layer(self) -> int:
        return 2 * self.dim * (self.dim + self.key_heads * self.head_dim) + 3 * self.dim * self.ff

    @property
    def num_parameters(self) -> int:
        return (
            self.layers * (self._matrices_of_a_layer + 2 * self.dim)
            + (2 * self.vocab + 1) * self.dim
        )

    @property
    def flops_per_token(self) -> float:
        matrices = self.layers * self._matrices_of_a_layer + self.vocab * self.dim
        return 6.0 * matrices + 6.0 * self.layers * self.seq * self.dim

    def model(self, loss: HeadLoss = projected_cross_entropy) -> Llama:
        return Llama(self, loss)


SHAPES: dict[str, Geometry] = {
    "tiny": Shape(4, 128, 4, 64, vocab=512),
    "gpt2": Shape(12, 768, 12, 1024),
    "2.7b": Shape(32, 2560, 32, 1024),
    "13b": Shape(40, 5120, 128, 512),
    "13b-16-layers": Shape(16, 5120, 128, 512),  # for two GPUs
    "llama-tiny": LlamaShape(2, 128, 4, 2, 384, vocab=512, seq=64),
    "llama-8b": LlamaShape(),
    "llama-14b": LlamaShape(48, 5120, 40, 8, 14336, vocab=32000, seq=4096),
    "llama-30b": LlamaShape(56, 6656, 52, 52, 17920, vocab=32000, seq=4096),
    "llama-8b-4096": LlamaShape(seq=4096),
    "llama-8b-16-layers": LlamaShape(16),
}


class FeedForward(nn.Module):
    """The feed-forward half of a transformer's layer: (rows, width) to the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.narrow(F.gelu(self.wide(self.norm(x))))
        return out


class Layer(nn.Module):
    """Pre-norm attention and a four times wider feed-forward: (batch, seq, dim) to the same."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(shape.dim), nn.LayerNorm(shape.dim)
        self.query, self.key, self.value, self.out = (
            nn.Linear(shape.dim, shape.dim) for _ in range(4)
        )
        self.up, self.down = (
            nn.Linear(shape.dim, 4 * shape.dim),
            nn.Linear(4 * shape.dim, shape.dim),
        )

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm_attention(x)
        q, k, v = self._split(self.query(h)), self._split(self.key(h)), self._split(self.value(h))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x)), approximate="tanh"))


class LlamaLayer(nn.Module):
    """Pre-norm attention with grouped queries and a gated feed-forward network: (batch, seq, dim)
    to the same.
    """

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.norm_attention, self.norm_mlp = (
            nn.RMSNorm(shape.dim, 1e-5),
            nn.RMSNorm(shape.dim, 1e-5),
        )
        few = shape.key_heads * shape.head_dim
        self.query, self.out = (nn.Linear(shape.dim, shape.dim, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(shape.dim, few, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(shape.dim, shape.ff, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.ff, shape.dim, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        h = self.norm_attention(x)
        q, k, v = (
            part(h).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        h = self.norm_mlp(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Head(nn.Module):
    """Final norm, vocabulary projection and loss: (batch, seq, dim) and targets (batch, seq) to
    what `loss` makes of them.
    """

    def __init__(self, norm: nn.Module, dim: int, vocab: int, loss: HeadLoss) -> None:
        super().__init__()
        self.norm, self.project, self.loss = norm, nn.Linear(dim, vocab, bias=False), loss

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.loss(self.norm(x).flatten(0, 1), self.project, targets.flatten())


class GPT(nn.Module):
    """Token ids and targets, both (batch, seq), to the mean loss."""

    def __init__(self, shape: Shape, loss: HeadLoss = projected_cross_entropy) -> None:
        super().__init__()
        self.token, self.position = (
            nn.Embedding(shape.vocab, shape.dim),
            nn.Embedding(shape.seq, shape.dim),
        )
        self.blocks = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.head = Head(nn.LayerNorm(shape.dim), shape.dim, shape.vocab, loss)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        loss: torch.Tensor = self.head(x, targets)
        return loss


class Llama(nn.Module):
    """Token ids and targets, both (batch, seq), to the mean loss."""

    def __init__(self, shape: LlamaShape, loss: HeadLoss = projected_cross_entropy) -> None:
        super().__init__()
        self.shape = shape
        self.token = nn.Embedding(shape.vocab, shape.dim)
        self.blocks = nn.ModuleList(LlamaLayer(shape) for _ in range(shape.layers))
        self.head = Head(nn.RMSNorm(shape.dim, 1e-5), shape.dim, shape.vocab, loss)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.token(ids)
        cos, sin = angles(self.shape, ids.shape[1], ids.device)
        for block in self.blocks:
            x = block(x, cos, sin)
        loss: torch.Tensor = self.head(x, targets)
        return loss


def angles(shape: LlamaShape, seq: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines, each (seq, head_dim / 2) in fp32."""
    rates = shape.base ** (-torch.arange(0, shape.head_dim, 2, device=device) / shape.head_dim)
    turned = torch.arange(seq, device=device)[:, None] * rates
    return turned.cos(), turned.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions, LLaMA's layout."""
    one, other = x.float().chunk(2, -1)
    return torch.cat([one * cos - other * sin, other * cos + one * sin], -1).to(x.dtype)


def initialise_own(module: nn.Module) -> None:
    """Values of the module's own parameters, not its children's: norms 1, biases 0, all others
    normal with deviation 0.02.

    Told by module and name, not by shape: a sharded parameter is a flat slice. What the numbers are
    matters to speed too: the power that a GPU draws, and with it its clock, depends on them.
    """
    with torch.no_grad():
        for name, param in module.named_parameters(recurse=False):
            if name == "bias":
                param.fill_(0.0)
            elif isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
                param.fill_(1.0)
            else:
                param.normal_(0.0, 0.02)


def initialise(model: nn.Module) -> None:
    """The same simple values for every backend."""
    for module in model.modules():
        initialise_own(module)
