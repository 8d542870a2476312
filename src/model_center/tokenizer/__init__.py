"""Tokenizers; `from_pretrained` takes our identifiers, a folder or a repository."""

from model_center.tokenizer.cpm1 import CPM1Tokenizer
from model_center.tokenizer.cpm2 import CPM2Tokenizer
from model_center.tokenizer.glm import GLMTokenizer
from model_center.tokenizer.hugging_face import (
    BertTokenizer,
    GPT2Tokenizer,
    GPTjTokenizer,
    LlamaTokenizer,
    LongformerTokenizer,
    MistralTokenizer,
    OPTTokenizer,
    Qwen2Tokenizer,
    RobertaTokenizer,
    T5Tokenizer,
)

__all__ = [
    "BertTokenizer",
    "CPM1Tokenizer",
    "CPM2Tokenizer",
    "GLMTokenizer",
    "GPT2Tokenizer",
    "GPTjTokenizer",
    "LlamaTokenizer",
    "LongformerTokenizer",
    "MistralTokenizer",
    "OPTTokenizer",
    "Qwen2Tokenizer",
    "RobertaTokenizer",
    "T5Tokenizer",
]
