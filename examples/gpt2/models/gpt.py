"""GPT-2: token and position embeddings, pre-norm transformer blocks, and a head tied to the token
embedding.

With tensor parallelism every rank passes its own sequences, and each split layer works on those of
all tensor-parallel ranks. With a pipeline, too: the list of layers joins the sequences of its
ranks, and gives each the hidden states of its own back.
"""

from __future__ import annotations

import torch

import bmtrain as bmt
from layers import Attention, Embedding, Feedforward, Layernorm


class TransformerBlock(bmt.DistributedModule):
    """One layer: x + attention(norm(x)), then x + feedforward(norm(x))."""

    def __init__(
        self,
        dim_model: int,
        dim_head: int,
        num_heads: int,
        dim_ff: int,
        bias: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.norm_attention = Layernorm(dim_model, bias=bias, dtype=dtype)
        self.attention = Attention(dim_model, dim_head, num_heads, bias=bias, dtype=dtype)
        self.norm_feedforward = Layernorm(dim_model, bias=bias, dtype=dtype)
        self.feedforward = Feedforward(dim_model, dim_ff, bias=bias, dtype=dtype)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Hidden states (batch, seq, dim_model) in and out; `mask` as in `Attention`."""
        x = x + self.attention(self.norm_attention(x), mask)
        return x + self.feedforward(self.norm_feedforward(x))


class GPT(bmt.DistributedModule):
    """The language model: token ids in, a score for every possible next token out.

    Args:
        num_layers, dim_model, dim_head, num_heads, dim_ff: the size of the network.
        vocab_size: number of tokens. It and num_heads and dim_ff are split over the tensor-parallel
            ranks.
        max_distance: longest sequence, in tokens.
        bias: whether linear maps and norms have one.
        dtype: of parameters and computation; None is torch's default.
        use_checkpoint: recompute each block in the backward pass in place of keeping its
            activations.
        zero_level: 2 keeps gathered parameters from forward to backward, 3 gathers them again.
    """

    def __init__(  # noqa: PLR0913 (the signature of the BMTrain example)
        self,
        num_layers: int,
        vocab_size: int,
        dim_model: int,
        dim_head: int,
        num_heads: int,
        dim_ff: int,
        max_distance: int,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        *,
        use_checkpoint: bool = True,
        zero_level: int = 3,
    ) -> None:
        super().__init__()
        self.max_distance = max_distance
        self.token_embedding = bmt.nn.VPEmbedding(vocab_size, dim_model, dtype=dtype, init_std=0.02)
        self.position_embedding = Embedding(max_distance, dim_model, dtype=dtype)
        kind = (
            bmt.PipelineTransformerBlockList
            if bmt.config["pipe_enabled"]
            else bmt.TransformerBlockList
        )
        self.layers = kind(
            bmt.Block(
                TransformerBlock(dim_model, dim_head, num_heads, dim_ff, bias=bias, dtype=dtype),
                use_checkpoint=use_checkpoint,
                zero_level=zero_level,
            )
            for _ in range(num_layers)
        )
        self.norm = Layernorm(dim_model, bias=bias, dtype=dtype)

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Score the next token at every position, for the sequences of all tensor-parallel ranks.

        Args:
            input_ids: token numbers, int64 (batch, seq).
            position_ids: place of each token in its sequence, int64 (batch, seq), below
                max_distance.
            mask: bool (batch, seq), False where a token is padding; None where nothing is.

        Returns:
            Logits (batch of all tensor-parallel ranks, seq, vocab_size / ranks), for
            FusedCrossEntropy(parallel=True).
        """
        x = self.token_embedding(input_ids) + self.position_embedding(position_ids)
        x = self.layers(x, attention_mask(mask))
        rows = self.token_embedding(self.norm(x).flatten(0, 1), projection=True)
        return rows.unflatten(0, (-1, x.shape[1]))


def attention_mask(mask: torch.Tensor | None) -> torch.Tensor | None:
    """From valid positions, bool (batch, seq), to which query sees which key, bool (batch, 1, seq,
    seq).

    None where plain causal attention is enough, since that has the fastest kernels.
    """
    if mask is None or bool(mask.all()):
        return None
    seq = mask.shape[1]
    itself = torch.eye(seq, dtype=torch.bool, device=mask.device)
    causal = torch.ones(seq, seq, dtype=torch.bool, device=mask.device).tril()
    # A padded query sees at least itself: a softmax over nothing would be NaN and spoil every
    # gradient.
    return (causal & (mask[:, None, None, :].bool() | itself)).contiguous()
