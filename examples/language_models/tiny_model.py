"""Make a folder with a tiny random model of a family, to try the programs of this folder without a
GPU or a download.

    python examples/language_models/tiny_model.py bert /tmp/tiny-bert

The folder has config.json, weights, and the small tokenizer of tests/data.
"""

from __future__ import annotations

import argparse
import pathlib
import shutil
from typing import Any

import torch

from model_center.model.base import BaseModel
from model_center.model.bert import Bert
from model_center.model.cpm1 import CPM1
from model_center.model.cpm2 import CPM2
from model_center.model.gpt2 import GPT2
from model_center.model.gptj import GPTj
from model_center.model.llama import Llama
from model_center.model.mistral import Mistral
from model_center.model.opt import OPT
from model_center.model.qwen2 import Qwen2
from model_center.model.qwen3 import Qwen3
from model_center.model.t5 import T5
from model_center.tokenizer import (
    BertTokenizer,
    CPM1Tokenizer,
    CPM2Tokenizer,
    GPT2Tokenizer,
    GPTjTokenizer,
    LlamaTokenizer,
    MistralTokenizer,
    OPTTokenizer,
    Qwen2Tokenizer,
    T5Tokenizer,
)

TOKENIZERS = pathlib.Path(__file__).resolve().parents[2] / "tests" / "data" / "tokenizers"
SIZES = {"dim_model": 64, "num_heads": 4, "dim_head": 16, "dim_ff": 128}
ONE_STACK = {**SIZES, "num_layers": 2}
TWO_STACKS = {**SIZES, "num_encoder_layers": 2, "num_decoder_layers": 2}
# Their heads have scores to choose from, so that adapters below them can learn something.
LLAMA_LIKE = {**ONE_STACK, "num_heads_kv": 2, "proj_init_std": 0.2}
# The model, its tokenizer, the folder of that, and what else is small.
FAMILIES: dict[str, tuple[type[BaseModel], Any, str, dict[str, Any]]] = {
    "bert": (Bert, BertTokenizer, "bert", {**ONE_STACK, "position_size": 512}),
    "gpt2": (
        GPT2,
        GPT2Tokenizer,
        "gpt2",
        {**ONE_STACK, "position_size": 512, "ffn_activate_fn": "gelu_new"},
    ),
    "gptj": (GPTj, GPTjTokenizer, "gpt2", {**ONE_STACK, "pos_rotary_dim": 8}),
    "llama": (Llama, LlamaTokenizer, "llama", LLAMA_LIKE),
    "mistral": (Mistral, MistralTokenizer, "llama", LLAMA_LIKE),
    "opt": (OPT, OPTTokenizer, "gpt2", {**ONE_STACK, "position_size": 512}),
    "qwen2": (Qwen2, Qwen2Tokenizer, "gpt2", LLAMA_LIKE),
    "qwen3": (Qwen3, Qwen2Tokenizer, "gpt2", LLAMA_LIKE),
    "t5": (T5, T5Tokenizer, "t5", {**TWO_STACKS, "pos_init_std": 0.02, "tied": False}),
    "t5-v1_1": (
        T5,
        T5Tokenizer,
        "t5",
        {**TWO_STACKS, "pos_init_std": 0.02, "tied": False, "ffn_activate_fn": "gated_gelu_new"},
    ),
    "cpm1": (CPM1, CPM1Tokenizer, "cpm1", {**ONE_STACK, "pos_init_std": 0.02}),
    "cpm2": (CPM2, CPM2Tokenizer, "cpm2", {**TWO_STACKS, "pos_init_std": 0.02}),
}


def make(family: str, folder: pathlib.Path, seed: int = 0) -> None:
    """Write the folder, which must not exist."""
    kind, tokenizer, name, sizes = FAMILIES[family]
    shutil.copytree(TOKENIZERS / name, folder)
    torch.manual_seed(seed)
    values = {"vocab_size": len(tokenizer.from_pretrained(folder)), "dtype": torch.float32, **sizes}
    model = kind(kind._CONFIG_TYPE(**values))
    model.save_pretrained(folder, format="hf" if model.config.model_type else "model_center")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--seed", type=int, default=0, help="of the weights (default: 0)")
    args = parser.parse_args()
    if args.folder.exists():
        parser.error(f"{args.folder} is there already: name a folder to be made")
    make(args.family, args.folder, args.seed)
    print(f"{args.folder}: a tiny {args.family}")


if __name__ == "__main__":
    main()
