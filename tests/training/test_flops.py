"""What a step costs: the meter against what torch counts, attention by hand."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from model_center.layer import Linear
from model_center.model import (
    GPT2,
    T5,
    Bert,
    BertConfig,
    GPT2Config,
    Longformer,
    Qwen3,
    Qwen3Config,
    T5Config,
)
from model_center.model.longformer import LongformerConfig
from model_center.training.flops import FlopsMeter, flops_per_token

SIZES: dict[str, Any] = {"vocab_size": 40, "dim_model": 16, "num_heads": 2, "dim_head": 8}
SIZES |= {"dim_ff": 32, "dtype": torch.float32}
ROWS, LENGTH, WRITTEN = 3, 12, 5
IDS = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) % 40
FULL, HALF = 2 * LENGTH**2, 2 * LENGTH**2 // 2  # pairs of queries and keys of two layers
Case = tuple[torch.nn.Module, Callable[[Any], torch.Tensor], int]


class Classifier(torch.nn.Module):
    """A head of the program's own on BERT."""

    def __init__(self):
        super().__init__()
        self.bert = Bert(BertConfig(**SIZES, num_layers=2))
        self.dense = Linear(16, 3, dtype=torch.float32)

    def forward(self, ids):
        out = self.bert(ids, output_logits=False, output_pooler_output=True)
        return self.dense(out.pooler_output)


def logits(model):
    out: torch.Tensor = model(IDS).logits
    return out


def answer(model):
    out: torch.Tensor = model(IDS, decoder_input_ids=IDS[:, :WRITTEN]).logits
    return out


def gpt2(**how):
    return GPT2(GPT2Config(**SIZES, num_layers=2, **how)), logits, HALF


def t5():
    pairs = LENGTH**2 + 2 * WRITTEN**2 // 2 + 2 * WRITTEN * LENGTH
    return T5(T5Config(**SIZES, num_encoder_layers=1, num_decoder_layers=2)), answer, pairs


# The model, a training pass, and the pairs of queries and keys of a row of all its layers.
CASES: dict[str, Callable[[], Case]] = {
    "gpt2": gpt2,
    "gpt2 untied": lambda: gpt2(tied=False),
    "qwen3": lambda: (Qwen3(Qwen3Config(**SIZES, num_layers=2, num_heads_kv=1)), logits, HALF),
    "bert": lambda: (Classifier(), lambda model: model(IDS), FULL),
    "masked bert": lambda: (Bert(BertConfig(**SIZES, num_layers=2)), logits, FULL),
    "t5": t5,
}


def attention(pairs):
    return int(12 * ROWS * pairs * SIZES["num_heads"] * SIZES["dim_head"])


def products(run):
    """FLOPs of the products with matrices, forward and backward, as torch counts them."""
    with FlopCounterMode(display=False) as counter:
        run().sum().backward()
    found = counter.get_flop_counts()["Global"]
    matrices = (torch.ops.aten.mm, torch.ops.aten.addmm)
    return sum(count for function, count in found.items() if function in matrices)


@pytest.mark.parametrize("case", CASES)
def test_the_meter_counts_what_torch_counts(case):
    """Of a pass with gradients; an evaluation does not count, and nothing counts twice. What a
    program says beforehand of full rows is the same. Frozen weights cost two thirds.
    """
    model, run, pairs = CASES[case]()
    meter = FlopsMeter(model)
    with torch.no_grad():
        run(model)
    assert meter.take() == 0
    counted = products(lambda: run(model))
    assert meter.take() - attention(pairs) == counted
    assert meter.take() == 0
    if isinstance(model, GPT2 | Qwen3):
        whole = counted + attention(pairs)
        assert flops_per_token(model, LENGTH) * IDS.numel() == whole
        model.requires_grad_(False)
        run(model)
        assert meter.take() - attention(pairs) == pytest.approx(counted * 2 / 3)


def test_attention_within_a_window_is_not_known():
    model = Longformer(LongformerConfig(**SIZES, num_layers=1, attention_window=4))
    meter = FlopsMeter(model)
    model(IDS)
    assert meter.take() == 0
