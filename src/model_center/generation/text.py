"""TextGenerator: generation from texts to texts."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from model_center.errors import InputError
from model_center.generation.config import GenerationConfig
from model_center.generation.detokenizer import Detokenizer
from model_center.generation.engine import GenerationRun, Kind, search_of, streamed_search_of
from model_center.generation.prepare import PromptBatch
from model_center.generation.search import DecodeTask, Search, StreamedSearch
from model_center.generation.session import Session
from model_center.model.base import BaseModel
from model_center.tokenizer.chat_template import rendered

NUM_CONTEXT = 4  # tokens of the prompt after which the first new one is decoded

Message = Mapping[str, str]
Rows = list[list[int]]


class TextGenerator:
    """Continues texts: `TextGenerator(model, tokenizer)(["Once upon a time"], max_new_tokens=20)`.

    Collective if the model is sharded: every rank calls it, each with texts of its own, or with
    none.

    Args:
        model: any decoder-only or encoder-decoder model.
        tokenizer: one of transformers or of this project.
        config: how texts are continued; None for the default.
        session: keeps memory and recorded steps from one call for the next; None for nothing.
        options: values that replace the configuration's. Where neither says which tokens end and
            pad sequences, the tokenizer does; `eos_token_id=()` is for none.
    """

    def __init__(
        self,
        model: BaseModel,
        tokenizer: Any,
        config: GenerationConfig | None = None,
        *,
        session: Session | None = None,
        **options: Any,
    ) -> None:
        self.model, self.tokenizer, self.session = model, tokenizer, session
        self.config = GenerationConfig.of(config, **options)

    def __call__(self, texts: Sequence[str], **options: Any) -> list[str]:
        """What follows each of `texts`, `num_return_sequences` neighbours for each.

        Raises:
            ConfigError, InputError: before anything is computed; on every rank if on one.
        """
        return texts_of(self._run(lambda: self._encoded(texts), options, search_of), self.tokenizer)

    def tokens(self, texts: Sequence[str], **options: Any) -> Rows:
        """The new tokens after each of `texts`, without the one that ends them.

        `options` and errors are those of a call.
        """
        run = self._run(lambda: self._encoded(texts), options, search_of)
        rows, ends = run.completed().rows(), run.task.config.eos_ids
        return [row[:-1] if row[-1] in ends else row for row in rows]

    def chat(self, conversations: Sequence[Sequence[Message]], **options: Any) -> list[str]:
        """The next message of each conversation, in the form of the tokenizer's chat template.

        Args:
            conversations: each a list of messages {"role": ..., "content": ...}.
            options: values that replace the configuration's.

        Raises:
            InputError: for a tokenizer without a chat template; and as when called.
        """
        return texts_of(
            self._run(lambda: templated(self.tokenizer, conversations), options, search_of),
            self.tokenizer,
        )

    def stream(self, text: str, **options: Any) -> Iterator[str]:
        """What follows `text`, in pieces, each yielded as soon as no later token can change it.

        `options` and errors are those of a call; beam search is refused.
        """
        return (piece for _, piece in self.stream_batch([text], **options))

    def stream_batch(self, texts: Sequence[str], **options: Any) -> Iterator[tuple[int, str]]:
        """As `stream` for several texts at once: pairs of a row's number and a piece.

        `options` are those of a call.
        """
        return pieces_of(
            self._run(lambda: self._encoded(texts), options, streamed_search_of), self.tokenizer
        )

    def stream_chat(self, conversation: Sequence[Message], **options: Any) -> Iterator[str]:
        """The next message of `conversation`, in pieces as of `stream`.

        `options` are those of a call.

        Raises:
            InputError: for a tokenizer without a chat template.
        """
        run = self._run(
            lambda: templated(self.tokenizer, [conversation]), options, streamed_search_of
        )
        return (piece for _, piece in pieces_of(run, self.tokenizer))

    def encode(self, text: str) -> list[int]:
        """The tokens of a prompt, with those that the tokenizer puts around it."""
        return list(self.tokenizer.encode(text))

    def inputs(self, mask: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Further `inputs` of `generate`, for prompts with valid tokens bool (rows, length)."""
        return {}

    def with_defaults(self, config: GenerationConfig) -> GenerationConfig:
        """The configuration with the tokenizer's end and pad tokens, ids without text forbidden."""
        found = {
            name: getattr(self.tokenizer, name)
            for name in ("eos_token_id", "pad_token_id")
            if getattr(config, name) is None
        }
        return dataclasses.replace(
            config, forbidden_tokens=(*config.forbidden_tokens, *self.unknown), **found
        )

    @functools.cached_property
    def unknown(self) -> list[int]:
        """Ids of the model without a token: vocabularies are rounded up for speed."""
        return sorted(
            set(range(self.model.config.vocab_size)) - set(self.tokenizer.get_vocab().values())
        )

    def _encoded(self, texts: Sequence[str]) -> Rows:
        if isinstance(texts, str):
            raise InputError("texts is a str: expected a list of str, also for one.")
        strange = [type(text).__name__ for text in texts if not isinstance(text, str)]
        if strange:
            raise InputError(f"texts holds {strange[0]}: expected a list of str.")
        return [self.encode(text) for text in texts]

    def _run(
        self,
        encode: Callable[[], Rows],
        options: Mapping[str, Any],
        make: Callable[[DecodeTask], Kind],
    ) -> GenerationRun[Kind]:
        def ask() -> tuple[PromptBatch, GenerationConfig]:
            config = self.with_defaults(GenerationConfig.of(self.config, **options))
            ids, mask = padded(encode(), config.pad, self.model.PADDING_SIDE)
            return PromptBatch(
                input_ids=ids,
                attention_mask=mask,
                inputs=self.inputs(mask),
                tokenizer=self.tokenizer,
            ), config

        return GenerationRun(self.model, ask, make, self.session)


