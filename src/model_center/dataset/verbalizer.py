"""The words that stand for the classes of a task, as ids."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from model_center.dataset.task_dataset import Tokenizer
from model_center.errors import DataError


def word_ids(tokenizer: Tokenizer, words: Sequence[str]) -> list[int]:
    """The id that tells each word from the others: of its first token, where these differ.

    Tokens that all words begin with are passed over (LLaMA writes "1" and "2" as "▁1" and "▁2" with
    "▁" a token of its own), and so are special tokens. For classification, logits at these ids are
    compared with one another.

    Raises:
        DataError: if the vocabulary does not tell the words apart.
    """
    rows = [tokenizer.encode(word, add_special_tokens=False) for word in words]
    shared = sum(
        1
        for _ in itertools.takewhile(lambda column: len(set(column)) == 1, zip(*rows, strict=False))
    )
    ids = [row[shared] for row in rows if len(row) > shared]
    if len(set(ids) - {tokenizer.unk_token_id}) < len(words):
        got = ", ".join(f"{word!r}: {row}" for word, row in zip(words, rows, strict=True))
        raise DataError(
            f"the words of the classes begin with the same token in this vocabulary ({got}): "
            "expected distinct first ids."
        )
    return ids


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that the vocabulary must have.

    Raises:
        DataError: if it is missing.
    """
    number = tokenizer.convert_tokens_to_ids(token)
    if number is None or number == tokenizer.unk_token_id:
        raise DataError(f"the tokenizer has no token {token}: expected that of a T5 model.")
    return number
