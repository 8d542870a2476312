"""The tokenizers that transformers has, under this project's identifiers.

They are transformers' classes: what takes a tokenizer of transformers takes these, and `isinstance`
says so. A folder's `tokenizer.json` is taken as it is; folders with only the older files
(`vocab.txt`, `vocab.json` with `merges.txt`, `spiece.model`, `tokenizer.model`) are read by
transformers' rules for the class.
"""

from __future__ import annotations

import json
import os
from typing import Any, TypeVar

import transformers
from tokenizers import Tokenizer, processors
from transformers import PreTrainedTokenizerFast

from model_center.tokenizer.by_identifier import ByIdentifier
from model_center.tokenizer.serialized import read, with_steps

Found = TypeVar("Found", bound="FastTokenizer")
# Version 5 makes some of the names that all versions have when they are asked for.
theirs: Any = transformers
# SentencePiece's visible blank, as a step of a `tokenizer.json`
BLANKS = {"type": "Metaspace", "replacement": "\u2581"}


class FastTokenizer(ByIdentifier, PreTrainedTokenizerFast):
    """A tokenizer of transformers, written in Rust, under this project's identifiers.

    `transformers` 4 and 5 read the same files in part by different rules. A `tokenizer.json` is
    read here, and `rebuilt` has what a tokenizer made of older files does to texts.
    """

    def __init__(
        self, *args: Any, tokenizer_file: str | os.PathLike[str] | None = None, **kwargs: Any
    ) -> None:
        """A tokenizer with transformers' arguments for its class.

        Raises:
            DataError: for a `tokenizer.json` that the installed `tokenizers` cannot read.
        """
        if tokenizer_file is not None:
            super().__init__(*args, tokenizer_object=read(tokenizer_file), **kwargs)
            return
        super().__init__(*args, **kwargs)
        self._tokenizer: Any = self.rebuilt(self._tokenizer)

    @classmethod
    def rebuilt(cls, backend: Tokenizer) -> Tokenizer:
        """What transformers made of older files, with the steps that its version 5 takes."""
        return backend

    @classmethod
    def convert_to_native_format(
        cls, trust_remote_code: bool = False, **files: Any
    ) -> dict[str, Any]:
        """What transformers 5 builds the tokenizer from; for our classes it would guess.

        A `tokenizer.json` says everything and is taken as it is, whatever the class (a LLaMA 3 is
        no SentencePiece).
        """
        if files.get("tokenizer_file"):
            return files
        kind = next(
            base
            for base in cls.__mro__
            if issubclass(base, PreTrainedTokenizerFast) and not issubclass(base, FastTokenizer)
        )
        return kind.convert_to_native_format(trust_remote_code, **files)


class BertTokenizer(FastTokenizer, theirs.BertTokenizerFast):
    """WordPiece of BERT, Lawformer and Chinese RoBERTa."""


class RobertaTokenizer(FastTokenizer, theirs.RobertaTokenizerFast):
    """Byte-level BPE of RoBERTa."""


class LongformerTokenizer(FastTokenizer, theirs.RobertaTokenizerFast):
    """RoBERTa's, under Longformer's name. Lawformer's is a `BertTokenizer`."""


class T5Tokenizer(FastTokenizer, theirs.T5TokenizerFast):
    """Unigram pieces and sentinels of T5, mT5, T5 v1.1, Flan-T5 and Mengzi."""

    @classmethod
    def rebuilt(cls, backend: Tokenizer) -> Tokenizer:
        """As of every tokenizer: blanks of all kinds part words, as in SentencePiece."""
        steps = json.loads(backend.to_str())["normalizer"] or {}
        known = [
            step
            for step in steps.get("normalizers", [steps])
            if step.get("type") == "Precompiled"  # SentencePiece's own table
        ]
        return with_steps(
            backend,
            normalizer=known[0] if known else None,
            pre_tokenizer={
                "type": "Sequence",
                "pretokenizers": [
                    {"type": "WhitespaceSplit"},
                    BLANKS | {"prepend_scheme": "always", "split": True},
                ],
            },
            decoder=BLANKS | {"prepend_scheme": "always", "split": True},
        )


class GPT2Tokenizer(FastTokenizer, theirs.GPT2TokenizerFast):
    """Byte-level BPE of GPT-2."""


class GPTjTokenizer(FastTokenizer, theirs.GPT2TokenizerFast):
    """GPT-2's, with the extra tokens that GPT-J's files add."""


class OPTTokenizer(FastTokenizer, theirs.GPT2TokenizerFast):
    """GPT-2's BPE with OPT's vocabulary, which starts every text with `</s>`."""


class LlamaTokenizer(FastTokenizer, theirs.LlamaTokenizerFast):
    """SentencePiece BPE of LLaMA 1 and 2; the byte-level BPE of LLaMA 3's files."""

    def __init__(
        self, *args: Any, tokenizer_file: str | os.PathLike[str] | None = None, **kwargs: Any
    ) -> None:
        """A tokenizer with transformers' arguments for its class; see `FastTokenizer`."""
        super().__init__(*args, tokenizer_file=tokenizer_file, **kwargs)
        if tokenizer_file is None or {"add_bos_token", "add_eos_token"} & kwargs.keys():
            return
        # transformers 4 has put `<s>` in front
        self.init_kwargs.pop("add_bos_token", None)
        self.init_kwargs.pop("add_eos_token", None)
        self._tokenizer.post_processor = read(
            tokenizer_file
        ).post_processor or processors.TemplateProcessing(
            single="$A", pair="$A:0 $B:1", special_tokens=[]
        )

    @classmethod
    def rebuilt(cls, backend: Tokenizer) -> Tokenizer:
        """As of every tokenizer: a blank before the text only, not after each special token."""
        replaced = {"type": "Replace", "pattern": {"String": BLANKS["replacement"]}, "content": " "}
        stripped = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
        return with_steps(
            backend,
            normalizer=None,
            pre_tokenizer=BLANKS | {"prepend_scheme": "first", "split": False},
            decoder={
                "type": "Sequence",
                "decoders": [replaced, {"type": "ByteFallback"}, {"type": "Fuse"}, stripped],
            },
        )

    @classmethod
    def from_pretrained(
        cls: type[Found],
        pretrained_model_name_or_path: str | os.PathLike[str],
        *args: Any,
        **kwargs: Any,
    ) -> Found:
        """As of every tokenizer.

        Files that do not say how texts start and end get LLaMA's `<s>` (1) and `</s>` (2).
        """
        tokenizer = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        if tokenizer.convert_ids_to_tokens([1, 2]) == ["<s>", "</s>"]:
            tokenizer.bos_token = tokenizer.bos_token or "<s>"
            tokenizer.eos_token = tokenizer.eos_token or "</s>"
        return tokenizer

    @classmethod
    def convert_to_native_format(
        cls, trust_remote_code: bool = False, **files: Any
    ) -> dict[str, Any]:
        """As of every tokenizer; with a bare `tokenizer.model`, texts start with `<s>`."""
        if not files.get("tokenizer_file"):
            files.setdefault("add_bos_token", True)
        return super().convert_to_native_format(trust_remote_code, **files)


class MistralTokenizer(LlamaTokenizer):
    """LLaMA's, with Mistral's vocabulary."""


# transformers 4.36 has none: a `tokenizer.json` can be read by what all have
class Qwen2Tokenizer(FastTokenizer, getattr(theirs, "Qwen2TokenizerFast", PreTrainedTokenizerFast)):  # type: ignore[misc]
    """Byte-level BPE of Qwen 2, 2.5 and 3."""

    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012 (transformers' attribute)
