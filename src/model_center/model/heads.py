"""What stands on top of an encoder: the head of masked language models, and the pooler."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import bmtrain as bmt
from model_center.config.base import TransformerConfig
from model_center.layer.embedding import Embedding
from model_center.layer.feedforward import activation
from model_center.layer.layernorm import LayerNorm
from model_center.layer.linear import Linear
from model_center.layer.parameter import constant, normal, parameter


class VocabularyScores(bmt.DistributedModule):
    """Scores of all tokens, `x W^T + b`: a matrix of its own or, tied, an embedding's."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        if config.tied:
            self.register_parameter("weight", None)
        else:
            init = normal(config.proj_init_mean, config.proj_init_std)
            self.weight = parameter((config.vocab_size, config.dim_model), config.dtype, init)
        self.bias = parameter((config.vocab_size,), config.dtype, constant(0.0))

    def forward(self, hidden: torch.Tensor, embedding: Embedding) -> torch.Tensor:
        """(..., dim_model) to (..., vocab_size)."""
        if self.weight is not None:
            return F.linear(hidden, self.weight, self.bias)
        if embedding.length_scale:
            return embedding.projection(hidden) + self.bias
        return F.linear(hidden, embedding.weight, self.bias)


class LanguageModelHead(torch.nn.Module):
    """`decoder(layer_norm(act(dense(x))))`: (batch, seq, dim_model) to (batch, seq, vocab_size)."""

    def __init__(self, config: TransformerConfig, activate_fn: str) -> None:
        super().__init__()
        self.dense = dense(config)
        self.act = activation(activate_fn)
        self.layer_norm = LayerNorm(config.dim_model, config.dtype, eps=config.norm_eps)
        self.decoder = VocabularyScores(config)

    def forward(self, hidden: torch.Tensor, embedding: Embedding) -> torch.Tensor:
        """`embedding` is what a tied head multiplies by."""
        return self.decoder(self.layer_norm(self.act(self.dense(hidden))), embedding)


class Pooler(torch.nn.Module):
    """`tanh(dense(first token))`: (batch, seq, dim_model) to (batch, dim_model)."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.dense = dense(config)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.dense(hidden[:, 0]))


def dense(config: TransformerConfig) -> Linear:
    """A map of hidden states to as many numbers."""
    width, std = config.dim_model, config.proj_init_std
    return Linear(width, width, dtype=config.dtype, init_std=std, bias=True)
