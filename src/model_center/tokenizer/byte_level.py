"""A vocabulary made of texts: byte-level BPE, which can write any text.

Source: Sennrich et al., "Neural Machine Translation of Rare Words with Subword Units" (2016); on
bytes Radford et al., "Language Models are Unsupervised Multitask Learners" (2019).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from model_center.errors import DataError
from model_center.tokenizer.serialized import with_steps

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
SPECIAL = (BOS, EOS, PAD)  # the first ids
NUM_BYTES = 256
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
GPT2_STEPS: Mapping[str, Any] = MappingProxyType({"normalizer": None, "pre_tokenizer": _BYTES})
PIECE = 2**20  # letters that are handed over at a time


def fewest_tokens() -> int:
    """Of any such vocabulary: all bytes, and the special tokens."""
    return NUM_BYTES + len(SPECIAL)


def byte_level_bpe(
    texts: Iterable[str], vocab_size: int, steps: Mapping[str, Any] = GPT2_STEPS
) -> str:
    """The `tokenizer.json` of a byte-level BPE of exactly so many tokens.

    A text starts with `<|bos|>`. The same texts give the same vocabulary.

    Args:
        texts: that it is made of, in any pieces that begin and end at blanks.
        vocab_size: `fewest_tokens()` at least.
        steps: before the BPE, `normalizer` and `pre_tokenizer` of a `tokenizer.json`: how words
            and numbers are parted.

    Raises:
        DataError: for texts that do not give so many tokens.
    """
    backend: Any = Tokenizer(models.BPE())
    backend.decoder = decoders.ByteLevel()
    backend = with_steps(backend, **steps)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    number = backend.get_vocab_size()
    if number != vocab_size:
        raise DataError(
            f"the texts yield a vocabulary of {number:,} tokens, not of {vocab_size:,}: ask for "
            "fewer, or give more texts."
        )
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, backend.token_to_id(BOS))]
    )
    return str(backend.to_str())


def tokenizer_from(text: str) -> PreTrainedTokenizerFast:
    """The tokenizer of what `byte_level_bpe` has made."""
    # Any text can be written; but some classes of transformers add a token for unknown ones, unless
    # it has a name.
    names = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD, "unk_token": EOS}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(text), clean_up_tokenization_spaces=False, **names
    )


def pieces(text: str) -> Iterator[str]:
    """A text in pieces that end at the ends of lines, where words end, too."""
    start = 0
    while start < len(text):
        stop = text.find("\n", start + PIECE) + 1 or len(text)
        yield text[start:stop]
        start = stop
