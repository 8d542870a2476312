"""Documents to ids: what a worker process does, and all it has to know."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers.models.auto.tokenization_auto import AutoTokenizer
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from model_center.errors import DataError
from model_center.hub.resolving import resolve
from model_center.preprocess.documents import Batch
from model_center.tokenizer.cpm1 import CPM1Tokenizer
from model_center.tokenizer.cpm2 import CPM2Tokenizer
from model_center.tokenizer.glm import GLMTokenizer

TOKENIZERS: dict[str, Any] = {"cpm1": CPM1Tokenizer, "cpm2": CPM2Tokenizer, "glm": GLMTokenizer}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a line becomes sequences of ids.

    tokenizer, tokenizer_type: a folder or name, and "auto" or a key of TOKENIZERS.
    key: of the text in a line of JSON; None for lines of text.
    newline: what stands for a line break in the text; empty for nothing.
    prefix: ids before every document.
    append_eod: the tokenizer's end-of-document id (its eos) follows every document.
    drop_unknown: leave unknown ids out.
    max_chars, min_tokens: longer texts, and those of fewer ids, are skipped.
    split_length: the most ids in a sequence; a document is cut into several.
    min_tail: the last of several sequences of a document is dropped if it is shorter.
    """

    tokenizer: str
    tokenizer_type: str = "auto"
    key: str | None = None
    newline: str = ""
    prefix: tuple[int, ...] = ()
    append_eod: bool = False
    drop_unknown: bool = False
    max_chars: int | None = None
    min_tokens: int = 1
    split_length: int | None = None
    min_tail: int = 1

    def __post_init__(self) -> None:
        for name in ("max_chars", "split_length", "min_tokens", "min_tail"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise DataError(
                    f"{name.replace('_', '-')} is {value}: expected a number from 1 on."
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Encoded:
    """The documents of a batch: per document its sequences, each int64 (length,).

    `skipped` had none.
    """

    documents: list[list[npt.NDArray[np.int64]]]
    skipped: int


@functools.lru_cache(maxsize=1)
def load_tokenizer(name: str, kind: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder, an identifier or a repository, loaded once per process.

    Raises:
        DataError: when there is none.
    """
    if kind in TOKENIZERS:
        return TOKENIZERS[kind].from_pretrained(name)
    folder = resolve(name, "tokenizer")
    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise DataError(
            f"{folder} holds no tokenizer that transformers can load: {error}"
        ) from error


def end_of_document(recipe: Recipe) -> tuple[int, ...]:
    """The ids after every document: one or none.

    Raises:
        DataError: when the recipe wants one and the tokenizer has none.
    """
    if not recipe.append_eod:
        return ()
    number = load_tokenizer(recipe.tokenizer, recipe.tokenizer_type).eos_token_id
    if number is None:
        raise DataError(
            f"the tokenizer {recipe.tokenizer} has no end-of-document token (eos_token): "
            "leave out --append-eod."
        )
    return (int(number),)


def encode(recipe: Recipe, batch: Batch) -> Encoded:
    """The sequences of every line of a batch, in order."""
    tokenizer = load_tokenizer(recipe.tokenizer, recipe.tokenizer_type)
    texts = [
        text.replace(recipe.newline, "\n") if recipe.newline else text
        for text in batch.texts(recipe.key)
    ]
    kept = [text for text in texts if text.strip() and len(text) <= (recipe.max_chars or len(text))]
    # "verbose": it would warn of documents longer than the model, which are what this is for.
    encoded = tokenizer(kept, add_special_tokens=False, verbose=False)["input_ids"] if kept else []
    end, unknown = end_of_document(recipe), tokenizer.unk_token_id if recipe.drop_unknown else None
    documents = [
        _sequences(recipe, [number for number in ids if number != unknown], end) for ids in encoded
    ]
    found = [document for document in documents if document]
    return Encoded(documents=found, skipped=len(texts) - len(found))


def _sequences(recipe: Recipe, ids: list[int], end: tuple[int, ...]) -> list[npt.NDArray[np.int64]]:
    """The sequences of one document; none when it is too short."""
    if len(ids) < recipe.min_tokens:
        return []
    whole = np.array([*recipe.prefix, *ids, *end], np.int64)
    length = recipe.split_length or len(whole)
    pieces = [whole[start : start + length] for start in range(0, len(whole), length)]
    if len(pieces) > 1 and len(pieces[-1]) < recipe.min_tail:
        pieces.pop()
    return pieces
