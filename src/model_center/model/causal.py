"""CausalModel: decoder-only models, but for how tokens become hidden states."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

import bmtrain as bmt
from model_center.config.base import TransformerConfig
from model_center.errors import InputError
from model_center.layer.blocks import Mask, is_exchanged
from model_center.layer.cache import KeyValueCache
from model_center.layer.decode_row import fused_row_linear
from model_center.layer.dense_attention import PositionBias
from model_center.layer.embedding import Embedding
from model_center.layer.linear import Linear
from model_center.layer.mask import AttentionMask
from model_center.layer.transformer import Encoder, Past
from model_center.model.base import BaseModel
from model_center.model.decoding import (
    Decoding,
    FixedPrompts,
    FixedSteps,
    Work,
    cache_bytes,
    check_inputs,
    select_rows,
)
from model_center.model.inputs import Offset, attention_mask_of, embedded, past_position
from model_center.model.outputs import (
    BaseModelOutput,
    BaseModelOutputWithPooling,
    ModelOutput,
    PooledWhenRead,
    as_tuple,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForwardOptions:
    """Options of a forward pass: see the arguments of the models."""

    use_cache: bool = False
    past_key_values: Past = None
    output_logits: bool = True
    output_attentions: bool = False
    output_hidden_states: bool = False
    return_dict: bool = True

    def run(
        self,
        stack: Encoder,
        hidden: torch.Tensor,
        mask: Mask,
        position_bias: PositionBias | None,
        logits: Callable[[torch.Tensor], torch.Tensor],
        pooler: Callable[[torch.Tensor], torch.Tensor] | None = None,
        *,
        output_pooler_output: bool = False,
    ) -> Any:
        """Hidden states (batch, seq, dim_model) through all layers and heads: a BaseModelOutput, of
        a model that has a pooler a BaseModelOutputWithPooling, or its tuple.
        """
        out = stack(
            hidden,
            mask,
            position_bias,
            self.use_cache,
            self.past_key_values,
            self.output_attentions,
            self.output_hidden_states,
            return_dict=True,
        )
        last = out.last_hidden_state
        fields = {
            "last_hidden_state": last,
            "past_key_values": out.past_key_values if self.use_cache else None,
            "logits": logits(last) if self.output_logits else None,
            "hidden_states": out.hidden_states,
            "attentions": out.attentions,
        }
        output: ModelOutput = BaseModelOutput(**fields)
        if pooler is not None and output_pooler_output:
            output = BaseModelOutputWithPooling(**fields, pooler_output=pooler(last))
        elif pooler is not None:
            output = PooledWhenRead(pooler, **fields)
        return output if self.return_dict else as_tuple(output)


class CausalModel(BaseModel):
    """Layers over an embedding, and a head: tied to it, of its own, or for classes."""

    PADDING_SIDE = "left"  # new tokens follow the last ones
    # What `forward` takes for each token beside its id, and what generated tokens get: a number, or
    # None for the last one's.
    PER_TOKEN: ClassVar[Mapping[str, int | None]] = {}

    # Whether `forward` computes with what a fixed cache says of places, and with masks and
    # positions that are given to it: nothing else of it may differ from token to token.
    TELLS_PLACES: ClassVar[bool] = False

    ALWAYS_TIED: ClassVar[bool] = False  # whether the head is the embedding, whatever `tied` says

    encoder: Encoder
    input_embedding: Embedding

    def add_head(self, config: TransformerConfig) -> None:
        """Make the head that the configuration asks for; last, as ModelCenter orders parameters."""
        if config.cls_head:
            self.cls_projection = Linear(config.dim_model, config.cls_head, **config.head())
        elif not (config.tied or self.ALWAYS_TIED):
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
        asked: ForwardOptions,
    ) -> Any:
        """Hidden states through all layers and the head: a BaseModelOutput, or its tuple."""
        return asked.run(self.stack, hidden, mask, position_bias, self.logits)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """(batch, seq, dim_model) to scores (batch, seq, vocab_size), or (batch, seq, cls_head)."""
        if self.config.cls_head:
            return self.cls_projection(hidden)
        if self.config.tied or self.ALWAYS_TIED:
            return self.input_embedding.projection(hidden)
        row = fused_row_linear(hidden, [self.output_projection])
        return self.output_projection(hidden) if row is None else row

    def log_probs(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Log-probabilities (tokens,) of `targets` behind hidden states (tokens, dim_model).

        All scores are never in memory: see `bmtrain.loss.token_log_probs`.
        """
        if self.config.tied or self.ALWAYS_TIED:
            head: Any = self.input_embedding
            scale, bias = math.sqrt(head.dim_model) if head.length_scale else 1.0, None
        else:
            head = self.output_projection
            scale, bias = math.sqrt(head.dim_in) if head.length_scale else 1.0, head.bias
        hidden = hidden if scale == 1.0 else hidden / scale
        return bmt.loss.token_log_probs(hidden, head.weight, targets, bias)

    def position_ids_of(self, places: torch.Tensor) -> torch.Tensor:
        """`position_ids` for tokens at these places of their texts, counted from 0."""
        return places

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


