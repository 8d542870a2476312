"""Layers of every model family compile as one graph, forward and backward, and have the values and
gradients of plain ones.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.models import parity
from tests.ranks import models, test_model_center
from tests.ranks.runner import run_ranks
from tests.ranks.test_compile import lowering
from tests.ranks.test_model_center import LENGTH, SIZES, SQUARE

import bmtrain as bmt
from model_center.dataset.packing import segment_mask
from model_center.model.base import BaseModel
from model_center.model.causal import CausalModel
from model_center.model.cpm1 import CPM1, CPM1Config
from model_center.model.cpm2 import CPM2, CPM2Config
from model_center.model.longformer import Longformer
from model_center.model.mistral import Mistral, MistralConfig
from model_center.model.opt import OPT, OPTConfig
from model_center.model.qwen2 import Qwen2, Qwen2Config
from model_center.model.qwen3 import Qwen3, Qwen3Config
from model_center.model.roberta import Roberta, RobertaConfig

GROUPED: dict[str, Any] = SIZES | {"num_layers": 2, "num_heads_kv": 1}
BUCKETS: dict[str, Any] = {"position_bias_num_buckets": 8}
FAMILIES: dict[str, tuple[type[BaseModel], Any]] = {
    **{
        name: (kind, test_model_center.CONFIGS[name])
        for name, kind in test_model_center.CLASSES.items()
    },
    "roberta": (Roberta, RobertaConfig(**SQUARE, num_layers=2, position_size=11)),
    "opt": (OPT, OPTConfig(**SQUARE, num_layers=2, position_size=11, dropout_p=0.0)),
    "mistral": (Mistral, MistralConfig(**GROUPED)),
    "qwen2": (Qwen2, Qwen2Config(**GROUPED)),
    "qwen3": (Qwen3, Qwen3Config(**GROUPED)),
    "cpm1": (CPM1, CPM1Config(**SIZES, **BUCKETS, num_layers=2)),
    "cpm2": (CPM2, CPM2Config(**SIZES, **BUCKETS, num_encoder_layers=2, num_decoder_layers=2)),
}
MASKS = ("attention_mask", "global_attention_mask")


def inputs(name: str, masked: bool) -> dict[str, torch.Tensor]:
    """A batch with padding, global tokens and context, or without."""
    if name not in ("cpm1", "cpm2"):
        given = test_model_center.batch(name, 0)
        return {key: value for key, value in given.items() if masked or key not in MASKS}
    given = test_model_center.batch("bert", 0)
    ids, every = given["input_ids"], torch.ones_like(given["attention_mask"])
    length = (given["attention_mask"] if masked else every).sum(1)
    if name == "cpm2":
        return {
            "input_ids": ids,
            "length": length,
            "decoder_input_ids": ids.flip(1),
            "decoder_length": every.sum(1),
        }
    return {"input_ids": ids, "length": length, "context": (ids % 2 == 0) & masked}


def answer(model: BaseModel, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """Logits of all tokens, or of images, after a backward pass."""
    model.zero_grad()
    asked = {"return_logits": True} if isinstance(model, Longformer) else {}
    out = model(**given, **asked)
    logits: torch.Tensor = out if isinstance(out, torch.Tensor) else out.logits
    logits.sin().mean().backward()
    return logits.detach()


def compare(name: str) -> None:
    """Plain layers; recomputed ones; and ones with masks, in a program that has a default
    device.
    """
    kind, config = FAMILIES[name]
    plain = parity.randomized(kind(config), 0.15).train()
    state, cases = plain.state_dict(), [(False, True), (True, False)]
    want = [
        (answer(plain, inputs(name, masked)), models.plain_gradients(plain)) for masked, _ in cases
    ]
    own, kinds = lowering(traces=True), 2 if name in ("t5", "cpm2") else 1
    bmt.init_distributed(device="cpu", compile=True)
    for number, ((masked, recompute), (logits, gradients)) in enumerate(
        zip(cases, want, strict=True), 1
    ):
        if masked:
            torch.set_default_device("cpu")
        config.use_checkpoint = recompute
        model = kind(config).train()
        model.load_state_dict(state)
        what = f"{name}, masked={masked}, recompute={recompute}"
        models.assert_same(answer(model, inputs(name, masked)), logits, what)
        models.assert_same_dicts(models.full_gradients(model), gradients, what)
        assert own.num_graphs == number * kinds, (
            f"{what}: {own.num_graphs} graphs so far for {kinds} kinds of layers"
        )


def packed(given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The batch with two samples in each row, which do not see each other."""
    segments = (torch.arange(given["input_ids"].shape[1]) > 1).long()
    return given | {"attention_mask": segment_mask(segments.expand(given["input_ids"].shape))}


def train_on_lengths(name: str) -> None:
    """Batches of falling lengths, plain masks and packed rows: programs of one length, and of any.

    A program for each length would end at the compiler's limit, and the layer uncompiled.
    """
    kind, config = FAMILIES[name]
    plain = parity.randomized(kind(config), 0.15).train()
    state = plain.state_dict()
    bmt.init_distributed(device="cpu", compile=True)
    for masked in (False, True, "packed")[: 3 if issubclass(kind, CausalModel) else 2]:
        own = lowering(traces=True)
        model = kind(config).train()
        model.load_state_dict(state)
        whole, known = inputs(name, bool(masked)), 0
        for length in range(LENGTH, LENGTH - 6, -1):
            given = {key: value[:, :length] for key, value in whole.items()}
            given = packed(given) if masked == "packed" else given
            models.assert_same(answer(model, given), answer(plain, given), f"{name}, {length}")
            known = own.num_graphs if length == LENGTH - 2 else known
        assert own.num_graphs == known, (
            f"{name}, masked={masked}: {own.num_graphs} graphs, {known} of them for three lengths"
        )


# OPT's layers are those of GPT-2, Llama's are Mistral's without a window, for the compiler
@pytest.mark.parametrize("name", ["gpt2", "gptj", "mistral", "qwen3", "bert", "t5"])
def test_lengths_share_a_program(name: str) -> None:
    run_ranks(train_on_lengths, 1, name, join=False, timeout=200)


@pytest.mark.parametrize("name", FAMILIES)
def test_layers_compile(name: str) -> None:
    """A layer that did not would say so, and warnings are errors on the ranks."""
    run_ranks(compare, 1, name, join=False, timeout=120)
