"""Heads of an encoder: the masked language model head, and the pooler.

ModelCenter has them in the file of each model, under that model's name.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

import bmtrain as bmt
from model_center.errors import InputError
from model_center.layer.embedding import Embedding
from model_center.layer.feedforward import activation
from model_center.layer.layernorm import LayerNorm
from model_center.layer.linear import Linear
from model_center.layer.parameter import constant, normal, parameter


class VocabularyScores(bmt.DistributedModule):
    """Scores of all tokens, `x W^T + b`: a matrix of its own or, tied, an embedding's.

    Args:
        dim_model, vocab_size: sizes of the last dimension before and after.
        dtype: of the parameters.
        init_mean, init_std: of the first weights; the bias starts at 0.
        tied: whether to have no matrix.
    """

    def __init__(
        self,
        dim_model: int,
        vocab_size: int,
        dtype: torch.dtype,
        init_mean: float,
        init_std: float,
        tied: bool,
    ) -> None:
        super().__init__()
        if tied:
            self.register_parameter("weight", None)
        else:
            self.weight = parameter((vocab_size, dim_model), dtype, normal(init_mean, init_std))
        self.bias = parameter((vocab_size,), dtype, constant(0.0))

    def forward(self, x: torch.Tensor, embedding: Embedding | None = None) -> torch.Tensor:
        """(..., dim_model) to (..., vocab_size), by the embedding if there is one.

        Raises:
            InputError: if there is no matrix.
        """
        if embedding is not None and embedding.length_scale:
            return embedding.projection(x) + self.bias
        weight = self.weight if embedding is None else embedding.weight
        if weight is None:
            raise InputError("a tied head got no embedding: it has no matrix of its own.")
        return F.linear(x, weight, self.bias)


class LanguageModelHead(torch.nn.Module):
    """`decoder(layer_norm(act(dense(x))))`.

    Args:
        dim_model, vocab_size: sizes.
        norm_eps: of the norm.
        dtype: of parameters and computation.
        activate_fn: as in `FeedForward`, not gated.
        init_mean: of the first scores' weights.
        init_std: of all first weights.
        tied: whether scores are those of an embedding only.
    """

    def __init__(
        self,
        dim_model: int,
        vocab_size: int,
        norm_eps: float,
        dtype: torch.dtype = torch.half,
        *,
        activate_fn: str = "gelu",
        init_mean: float = 0.0,
        init_std: float = 1,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.dense = Linear(dim_model, dim_model, dtype=dtype, init_std=init_std, bias=True)
        self.act = activation(activate_fn)
        self.layer_norm = LayerNorm(dim_model, dtype, eps=norm_eps)
        self.decoder = VocabularyScores(dim_model, vocab_size, dtype, init_mean, init_std, tied)

    def forward(
        self, hidden_states: torch.Tensor, input_embedding: Embedding | None = None
    ) -> torch.Tensor:
        """(batch, seq, dim_model) to (batch, seq, vocab_size), by the embedding if there is one."""
        return self.decoder(self.layer_norm(self.act(self.dense(hidden_states))), input_embedding)


class Pooler(torch.nn.Module):
    """`tanh(dense(first token))`: (batch, seq, dim_model) to (batch, dim_model).

    Args:
        dim_model: size.
        dtype: of parameters and computation.
        init_std: of the first weights.
    """

    def __init__(
        self, dim_model: int, dtype: torch.dtype = torch.half, *, init_std: float = 1
    ) -> None:
        super().__init__()
        self.dense = Linear(dim_model, dim_model, dtype=dtype, init_std=init_std, bias=True)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.dense(hidden_states[:, 0]))
