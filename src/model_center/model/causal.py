"""CausalModel: what decoder-only models share, which is everything but how tokens become hidden
states.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from model_center.config.base import TransformerConfig
from model_center.errors import InputError
from model_center.layer.dense_attention import PositionBias
from model_center.layer.embedding import Embedding
from model_center.layer.linear import Linear
from model_center.layer.mask import AttentionMask
from model_center.layer.transformer import Encoder, Past
from model_center.model.base import BaseModel
from model_center.model.decoding import Decoding, check_inputs, select_rows
from model_center.model.outputs import BaseModelOutput, as_tuple


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """What a caller asked of a forward pass: see the arguments of the models."""

    use_cache: bool = False
    past_key_values: Past = None
    output_logits: bool = True
    output_attentions: bool = False
    output_hidden_states: bool = False
    return_dict: bool = True


class CausalModel(BaseModel):
    """A stack of layers over an embedding, and a head: tied to the embedding, of its own, or for
    classes.
    """

    PADDING_SIDE = "left"  # new tokens follow the last ones
    # What `forward` takes for each token beside its id, and what generated tokens get: a number, or
    # None for the last one's.
    PER_TOKEN: ClassVar[Mapping[str, int | None]] = {}

    encoder: Encoder
    input_embedding: Embedding

    def add_head(self, config: TransformerConfig) -> None:
        """Make the head that the configuration asks for; last, as ModelCenter orders parameters."""
        if config.cls_head:
            self.cls_projection = Linear(config.dim_model, config.cls_head, **config.head())
        elif not config.tied:
            self.output_projection = Linear(config.dim_model, config.vocab_size, **config.head())

    @property
    def stack(self) -> Encoder:
        """The layers."""
        return self.encoder

    def run(
        self,
        hidden: torch.Tensor,
        mask: AttentionMask,
        position_bias: PositionBias | None,
        asked: Asked,
    ) -> Any:
        """Hidden states (batch, seq, dim_model) through all layers and the head; a BaseModelOutput,
        or its tuple.
        """
        out = self.stack(
            hidden,
            mask,
            position_bias,
            asked.use_cache,
            asked.past_key_values,
            asked.output_attentions,
            asked.output_hidden_states,
            return_dict=True,
        )
        output = BaseModelOutput(
            last_hidden_state=out.last_hidden_state,
            past_key_values=out.past_key_values if asked.use_cache else None,
            logits=self.logits(out.last_hidden_state) if asked.output_logits else None,
            hidden_states=out.hidden_states,
            attentions=out.attentions,
        )
        return output if asked.return_dict else as_tuple(output)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """(batch, seq, dim_model) to scores (batch, seq, vocab_size), or (batch, seq, cls_head)."""
        if self.config.cls_head:
            return self.cls_projection(hidden)
        return (
            self.input_embedding.projection(hidden)
            if self.config.tied
            else self.output_projection(hidden)
        )

    def mask_arguments(self, mask: torch.Tensor) -> dict[str, Any]:
        """Arguments of `forward` for tokens some of which are padding.

        Args:
            mask: bool (batch, tokens so far), False for padding.
        """
        return {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}

    def check_generates(self) -> None:
        """Refuse to generate with another head than that of a language model.

        Raises:
            InputError: naming the head.
        """
        if self.config.cls_head:
            raise InputError(
                f"{type(self).__name__} has a head for {self.config.cls_head} classes: it "
                "does not generate text."
            )

    def decoding(
        self, input_ids: torch.Tensor, mask: torch.Tensor | None, inputs: Mapping[str, torch.Tensor]
    ) -> Decoding:
        """As in BaseModel; `inputs` are those of `PER_TOKEN`, (rows, length)."""
        self.check_generates()
        if input_ids.shape[1] < self.shortest_prompt:
            raise InputError(
                f"the prompt has {input_ids.shape[1]} tokens: expected at least "
                f"{self.shortest_prompt}."
            )
        check_inputs(inputs, self.PER_TOKEN, input_ids, type(self).__name__)
        return CausalDecoding(self, input_ids, mask, inputs)


class CausalDecoding(Decoding):
    """Sequences that a decoder-only model continues."""

    def __init__(
        self,
        model: CausalModel,
        input_ids: torch.Tensor,
        mask: torch.Tensor | None,
        inputs: Mapping[str, torch.Tensor],
    ) -> None:
        super().__init__(input_ids, mask, model.config.num_layers)
        self._model, self._mask, self._inputs = model, mask, dict(inputs)

    def _select_inputs(self, rows: torch.Tensor) -> None:
        self._mask = select_rows(self._mask, rows)
        self._inputs = {name: value.index_select(0, rows) for name, value in self._inputs.items()}

    def _forward(self, ids: torch.Tensor) -> torch.Tensor:
        length = self.cache.length + ids.shape[1]
        if self._mask is not None:
            self._mask = lengthened(self._mask, length, 1)
        self._inputs = {
            name: self._extended(name, value, length) for name, value in self._inputs.items()
        }
        masked = {} if self._mask is None else self._model.mask_arguments(self._mask)
        out = self._model(
            input_ids=ids,
            use_cache=True,
            past_key_values=self.cache,
            output_logits=False,
            **masked,
            **self._inputs,
        )
        return self._model.logits(out.last_hidden_state[:, -1:])[:, 0]

    def _extended(self, name: str, value: torch.Tensor, length: int) -> torch.Tensor:
        """An input beside tokens and cache, (rows, tokens), for `length` tokens."""
        return lengthened(value, length, self._model.PER_TOKEN[name])


def lengthened(values: torch.Tensor, length: int, fill: int | None) -> torch.Tensor:
    """(rows, tokens) cut or continued to (rows, length), by a number or, for None, the last one of
    each row.
    """
    missing = length - values.shape[1]
    if missing <= 0:
        return values[:, :length]
    new = (
        values[:, -1:].expand(-1, missing)
        if fill is None
        else values.new_full((len(values), missing), fill)
    )
    return torch.cat([values, new], 1)
