"""What models return: fields by name, by position or by unpacking, those that are None left out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from model_center.layer.stack import Pasts

Tensors = tuple[torch.Tensor, ...]


@dataclasses.dataclass
class ModelOutput:
    """Fields of an output: `output.name` or `output["name"]`; positions and slices skip None."""

    def __getattr__(self, name: str) -> Any:
        """What is asked of an output as if it were the logits, as before ModelCenter 1.0.

        Raises:
            AttributeError: always.
        """
        cure = ": the logits are `output.logits`" if name in dir(torch.Tensor) else ""
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}{cure}")

    def to_tuple(self) -> tuple[Any, ...]:
        """The fields that are not None, in order."""
        return tuple(value for _, value in self.items())

    def keys(self) -> list[str]:
        """Names of the fields that are not None."""
        return [name for name, _ in self.items()]

    def values(self) -> list[Any]:
        """Values of the fields that are not None."""
        return [value for _, value in self.items()]

    def items(self) -> list[tuple[str, Any]]:
        """(name, value) of the fields that are not None, in order."""
        fields = ((field.name, vars(self).get(field.name)) for field in dataclasses.fields(self))
        return [(name, value) for name, value in fields if value is not None]

    def __getitem__(self, key: str | int | slice) -> Any:
        if isinstance(key, str):
            return dict(self.items())[key]
        return self.to_tuple()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self.items())

    def __contains__(self, name: object) -> bool:
        return name in self.keys()


@dataclasses.dataclass
class BaseModelOutput(ModelOutput):
    """Output of a decoder-only model.

    Attributes:
        last_hidden_state: (batch, seq, dim_model), after the last norm.
        past_key_values: with `use_cache`, a list of (keys, values) of each layer, or the
            KeyValueCache that was given.
        logits: (batch, seq, vocab_size), or (batch, seq, cls_head), with `output_logits`.
        hidden_states: the inputs of all layers and the last hidden state, with
            `output_hidden_states`.
        attentions: of each layer (batch, heads, queries, keys), with `output_attentions`.
    """

    last_hidden_state: torch.Tensor | None = None
    past_key_values: Pasts | None = None
    logits: torch.Tensor | None = None
    hidden_states: Tensors | None = None
    attentions: Tensors | None = None


@dataclasses.dataclass
class BaseModelOutputWithPooling(ModelOutput):
    """Output of an encoder with a pooler: the fields of BaseModelOutput, and one more.

    Attributes:
        pooler_output: (batch, dim_model), of the first token.
    """

    last_hidden_state: torch.Tensor | None = None
    pooler_output: torch.Tensor | None = None
    past_key_values: Pasts | None = None
    logits: torch.Tensor | None = None
    hidden_states: Tensors | None = None
    attentions: Tensors | None = None


class PooledWhenRead(BaseModelOutputWithPooling):
    """The same from a model that was not asked for the pooled output.

    It is none of the fields, and None in a tuple, but `output.pooler_output` computes it: the
    program of ModelCenter's README reads it without asking. Collective where the model is sharded.
    """

    def __init__(self, pooler: Callable[[torch.Tensor], torch.Tensor], **fields: Any) -> None:
        self._pooler = pooler
        self._pooled: torch.Tensor | None = None
        super().__init__(**fields)

    @property
    def pooler_output(self) -> torch.Tensor | None:
        """(batch, dim_model)."""
        if self._pooled is None and self.last_hidden_state is not None:
            self._pooled = self._pooler(self.last_hidden_state)
        return self._pooled

    @pooler_output.setter
    def pooler_output(self, value: torch.Tensor | None) -> None:
        self._pooled = value


@dataclasses.dataclass
class Seq2SeqModelOutput(ModelOutput):
    """Output of an encoder-decoder.

    Attributes:
        last_hidden_state: (batch, decoder tokens, dim_model), after the decoder's last norm.
        encoder_last_hidden_state: (batch, encoder tokens, dim_model).
        past_key_values: the decoder's cache, with `use_cache`.
        logits: (batch, decoder tokens, vocab_size), or (batch, decoder tokens, cls_head).
        decoder_hidden_states: the inputs of the decoder's layers and its last hidden state.
        decoder_attentions: of each layer (batch, heads, queries, keys).
        cross_attentions: of each layer (batch, heads, decoder tokens, encoder tokens).
        encoder_hidden_states: the inputs of the encoder's layers and its last hidden state.
        encoder_attentions: of each layer (batch, heads, encoder tokens, encoder tokens).
    """

    last_hidden_state: torch.Tensor | None = None
    encoder_last_hidden_state: torch.Tensor | None = None
    past_key_values: Pasts | None = None
    logits: torch.Tensor | None = None
    decoder_hidden_states: Tensors | None = None
    decoder_attentions: Tensors | None = None
    cross_attentions: Tensors | None = None
    encoder_hidden_states: Tensors | None = None
    encoder_attentions: Tensors | None = None


def as_tuple(output: ModelOutput) -> tuple[Any, ...]:
    """What `return_dict=False` gives: all fields in order, None too."""
    fields: Sequence[dataclasses.Field[Any]] = dataclasses.fields(output)
    return tuple(vars(output).get(field.name) for field in fields)
