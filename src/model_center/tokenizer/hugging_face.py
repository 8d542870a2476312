"""The tokenizers that transformers has, under this project's identifiers.

They are transformers' classes: what takes a tokenizer of transformers takes these, and `isinstance`
says so. A folder's `tokenizer.json` is taken as it is; folders with only the older files
(`vocab.txt`, `vocab.json` with `merges.txt`, `spiece.model`, `tokenizer.model`) are read by
transformers' rules for the class.
"""

from __future__ import annotations

import os
from typing import Any, TypeVar

from transformers.models.bert.tokenization_bert import BertTokenizer as HuggingFaceBert
from transformers.models.gpt2.tokenization_gpt2 import GPT2Tokenizer as HuggingFaceGPT2
from transformers.models.llama.tokenization_llama import LlamaTokenizer as HuggingFaceLlama
from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer as HuggingFaceQwen2
from transformers.models.roberta.tokenization_roberta import RobertaTokenizer as HuggingFaceRoberta
from transformers.models.t5.tokenization_t5 import T5Tokenizer as HuggingFaceT5
from transformers.tokenization_utils_tokenizers import TokenizersBackend

from model_center.tokenizer.identified import Identified

Found = TypeVar("Found", bound="Borrowed")


class Borrowed(Identified, TokenizersBackend):
    """A tokenizer of transformers, written in Rust, under this project's identifiers."""

    @classmethod
    def convert_to_native_format(
        cls, trust_remote_code: bool = False, **files: Any
    ) -> dict[str, Any]:
        """What transformers builds the tokenizer from; for our classes it would guess.

        A `tokenizer.json` says everything and is taken as it is, whatever the class (a LLaMA 3 is
        no SentencePiece).
        """
        if files.get("tokenizer_file"):
            return super().convert_to_native_format(trust_remote_code, **files)
        theirs = next(
            base
            for base in cls.__mro__
            if issubclass(base, TokenizersBackend) and not issubclass(base, Borrowed)
        )
        return theirs.convert_to_native_format(trust_remote_code, **files)


class BertTokenizer(Borrowed, HuggingFaceBert):
    """WordPiece of BERT, Lawformer and Chinese RoBERTa."""


class RobertaTokenizer(Borrowed, HuggingFaceRoberta):
    """Byte-level BPE of RoBERTa."""


class LongformerTokenizer(Borrowed, HuggingFaceRoberta):
    """RoBERTa's, under Longformer's name. Lawformer's is a `BertTokenizer`."""


class T5Tokenizer(Borrowed, HuggingFaceT5):
    """Unigram pieces and sentinels of T5, mT5, T5 v1.1, Flan-T5 and Mengzi."""


class GPT2Tokenizer(Borrowed, HuggingFaceGPT2):
    """Byte-level BPE of GPT-2."""


class GPTjTokenizer(Borrowed, HuggingFaceGPT2):
    """GPT-2's, with the extra tokens that GPT-J's files add."""


class OPTTokenizer(Borrowed, HuggingFaceGPT2):
    """GPT-2's BPE with OPT's vocabulary, which starts every text with `</s>`."""


class LlamaTokenizer(Borrowed, HuggingFaceLlama):
    """SentencePiece BPE of LLaMA 1 and 2; the byte-level BPE of LLaMA 3's files."""

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


class Qwen2Tokenizer(Borrowed, HuggingFaceQwen2):
    """Byte-level BPE of Qwen 2, 2.5 and 3."""
