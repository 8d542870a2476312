"""CPM-1 (Zhang et al., "CPM: A Large-scale Generative Chinese Pre-trained Language Model",
2020).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from model_center.config.base import RelativeConfig
from model_center.errors import InputError
from model_center.layer.embedding import Embedding
from model_center.layer.mask import AttentionMask, causal_pairs, last_queries
from model_center.layer.position_embedding.relative import RelativePositionEmbedding
from model_center.layer.transformer import Encoder, Past
from model_center.model.base import policy_of
from model_center.model.causal import CausalModel, ForwardOptions
from model_center.model.inputs import attention_mask_of, embedded, past_length


@dataclasses.dataclass(kw_only=True)
class CPM1Config(RelativeConfig):
    """Configuration of CPM1; defaults are ModelCenter's.

    Attributes:
        num_layers: number of layers.
    """

    vocab_size: int = 30968
    dim_ff: int = 1920
    num_layers: int = 12
    ffn_activate_fn: str = "gated_gelu"
    tied: bool = False


class CPM1(CausalModel):
    """CPM-1: a causal stack with relative positions, which sees its context whole."""

    _CONFIG_TYPE = CPM1Config
    HAD_CONTEXT_THIRD = True
    PER_TOKEN: ClassVar[Mapping[str, int | None]] = {"context": 0, "span": None}

    def __init__(self, config: CPM1Config) -> None:
        super().__init__(config)
        self.add_embeddings(config)
        self.add_positions(config)
        self.embed_dropout = torch.nn.Dropout(config.dropout_p)
        self.encoder = Encoder(**config.stack(config.num_layers), sharding=policy_of(config))
        self.add_head(config)

    def add_embeddings(self, config: CPM1Config) -> None:
        """Make the embeddings of ids."""
        self.input_embedding = Embedding(config.vocab_size, config.dim_model, **config.embedding())

    def add_positions(self, config: CPM1Config) -> None:
        """Make `position_bias`."""
        self.position_bias: torch.nn.Module = RelativePositionEmbedding(
            **config.relative(bidirectional=True)
        )

    def forward(  # noqa: PLR0913 (ModelCenter's signature)
        self,
        input_ids: torch.Tensor | None = None,
        length: torch.Tensor | None = None,
        attention_mask: torch.Tensor | AttentionMask | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        context: torch.Tensor | None = None,
        span: torch.Tensor | None = None,
        head_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool = False,
        past_key_values: Past = None,
        output_logits: bool = True,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
        return_dict: bool = True,
    ) -> Any:
        """Score the next token at every position.

        `token_type_ids`, `position_ids`, `context` and `span` are (batch, tokens), those of a cache
        included; the other arguments are those of GPT2.

        Args:
            token_type_ids: what segment each token is in, for CPM-3; else not looked at.
            context: nonzero for tokens that all see, and that see each other but nothing else; all
                others see what is before them, too. None for no context.
            span: tokens see only those with their number: several texts in a row. None for one
                text.
        """
        start = past_length(past_key_values)
        hidden = self.embed(input_ids, inputs_embeds, start)
        end = start + hidden.shape[1]
        check_of_all(
            end,
            position_ids=position_ids,
            token_type_ids=token_type_ids if "token_type_ids" in self.PER_TOKEN else None,
            context=context,
            span=span,
        )
        if context is None and span is None:
            mask = attention_mask_of(attention_mask, length, hidden, start, causal=True)
        else:
            causal = causal_pairs(hidden.shape[1], end, hidden.device)
            mask = prefix_mask(
                attention_mask_of(attention_mask, length, hidden, start), context, span, causal
            )
        positions = (
            torch.arange(end, device=hidden.device) if position_ids is None else position_ids
        )
        asked = ForwardOptions(
            use_cache=use_cache,
            past_key_values=past_key_values,
            output_logits=output_logits,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=return_dict,
        )
        return self.run(
            self.embed_dropout(hidden), mask, self.bias(positions, token_type_ids, start), asked
        )

    def embed(
        self, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None, start: int
    ) -> torch.Tensor:
        """Hidden states (batch, seq, dim_model) of new tokens, which follow `start` others."""
        return embedded(input_ids, inputs_embeds, self.input_embedding)

    def mask_arguments(self, mask: torch.Tensor) -> dict[str, Any]:
        """As in CausalModel: only distances count, which padding in front does not change."""
        return {"attention_mask": mask}

    def bias(
        self, positions: torch.Tensor, segments: torch.Tensor | None, start: int
    ) -> torch.Tensor:
        """Scores' bias ([batch,] heads, queries, keys), positions ([batch,] keys) from `start`."""
        out: torch.Tensor = self.position_bias(positions[..., start:], positions)
        return out


def check_of_all(num_tokens: int, **arguments: torch.Tensor | None) -> None:
    """Demand a number for each token, those of the cache included.

    Raises:
        InputError: naming the argument with other shapes.
    """
    for name, value in arguments.items():
        if value is not None and (value.dim() != 2 or value.shape[1] != num_tokens):
            shape = tuple(value.shape)
            raise InputError(
                f"{name} has shape {shape}: expected (batch, {num_tokens}), all tokens, "
                "those of the cache too."
            )


def prefix_mask(
    mask: AttentionMask,
    context: torch.Tensor | None,
    span: torch.Tensor | None,
    causal: torch.Tensor,
) -> AttentionMask:
    """The mask of `CPM1.forward`.

    Args:
        mask: which keys are valid.
        context, span: (batch, keys), at least one of them.
        causal: bool (queries, keys), which keys are none after the query; the queries are the last
            keys.

    A mask of pairs says all of that, but for `span`, which it is taken together with.
    """
    num_queries = len(causal)
    mask = last_queries(mask, num_queries)
    if mask.pairs is None and not mask.causal:
        pairs = causal[None]
        if context is not None:
            seen_by_all = context.bool()
            pairs = seen_by_all[:, None, :] | (~seen_by_all[:, -num_queries:, None] & pairs)
        mask = mask._replace(pairs=pairs[:, None])
    if span is None:
        return mask
    same = (span[:, -num_queries:, None] == span[:, None, :])[:, None]
    return mask._replace(pairs=same if mask.pairs is None else mask.pairs & same)
