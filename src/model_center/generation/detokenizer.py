"""From new tokens to new text: at once, or piece by piece as tokens come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Detokenizer:
    """The text of one sequence, up to its first stop string.

    Tokens are decoded after those before them, since some tokenizers leave out the blank in front
    of a first token. A character of which only some bytes are there waits for the others, and text
    that may be the beginning of a stop string for its end.

    Args:
        tokenizer: with `decode(ids, skip_special_tokens=)`.
        context: the tokens before; the last few will do.
        stops: texts that end the sequence, which they do not belong to.
    """

    def __init__(
        self, tokenizer: Any, context: Sequence[int] = (), stops: Sequence[str] = ()
    ) -> None:
        self._tokenizer, self._stops = tokenizer, stops
        self._ids = self._from_whole_character(list(context))
        self._start, self._read = 0, len(self._ids)
        self._held, self._is_over = "", False

    def add(self, *tokens: int) -> str:
        """The text that is certain after these tokens and was not before."""
        self._ids.extend(tokens)
        known, text = (
            self._decode(self._ids[self._start : self._read]),
            self._decode(self._ids[self._start :]),
        )
        if text.endswith("\ufffd"):
            return ""
        # what follows tokens without text loses its blank
        if self._decode(self._ids[self._read :]).strip():
            self._start = self._read
        self._read = len(self._ids)
        return self._until_stop(text[len(known) :])

    def rest(self) -> str:
        """The text that waited for more, when there is no more."""
        known, text = (
            self._decode(self._ids[self._start : self._read]),
            self._decode(self._ids[self._start :]),
        )
        found = self._until_stop(text[len(known) :])
        held, self._held, self._read = self._held, "", len(self._ids)
        return found if self._is_over else found + held

    def _from_whole_character(self, ids: list[int]) -> list[int]:
        """The tokens without those at their start that are the rest of a character: some tokenizers
        (SentencePiece's with byte fallback) can read none of the bytes in a row if they cannot read
        all.
        """
        while self._decode(ids).startswith("\ufffd"):
            ids = ids[1:]
        return ids

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True)) if ids else ""

    def _until_stop(self, text: str) -> str:
        if self._is_over:
            return ""
        text = self._held + text
        ends = [place for place in map(text.find, self._stops) if place >= 0]
        if ends:
            self._is_over = True
            return text[: min(ends)]
        certain = len(text) - max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[certain:]
        return text[:certain]


def _overlap(text: str, stop: str) -> int:
    """How many letters at the end of the text may be the beginning of the stop string."""
    return next(
        (
            size
            for size in range(min(len(text), len(stop) - 1), 0, -1)
            if text.endswith(stop[:size])
        ),
        0,
    )
