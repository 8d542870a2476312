"""`GLMTokenizer`: the SentencePiece tokenizer of GLM, over a `vocab.model`."""

from __future__ import annotations

import itertools
import os
import pathlib
from typing import Any

from tokenizers import AddedToken
from transformers import PreTrainedTokenizer

from model_center.errors import DataError
from model_center.optional import package
from model_center.tokenizer.by_identifier import ByIdentifier

# Special tokens by their distance from the first id after the pieces; in the published vocabulary
# that is 50000.
SPECIALS = {"[PAD]": 0, "[CLS]": 2, "[S]": 6, "[E]": 7, "[MASK]": 8}
FIRST_SPECIAL = 50000


class GLMTokenizer(ByIdentifier, PreTrainedTokenizer):
    """SentencePiece pieces; `[CLS]` is 50002, `[S]` 50006, `[E]` 50007, `[MASK]` 50008.

    It does all that a tokenizer of transformers does. No special tokens are added to a text; those
    that a text names are recognised, so that "[MASK]" can be written into it.
    """

    vocab_files_names = {"vocab_file": "vocab.model"}  # noqa: RUF012 (transformers' attribute)
    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012 (transformers' attribute)

    def __init__(
        self,
        vocab_file: str | os.PathLike[str],
        first_special_id: int = FIRST_SPECIAL,
        **kwargs: Any,
    ) -> None:
        """A tokenizer over `vocab_file`.

        Args:
            vocab_file: a SentencePiece model.
            first_special_id: special tokens have ids from it on.
            kwargs: those of transformers' tokenizers.

        Raises:
            DataError: for a model that is missing or has more pieces than ids below
                `first_special_id`.
        """
        self.vocab_file = os.fspath(vocab_file)
        if not pathlib.Path(vocab_file).is_file():
            raise DataError(f"there is no vocabulary {vocab_file}: expected a SentencePiece model.")
        sentencepiece = package("sentencepiece", "this tokenizer")
        self.pieces = sentencepiece.SentencePieceProcessor(model_file=self.vocab_file)
        if self.vocab_size > first_special_id:
            raise DataError(
                f"{vocab_file} has {self.vocab_size} pieces: expected at most "
                f"first_special_id={first_special_id}."
            )
        special = {
            first_special_id + place: AddedToken(token, special=True)
            for token, place in SPECIALS.items()
        }
        roles = {
            "pad_token": "[PAD]",
            "cls_token": "[CLS]",
            "bos_token": "[S]",
            "eos_token": "[E]",
            "mask_token": "[MASK]",
        }
        kwargs["added_tokens_decoder"] = special | kwargs.get("added_tokens_decoder", {})
        defaults = {"unk_token": "<unk>", "special_tokens_pattern": "none", **roles}
        super().__init__(first_special_id=first_special_id, **(defaults | kwargs))
        self.first_special_id = first_special_id

    @property
    def vocab_size(self) -> int:
        """The number of pieces, without the special tokens."""
        return int(self.pieces.get_piece_size())

    def get_vocab(self) -> dict[str, int]:
        """Token to id, without holes, as a new token gets the id after the last one."""
        named = {number: token.content for number, token in self.added_tokens_decoder.items()}
        named |= {number: self.pieces.id_to_piece(number) for number in range(self.vocab_size)}
        return {named.get(number, f"<unused {number}>"): number for number in range(max(named) + 1)}

    def convert_token_to_id(self, token: str) -> int:
        """The id of a piece or special token."""
        return self.added_tokens_encoder.get(token, self._convert_token_to_id(token))

    def convert_id_to_token(self, index: int) -> str:
        """The piece or special token with this id."""
        return str(self.convert_ids_to_tokens(index))

    def save_vocabulary(
        self, save_directory: str, filename_prefix: str | None = None
    ) -> tuple[str]:
        """Write `vocab.model` into a folder; returns its path."""
        path = pathlib.Path(
            save_directory, f"{filename_prefix}-vocab.model" if filename_prefix else "vocab.model"
        )
        path.write_bytes(self.pieces.serialized_model_proto())
        return (str(path),)

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        return list(self.pieces.encode(text, out_type=str))

    def _convert_token_to_id(self, token: str) -> int:
        return int(self.pieces.piece_to_id(token))

    def _convert_id_to_token(self, index: int) -> str:
        if not 0 <= index < self.vocab_size:
            raise DataError(
                f"there is no piece with id {index}: expected 0 to {self.vocab_size - 1}."
            )
        return str(self.pieces.id_to_piece(index))

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """The text of pieces, with special tokens written out."""
        special = self.added_tokens_encoder
        runs = itertools.groupby(tokens, key=special.__contains__)
        return "".join(
            "".join(run) if is_special else self.pieces.decode_pieces(list(run))
            for is_special, run in runs
        )