class TokenModel(CausalModel):
    """A CausalModel that is called as GPT-2 is; a subclass says what positions do."""

    TELLS_PLACES = True

    def forward(  # noqa: PLR0913 (ModelCenter's signature)
        self,
        input_ids: torch.Tensor | None = None,
        length: torch.Tensor | None = None,
        attention_mask: torch.Tensor | AttentionMask | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
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

        Args:
            input_ids: (batch, seq), integers; or `inputs_embeds` (batch, seq, dim_model).
            length: (batch,), the number of valid tokens at the start of each row; an
                alternative to the mask.
            attention_mask: (batch, keys), nonzero where a token is valid, any dtype; keys are those
                of the cache and the new ones. A mask (batch, queries, keys) is used as it is, not
                causal. It counts if `length` is given too.
            token_type_ids: accepted and ignored, as in ModelCenter.
            position_ids: (batch, seq); counted from the cached tokens on if None.
            head_mask: accepted and ignored, as in ModelCenter.
            inputs_embeds: (batch, seq, dim_model), instead of `input_ids`.
            use_cache: whether to return the keys and values, for the next call.
            past_key_values: the keys and values of earlier tokens, as they were returned.
            output_logits: whether to return the scores.
            output_attentions: whether to return the attention probabilities.
            output_hidden_states: whether to return the inputs of all layers.
            return_dict: False for a tuple of all fields.

        Returns:
            A BaseModelOutput: `logits` (batch, seq, vocab_size), or (batch, seq, cls_head), in the
            configuration's dtype.

        Raises:
            InputError: for shapes that do not match, and on the CPU for ids out of range.
        """
        hidden = embedded(input_ids, inputs_embeds, self.input_embedding)
        start = past_position(past_key_values)
        mask = attention_mask_of(attention_mask, length, hidden, start, causal=True)
        hidden, bias = self.enter(hidden, mask, position_ids, start)
        asked = ForwardOptions(
            use_cache=use_cache,
            past_key_values=past_key_values,
            output_logits=output_logits,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=return_dict,
        )
        return self.run(hidden, mask, bias, asked)

    def enter(
        self,
        hidden: torch.Tensor,
        mask: AttentionMask,
        position_ids: torch.Tensor | None,
        start: Offset,
    ) -> tuple[torch.Tensor, PositionBias | None]:
        """What the first layer gets of the tokens' embeddings (batch, seq, dim_model), and the
        `position_bias` of all layers; the cache holds `start` tokens.
        """
        raise NotImplementedError


class CausalSteps(FixedSteps):
    """Decode steps of a model that is given position ids.

    Attributes:
        cache: keys and values; its memory stays where it is.
        begin: int64 (rows,), where the sequence of each row begins.
        tokens: int64 (rows, 1), the last one of each row.

    Args:
        model: the model.
        cache: with room for all tokens, and the first ones in it.
        begin: becomes the attribute.
    """

    def __init__(self, model: CausalModel, cache: KeyValueCache, begin: torch.Tensor) -> None:
        self._model, self.cache, self.begin = model, cache, begin
        self.num_rows, self.capacity = len(begin), cache.capacity
        self.tokens = begin.new_empty(self.num_rows, 1)
        self._place = begin.new_full((1,), cache.length)
        cache.fix(self._place)

    def work(self) -> torch.Tensor:
        """As in FixedSteps."""
        end = (self._place + 1).expand_as(self.begin)
        scores = scores_of(
            self._model,
            self.tokens,
            self.cache,
            attention_mask=AttentionMask(causal=True, reach=torch.stack([self.begin, end])),
            position_ids=self._model.position_ids_of(self._place - self.begin)[:, None],
        )
        self._place += 1
        return scores


class CausalPrompts(FixedPrompts):
    """The first pass of prompts without padding.

    Attributes:
        ids: int64 (rows, length), which are to be written.

    Args:
        model: the model.
        steps: get the keys and values.
        like: as the ids.
    """

    def __init__(self, model: CausalModel, steps: CausalSteps, like: torch.Tensor) -> None:
        self._model, self.steps, self.ids = model, steps, torch.empty_like(like)

    def work(self) -> torch.Tensor:
        """As in FixedPrompts."""
        cache = KeyValueCache(len(self.steps.cache), self.ids.shape[1])
        scores = scores_of(self._model, self.ids, cache)
        self.steps.cache.take(cache)
        self.steps.begin.zero_()
        return scores


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
        # how a step is done, once all are the same
        self._fixed: tuple[CausalSteps, Callable[[Work], torch.Tensor]] | None = None

    def fix(
        self, do: Callable[[Work], torch.Tensor], steps: FixedSteps | None = None
    ) -> FixedSteps | None:
        """As in Decoding: for models that are given position ids, and left padding."""
        if not self._model.TELLS_PLACES or self._inputs:
            return None
        if any(map(is_exchanged, self._model.modules())):  # it keeps tokens where it likes
            return None
        begin = self.prefix.new_zeros(self._num_rows)
        if self._mask is not None:
            begin = (~self._mask).sum(1)
            in_front = torch.arange(self._mask.shape[1], device=begin.device) >= begin[:, None]
            if not torch.equal(self._mask, in_front):
                return None
        if isinstance(steps, CausalSteps):
            steps.cache.take(self.cache)
            steps.begin.copy_(begin)
            self.cache = steps.cache
        else:
            steps = CausalSteps(self._model, self.cache, begin)
        self._fixed = steps, do
        return steps

    def prompts(self, steps: FixedSteps, known: FixedPrompts | None = None) -> FixedPrompts | None:
        """As in Decoding: for prompts without padding."""
        if self._mask is not None or self._inputs or not isinstance(steps, CausalSteps):
            return None
        prompts = known if isinstance(known, CausalPrompts) else None
        if prompts is None or prompts.steps is not steps or prompts.ids.shape != self.prefix.shape:
            prompts = CausalPrompts(self._model, steps, self.prefix)
        prompts.ids.copy_(self.prefix)
        return prompts

    def resume(self, do: Callable[[Work], torch.Tensor], steps: FixedSteps) -> None:
        """As in Decoding."""
        if isinstance(steps, CausalSteps):
            steps.cache.hold(self.prefix.shape[1])
            self.cache, self._fixed = steps.cache, (steps, do)

    def step(self, tokens: torch.Tensor, parents: torch.Tensor | None = None) -> torch.Tensor:
        """As in Decoding; the result is overwritten by the next step once steps are fixed."""
        if self._fixed is None:
            return super().step(tokens, parents)
        steps, do = self._fixed
        if parents is not None:
            self.cache.reorder(parents, self.prefix.shape[1])
        self.cache.advance()
        steps.tokens.copy_(tokens[:, None])
        return do(steps.work)

    def end(self) -> None:
        """As in Decoding."""
        super().end()
        self._fixed = None

    def num_bytes(self, num_new: int, copies: int) -> int:
        """As in Decoding."""
        config, tokens = self._model.config, self.prefix.shape[1] + num_new
        rows = copies * len(self.prefix)
        return cache_bytes(self._model, config, config.num_layers, rows * tokens)

    def _select_inputs(self, rows: torch.Tensor) -> None:
        self._mask = select_rows(self._mask, rows)
        self._inputs = {name: value.index_select(0, rows) for name, value in self._inputs.items()}

    def _forward(self, ids: torch.Tensor) -> torch.Tensor:
        length = self.cache.length + ids.shape[1]
        if self._mask is not None:
            self._mask = extended(self._mask, length, 1)
        self._inputs = {
            name: self._extended(name, value, length) for name, value in self._inputs.items()
        }
        masked = {} if self._mask is None else self._model.mask_arguments(self._mask)
        return scores_of(self._model, ids, self.cache, **masked, **self._inputs)

    def _extended(self, name: str, value: torch.Tensor, length: int) -> torch.Tensor:
        """An input beside tokens and cache, (rows, tokens), for `length` tokens."""
        return extended(value, length, self._model.PER_TOKEN[name])


def scores_of(
    model: CausalModel, ids: torch.Tensor, cache: KeyValueCache, **others: Any
) -> torch.Tensor:
    """Scores (rows, vocab) of what follows tokens (rows, new), which are added to the cache.

    Args:
        others: what else `forward` gets.
    """
    out = model(
        input_ids=ids,
        use_cache=True,
        past_key_values=cache,
        output_logits=False,
        return_dict=True,
        **others,
    )
    return model.logits(out.last_hidden_state[:, -1:])[:, 0]


def extended(values: torch.Tensor, length: int, fill: int | None) -> torch.Tensor:
    """(rows, tokens) cut or filled up to (rows, length), by a number, or None for the last one."""
    missing = length - values.shape[1]
    if missing <= 0:
        return values[:, :length]
    last = values[:, -1:].expand(-1, missing)
    return torch.cat([values, last if fill is None else torch.full_like(last, fill)], 1)
