"""`CPM2Tokenizer`: CPM-1's, with sentinels for spans and a token that starts documents."""

from __future__ import annotations

import os
from typing import Any, TypeVar

from model_center.tokenizer.cpm1 import CPM1Tokenizer

Found = TypeVar("Found", bound="CPM2Tokenizer")


class CPM2Tokenizer(CPM1Tokenizer):
    """CPM1Tokenizer with sentinels `<s_0>`, `<s_1>`, ... and `<s>` in its vocabulary."""

    def __init__(  # noqa: PLR0913 (ModelCenter's arguments)
        self,
        vocab_file: str | os.PathLike[str],
        max_sentinels: int = 190,
        max_len: int | None = None,
        q2b: bool = False,
        sod_token: str = "<s>",
        eod_token: str = "<eod>",
        pad_token: str = "<pad>",
        unk_token: str = "<unk>",
        line_token: str = "</n>",
        space_token: str = "</_>",
        **kwargs: Any,
    ) -> None:
        """A tokenizer over `vocab_file`.

        Args:
            vocab_file: `vocab.txt`, a token on each line.
            max_sentinels: number of sentinels.
            sod_token: the token that starts a document.
            max_len, q2b, eod_token, pad_token, unk_token: as of CPM1Tokenizer.
            line_token, space_token, kwargs: as of CPM1Tokenizer.

        Raises:
            DataError: for a vocabulary that is missing or lacks one of the named tokens.
        """
        super().__init__(
            vocab_file,
            max_len,
            q2b,
            eod_token,
            pad_token,
            unk_token,
            line_token,
            space_token,
            **kwargs,
        )
        self.sod_token = sod_token
        self.max_sentinels = max_sentinels
        self.require(sod_token, *(f"<s_{index}>" for index in range(max_sentinels)))
        self.init_kwargs |= {"sod_token": sod_token, "max_sentinels": max_sentinels}

    @classmethod
    def from_pretrained(
        cls: type[Found],
        pretrained_model_name_or_path: str | os.PathLike[str],
        *args: Any,
        **kwargs: Any,
    ) -> Found:
        """The tokenizer of a folder or identifier; blanks are "▂" and "▃" in its vocabulary."""
        return super().from_pretrained(
            pretrained_model_name_or_path,
            *args,
            **{"space_token": "\u2582", "line_token": "\u2583"} | kwargs,
        )

    @property
    def sod_id(self) -> int:
        """The id of the token that starts a document."""
        return self.encoder[self.sod_token]

    def get_sentinel_num(self) -> int:
        """How many sentinels there are."""
        return self.max_sentinels

    def get_sentinel_id(self, idx: int) -> int:
        """The id of sentinel `idx`, counted from 0."""
        return self.encoder[f"<s_{range(self.max_sentinels)[idx]}>"]
