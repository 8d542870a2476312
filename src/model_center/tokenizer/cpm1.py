"""`CPM1Tokenizer`: the tokenizer of CPM-1, over a `vocab.txt` with a token on each line."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterable
from typing import Any

from transformers import PreTrainedTokenizer

from model_center.errors import DataError
from model_center.tokenizer import word_pieces
from model_center.tokenizer.by_identifier import ByIdentifier
from model_center.tokenizer.word_pieces import LINE, SPACE


class CPM1Tokenizer(ByIdentifier, PreTrainedTokenizer):
    """Jieba's words, cut into the longest pieces of the vocabulary; blanks have tokens.

    It does all that a tokenizer of transformers does (batches, pairs, padding, truncation,
    `save_pretrained`, ...). No special tokens are added to a text, and none are recognised in it:
    "<eod>" in a text is five characters, unless `split_special_tokens=False` is given. The
    vocabulary is followed by two private tokens for blanks, which `len()` counts, `vocab_size` does
    not, and no text is encoded to.
    """

    vocab_files_names = {"vocab_file": "vocab.txt"}  # noqa: RUF012 (transformers' attribute)
    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012 (transformers' attribute)

    def __init__(
        self,
        vocab_file: str | os.PathLike[str],
        max_len: int | None = None,
        q2b: bool = False,
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
            max_len: the most ids that the model takes, for `truncation=True`.
            q2b: fold full-width characters to half-width ones.
            eod_token, pad_token, unk_token: the vocabulary's tokens for the end of a document, for
                padding and for what it lacks.
            line_token: its token for the end of a line.
            space_token: its token for a space.
            kwargs: those of transformers' tokenizers.

        Raises:
            DataError: for a vocabulary that is missing or lacks one of the named tokens.
        """
        self.vocab_file = os.fspath(vocab_file)
        self.q2b = q2b
        self.line_token, self.space_token = line_token, space_token
        tokens = word_pieces.read_vocabulary(vocab_file)
        self.decoder = dict(enumerate([*tokens, SPACE, LINE]))
        # of a token that is there twice: the last
        self.encoder = {token: number for number, token in self.decoder.items()}
        self._size = len(tokens)
        self.require(eod_token, str(pad_token), str(unk_token), line_token, space_token)
        kwargs.update(eos_token=eod_token, pad_token=pad_token, unk_token=unk_token)
        if max_len is not None:
            kwargs["model_max_length"] = max_len
        super().__init__(
            **{"split_special_tokens": True, "special_tokens_pattern": "none"} | kwargs
        )
        # Kept for `save_pretrained`, but not as special tokens: those vanish from decoded texts, a
        # space may not.
        self.init_kwargs |= {
            "q2b": q2b,
            "eod_token": eod_token,
            "line_token": line_token,
            "space_token": space_token,
        }

    @classmethod
    def convert_to_native_format(cls, **arguments: Any) -> dict[str, Any]:
        """The arguments on loading, where transformers sets those aside that end in "_token"."""
        named = arguments.pop("model_specific_special_tokens", {})
        return arguments | {name: str(token) for name, token in named.items()}

    def require(self, *tokens: str) -> None:
        """DataError unless the vocabulary has all these tokens."""
        missing = [token for token in tokens if token not in self.encoder]
        if missing:
            raise DataError(
                f"{self.vocab_file} has no {', '.join(missing[:3])}: name the "
                "vocabulary's own by eod_token, pad_token, "
                f"unk_token, line_token, space_token (and sod_token, max_sentinels)."
            )

    @property
    def vocab_size(self) -> int:
        """The number of lines of the vocabulary file."""
        return self._size

    @property
    def eod_id(self) -> int:
        """The id of the token that ends a document."""
        return self.encoder[str(self.eos_token)]

    @property
    def pad_id(self) -> int:
        """The id of padding."""
        return self.encoder[str(self.pad_token)]

    @property
    def unk_id(self) -> int:
        """The id of what the vocabulary does not know."""
        return self.encoder[str(self.unk_token)]

    def get_vocab(self) -> dict[str, int]:
        """Token to id, private and added tokens too; ids that nothing is encoded to have names."""
        named = {
            number: token if self.encoder[token] == number else f"<line {number}>"
            for number, token in self.decoder.items()
        }
        return {token: number for number, token in named.items()} | self.added_tokens_encoder

    def check(self, token: str) -> bool:
        """Whether the vocabulary has this token."""
        return token in self.encoder

    def save_vocabulary(
        self, save_directory: str, filename_prefix: str | None = None
    ) -> tuple[str]:
        """Write `vocab.txt` into a folder; returns its path."""
        path = pathlib.Path(
            save_directory, f"{filename_prefix}-vocab.txt" if filename_prefix else "vocab.txt"
        )
        path.write_text(
            "".join(f"{self.decoder[number]}\n" for number in range(self._size)), encoding="utf-8"
        )
        return (str(path),)

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        marked = word_pieces.mark_blanks(text, self.space_token, self.line_token)
        found = word_pieces.pieces(marked, self.encoder, str(self.unk_token), half_width=self.q2b)
        named = {SPACE: self.space_token, LINE: self.line_token}
        return [named.get(piece, piece) for piece in found]

    def _convert_token_to_id(self, token: str) -> int:
        return self.encoder.get(token, self.unk_id)

    def _convert_id_to_token(self, index: int) -> str:
        if index not in self.decoder:
            raise DataError(f"there is no token with id {index}: expected 0 to {len(self) - 1}.")
        return self.decoder[index]

    def convert_tokens_to_string(self, tokens: Iterable[str]) -> str:
        """The text that tokens stand for."""
        blanks = {
            self.space_token: " ",
            SPACE: " ",
            "\u2582": " ",
            self.line_token: "\n",
            LINE: "\n",
            "\u2583": "\n",
        }
        return "".join(blanks.get(token, token) for token in tokens)

    def _decode(
        self,
        token_ids: int | list[int],
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
        **kwargs: Any,
    ) -> str:
        """The text of ids; negative ones stand for nothing."""
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        known = [number for number in ids if number >= 0]
        return super()._decode(known, skip_special_tokens, clean_up_tokenization_spaces, **kwargs)
