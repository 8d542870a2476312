"""Tiny models of random weights, and tokenizers from files of the tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers as hf

TOKENIZERS = Path(__file__).parents[2] / "tests" / "data" / "tokenizers"
NAMES = ("bert", "roberta", "gpt2", "t5")


def tokenizer(name: str) -> Any:
    """The slow tokenizer that OpenPrompt's loader takes."""
    folder = TOKENIZERS / {"roberta": "gpt2"}.get(name, name)
    if name == "bert":
        return hf.BertTokenizer(str(folder / "vocab.txt"))
    if name == "t5":
        return hf.T5Tokenizer(str(folder / "spiece.model"), legacy=False)
    kind = hf.GPT2Tokenizer if name == "gpt2" else hf.RobertaTokenizer
    made = kind(str(folder / "vocab.json"), str(folder / "merges.txt"))
    if made.pad_token is None:
        made.add_special_tokens({"pad_token": "<pad>"})
    return made


def model(name: str, vocab: int = 40, pad: int = 0) -> Any:
    """Two layers, no dropout."""
    kind: Any
    if name in ("bert", "roberta"):
        kind = hf.BertConfig if name == "bert" else hf.RobertaConfig
        head: Any = hf.BertForMaskedLM if name == "bert" else hf.RobertaForMaskedLM
        config = kind(
            vocab_size=vocab,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=24,
            max_position_embeddings=81 + pad,  # RoBERTa's begin behind the padding's number
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            pad_token_id=pad,
        )
        return head(config)
    if name == "gpt2":
        return hf.GPT2LMHeadModel(
            hf.GPT2Config(
                vocab_size=vocab,
                n_embd=16,
                n_layer=2,
                n_head=2,
                n_positions=80,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                bos_token_id=1,
                eos_token_id=1,
            )
        )
    kind = hf.T5Config
    return hf.T5ForConditionalGeneration(
        kind(
            vocab_size=vocab,
            d_model=16,
            d_kv=8,
            d_ff=24,
            num_layers=2,
            num_decoder_layers=2,
            num_heads=2,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    )
