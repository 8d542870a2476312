"""What a step costs: the meter against what torch counts, attention by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from model_center.layer import Linear
from model_center.model import GPT2, T5, Bert, BertConfig, GPT2Config, Longformer, T5Config
from model_center.model.longformer import LongformerConfig
from model_center.training.flops import FlopsMeter, flops_per_token

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "dim_model": 16,
    "num_heads": 2,
    "dim_head": 8,
    "dim_ff": 32,
    "dtype": torch.float32,
}
ROWS, LENGTH, WRITTEN = 3, 12, 5
IDS = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) % 40


class Classifier(torch.nn.Module):
    """A head of the program's own on BERT."""

    def __init__(self) -> None:
        super().__init__()
        self.bert = Bert(BertConfig(**SIZES, num_layers=2))
        self.dense = Linear(16, 3, dtype=torch.float32)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out = self.bert(ids, output_logits=False, output_pooler_output=True)
        return self.dense(out.pooler_output)


def gpt2(**how: Any) -> tuple[torch.nn.Module, Callable[[Any], torch.Tensor], int]:
    """The model, a training pass, and the pairs of queries and keys of a row of all its layers."""
    model = GPT2(GPT2Config(**SIZES, num_layers=2, **how))
    return model, lambda model: model(IDS).logits, 2 * LENGTH**2 // 2


def bert() -> tuple[torch.nn.Module, Callable[[Any], torch.Tensor], int]:
    return Classifier(), lambda model: model(IDS), 2 * LENGTH**2


def masked() -> tuple[torch.nn.Module, Callable[[Any], torch.Tensor], int]:
    return Bert(BertConfig(**SIZES, num_layers=2)), lambda model: model(IDS).logits, 2 * LENGTH**2


def t5() -> tuple[torch.nn.Module, Callable[[Any], torch.Tensor], int]:
    model = T5(T5Config(**SIZES, num_encoder_layers=1, num_decoder_layers=2))
    pairs = LENGTH**2 + 2 * WRITTEN**2 // 2 + 2 * WRITTEN * LENGTH
    return model, lambda model: model(IDS, decoder_input_ids=IDS[:, :WRITTEN]).logits, pairs


def products(run: Callable[[], torch.Tensor]) -> int:
    """FLOPs of the products with matrices, forward and backward, as torch counts them."""
    with FlopCounterMode(display=False) as counter:
        run().sum().backward()
    found = counter.get_flop_counts()["Global"]
    matrices = (torch.ops.aten.mm, torch.ops.aten.addmm)
    return sum(count for function, count in found.items() if function in matrices)


@pytest.mark.parametrize(
    "case",
    [gpt2, lambda: gpt2(tied=False), bert, masked, t5],
    ids=["gpt2", "gpt2 untied", "bert", "masked bert", "t5"],
)
def test_the_meter_counts_what_torch_counts(case: Callable[[], Any]) -> None:
    """Of a pass with gradients; an evaluation does not count, and nothing counts twice."""
    model, run, pairs = case()
    meter = FlopsMeter(model)
    with torch.no_grad():
        run(model)
    assert meter.take() == 0
    counted = products(lambda: run(model))
    attention = 12 * ROWS * pairs * SIZES["num_heads"] * SIZES["dim_head"]
    assert meter.take() - attention == counted
    assert meter.take() == 0


def test_frozen_weights_cost_two_thirds() -> None:
    model, run, pairs = gpt2()
    meter = FlopsMeter(model)
    run(model)
    whole = meter.take()
    for weight in model.parameters():
        weight.requires_grad_(False)
    run(model)
    attention = 12 * ROWS * pairs * SIZES["num_heads"] * SIZES["dim_head"]
    assert meter.take() - attention == pytest.approx((whole - attention) * 2 / 3)


def test_both_ways_to_count_agree() -> None:
    """The meter, and what a program says beforehand of full rows."""
    model, run, _ = gpt2()
    meter = FlopsMeter(model)
    run(model)
    assert isinstance(model, GPT2)
    assert meter.take() == flops_per_token(model, LENGTH) * IDS.numel()


def test_attention_within_a_window_is_not_known() -> None:
    config = LongformerConfig(**SIZES, num_layers=1, attention_window=4)
    model = Longformer(config)
    meter = FlopsMeter(model)
    model(IDS)
    assert meter.take() == 0
