"""Tokenizers that are found by the names of this project."""

from __future__ import annotations

import os
import pathlib
from typing import Any, TypeVar

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from model_center.errors import DataError
from model_center.hub.resolving import resolve
from model_center.tokenizer.serialized import settings

Found = TypeVar("Found", bound="ByIdentifier")


class ByIdentifier(PreTrainedTokenizerBase):
    """A tokenizer whose `from_pretrained` knows our identifiers ("gpt2-base") too."""

    @classmethod
    def from_pretrained(
        cls: type[Found],
        pretrained_model_name_or_path: str | os.PathLike[str],
        *args: Any,
        **kwargs: Any,
    ) -> Found:
        """The tokenizer of a folder, of our identifier or of a repository "org/name".

        `args` and `kwargs` are those of transformers.

        Raises:
            IdentifierError: for an unknown name, naming the nearest ones.
            DataError: for a folder without a vocabulary.
        """
        folder = resolve(str(pretrained_model_name_or_path), "tokenizer")
        files = sorted({"tokenizer.json", *cls.vocab_files_names.values()})
        if not any(pathlib.Path(folder, file).is_file() for file in files):
            raise DataError(
                f"{folder} holds no vocabulary for {cls.__name__}: expected one of "
                f"{', '.join(files)}."
            )
        return super().from_pretrained(folder, *args, **(_older_names(folder) | kwargs))


def _older_names(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Settings of a folder of transformers 5, by the names that all versions know.

    Its list `extra_special_tokens` was called `additional_special_tokens`, beside a dict of
    that name.
    """
    file = pathlib.Path(folder, "tokenizer_config.json")
    extra = settings(file).get("extra_special_tokens") if file.is_file() else None
    if not isinstance(extra, list):
        return {}
    return {"extra_special_tokens": {}, "additional_special_tokens": extra}


class BaseTokenizer:
    """A class of tokenizers, loaded by our identifiers.

    Args:
        tokenizer_type: one with transformers' `from_pretrained`.
    """

    def __init__(self, tokenizer_type: Any) -> None:
        self.tokenizer_type = tokenizer_type

    def from_pretrained(
        self, pretrained_model_name_or_path: str | os.PathLike[str], *args: Any, **kwargs: Any
    ) -> Any:
        """The tokenizer of a folder, of our identifier or of a repository "org/name".

        `args` and `kwargs` are those of `tokenizer_type`.

        Raises:
            IdentifierError: for an unknown name, naming the nearest ones.
        """
        folder = resolve(str(pretrained_model_name_or_path), "tokenizer")
        return self.tokenizer_type.from_pretrained(folder, *args, **kwargs)