def texts_of(run: GenerationRun[Search], tokenizer: Any) -> list[str]:
    """The text of each row, after all steps."""
    rows = run.completed().rows()
    return [
        reader.add(*row) + reader.rest()
        for reader, row in zip(detokenizers(run, tokenizer), rows, strict=True)
    ]


def pieces_of(run: GenerationRun[StreamedSearch], tokenizer: Any) -> Iterator[tuple[int, str]]:
    """(row, piece of its text) as soon as it is certain."""
    readers = detokenizers(run, tokenizer)
    for search in run.steps():
        for row, token in enumerate(search.new_tokens()):
            piece = readers[row].add(token) if token is not None else ""
            if piece:
                yield row, piece
    for row, reader in enumerate(readers):
        piece = reader.rest()
        if piece:
            yield row, piece


def detokenizers(run: GenerationRun[Kind], tokenizer: Any) -> list[Detokenizer]:
    """One for each row of the results."""
    task, mask = run.task, run.task.mask
    valid = torch.ones_like(task.prefix, dtype=torch.bool) if mask is None else mask
    contexts = [
        row[is_valid][-NUM_CONTEXT:].tolist()
        for row, is_valid in zip(task.prefix, valid, strict=True)
    ]
    copies = task.config.num_return_sequences
    return [
        Detokenizer(tokenizer, context, task.config.stops)
        for context in contexts[: run.num_prompts]
        for _ in range(copies)
    ]


def templated(tokenizer: Any, conversations: Sequence[Sequence[Message]]) -> Rows:
    """The tokens of each conversation, up to where the next message begins.

    Raises:
        InputError: for a tokenizer without a chat template, what is no list of conversations, and
            what the template refuses.
    """
    if not tokenizer.chat_template:
        raise InputError(
            "the tokenizer has no chat template: set its chat_template, or give texts "
            "instead of conversations."
        )
    if not all(
        isinstance(message, Mapping) and "role" in message
        for conversation in conversations
        for message in conversation
    ):
        raise InputError("conversations must be lists of messages {'role': ..., 'content': ...}.")
    texts = [rendered(tokenizer, one, add_generation_prompt=True) for one in conversations]
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


def padded(rows: Rows, pad: int, side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows as int64 (rows, longest), padded on the "left" or "right", and bool: what is valid.

    Raises:
        InputError: for a row without tokens.
    """
    if [] in rows:
        raise InputError(
            f"text {rows.index([])} has no tokens: expected at least one; begin it with "
            "the tokenizer's first token."
        )
    length = max(map(len, rows), default=1)
    ids = torch.full((len(rows), length), pad, dtype=torch.long)
    mask = torch.zeros(len(rows), length, dtype=torch.bool)
    for place, row in enumerate(rows):
        columns = slice(length - len(row), length) if side == "left" else slice(len(row))
        ids[place, columns] = torch.tensor(row, dtype=torch.long)
        mask[place, columns] = True
    return ids, mask
