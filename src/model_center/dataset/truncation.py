"""Cutting rows of ids to a maximum length where it hurts least."""

from __future__ import annotations

from model_center.dataset.task_dataset import Tokenizer


def keep_end(tokenizer: Tokenizer, text: str, max_length: int) -> list[int]:
    """The *last* `max_length` ids of `text` with the tokenizer's special tokens around it.

    The question of a prompt stands at its end, so the beginning is cut. What the tokenizer puts in
    front (BOS, [CLS]) is kept even then.
    """
    ids = tokenizer.encode(text)
    if len(ids) <= max_length:
        return ids
    front = num_leading_specials(tokenizer)
    return ids[:front] + ids[len(ids) - max_length + front :]


def num_leading_specials(tokenizer: Tokenizer) -> int:
    """How many special tokens the tokenizer puts in front of a text."""
    bare = tokenizer.encode("a", add_special_tokens=False)
    whole = tokenizer.encode("a")
    return next(start for start in range(len(whole)) if whole[start : start + len(bare)] == bare)


def keep_first(
    tokenizer: Tokenizer, first: str, second: str, max_length: int
) -> dict[str, list[int]]:
    """The pair as the tokenizer joins it, at most `max_length` ids; the second is cut first.

    Returns `input_ids`, `attention_mask` and `token_type_ids`.
    """
    num_special = len(tokenizer("a", "a")["input_ids"]) - 2 * len(
        tokenizer.encode("a", add_special_tokens=False)
    )
    room = max_length - num_special - len(tokenizer.encode(first, add_special_tokens=False))
    return _pair(
        tokenizer, first, second, max_length, "only_second" if room > 0 else "longest_first"
    )


def cut_longest(
    tokenizer: Tokenizer, first: str, second: str, max_length: int
) -> dict[str, list[int]]:
    """The pair as the tokenizer joins it, at most `max_length` ids; the longer text is cut first.

    Returns `input_ids`, `attention_mask` and `token_type_ids`.
    """
    return _pair(tokenizer, first, second, max_length, "longest_first")


def _pair(
    tokenizer: Tokenizer, first: str, second: str, max_length: int, truncation: str
) -> dict[str, list[int]]:
    return dict(
        tokenizer(
            first, second, truncation=truncation, max_length=max_length, return_token_type_ids=True
        )
    )
