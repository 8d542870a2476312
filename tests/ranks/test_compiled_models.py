"""Layers of every model family compile as one graph, forward and backward, and have the values and
gradients of plain ones.
"""

from typing import Any

import pytest
import torch
from tests.models import parity
from tests.ranks import models, test_model_center
from tests.ranks.runner import run_ranks
from tests.ranks.test_compile import lowering
from tests.ranks.test_model_center import LENGTH, SIZES
from torch import Tensor

import bmtrain as bmt
from model_center.dataset.packing import segment_mask
from model_center.model.base import BaseModel
from model_center.model.causal import CausalModel
from model_center.model.longformer import Longformer
from model_center.model.mistral import Mistral, MistralConfig
from model_center.model.qwen3 import Qwen3, Qwen3Config

GROUPED: dict[str, Any] = SIZES | {"num_layers": 2, "num_heads_kv": 1}
FAMILIES: dict[str, tuple[type[BaseModel], Any]] = {
    **{
        name: (kind, test_model_center.CONFIGS[name])
        for name, kind in test_model_center.CLASSES.items()
    },
    "mistral": (Mistral, MistralConfig(**GROUPED)),
    "qwen3": (Qwen3, Qwen3Config(**GROUPED)),
}
MASKS = ("attention_mask", "global_attention_mask")


def inputs(name, masked):
    """A batch with padding and global tokens, or without."""
    given = test_model_center.batch(name, 0)
    return {key: value for key, value in given.items() if masked or key not in MASKS}


def answer(model, given):
    """Logits of all tokens, or of images, after a backward pass."""
    model.zero_grad()
    asked = {"return_logits": True} if isinstance(model, Longformer) else {}
    out = model(**given, **asked)
    logits = out if isinstance(out, Tensor) else out.logits
    logits.sin().mean().backward()
    return logits.detach()


def compare(name):
    """Plain layers; recomputed ones; and ones with masks, in a program that has a default
    device.
    """
    kind, config = FAMILIES[name]
    plain = parity.randomized(kind(config), 0.15).train()
    state, cases = plain.state_dict(), [(False, True), (True, False)]
    want = [
        (answer(plain, inputs(name, masked)), models.plain_gradients(plain)) for masked, _ in cases
    ]
    own, kinds = lowering(traces=True), 2 if name == "t5" else 1
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


def packed(given):
    """The batch with two samples in each row, which do not see each other."""
    segments = (torch.arange(given["input_ids"].shape[1]) > 1).long()
    return given | {"attention_mask": segment_mask(segments.expand(given["input_ids"].shape))}


def train_on_lengths(name):
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
@pytest.mark.compiler
@pytest.mark.long
@pytest.mark.parametrize("name", ["gpt2", "gptj", "mistral", "qwen3", "bert", "t5"])
def test_lengths_share_a_program(name):
    run_ranks(train_on_lengths, 1, name, join=False, timeout=200)


@pytest.mark.compiler
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "gpt2" else pytest.mark.long) for name in FAMILIES],
)
def test_layers_compile(name):
    """A layer that did not would say so, and warnings are errors on the ranks."""
    run_ranks(compare, 1, name, join=False, timeout=120)
