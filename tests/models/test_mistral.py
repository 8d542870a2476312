"""Mistral against transformers: the sliding window."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
from tests.models import causal, parity
from transformers import MistralConfig as TheirConfig
from transformers import MistralForCausalLM

from model_center.errors import ConfigError
from model_center.model.mistral import Mistral, MistralConfig

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
}
FAMILY = causal.Family(Mistral, MistralForCausalLM, TheirConfig, SIZES)
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "dim_model": 32,
    "num_heads": 4,
    "dim_head": 8,
    "dim_ff": 48,
    "num_layers": 2,
    "num_heads_kv": 2,
}
VARIANTS = {
    "without window": FAMILY.variant(sliding_window=None),
    "window of 4": FAMILY.variant(sliding_window=4),
    "window of 1, wide heads": FAMILY.variant(sliding_window=1, head_dim=12),
    "window beyond all": FAMILY.variant(sliding_window=50),
}


@pytest.mark.parametrize("side", causal.SIDES)
@pytest.mark.parametrize("family", VARIANTS.values(), ids=VARIANTS)
def test_values_and_gradients(family: causal.Family, side: str, tmp_path: pathlib.Path) -> None:
    causal.check_values_and_gradients(family, tmp_path, side)


@pytest.mark.parametrize("family", VARIANTS.values(), ids=VARIANTS)
def test_saved(family: causal.Family, tmp_path: pathlib.Path) -> None:
    causal.check_saved(family, tmp_path)


@pytest.mark.parametrize("family", VARIANTS.values(), ids=VARIANTS)
def test_cache(family: causal.Family, tmp_path: pathlib.Path) -> None:
    causal.check_cache(family, tmp_path)


def test_masks(tmp_path: pathlib.Path) -> None:
    causal.check_masks(VARIANTS["without window"], tmp_path)


def test_surface(tmp_path: pathlib.Path) -> None:
    causal.check_surface(VARIANTS["window of 4"], tmp_path)


def test_class_head(tmp_path: pathlib.Path) -> None:
    causal.check_class_head(FAMILY, tmp_path)


def test_errors(tmp_path: pathlib.Path) -> None:
    causal.check_errors(FAMILY, tmp_path)
    with pytest.raises(ConfigError, match="att_bias is True"):
        MistralConfig(**SMALL, att_bias=True).to_hugging_face()
    with pytest.raises(ConfigError, match="sliding_window is 0"):
        MistralConfig(**SMALL, sliding_window=0)


def test_a_token_sees_its_window_only(tmp_path: pathlib.Path) -> None:
    ours, _ = FAMILY.variant(num_hidden_layers=1, sliding_window=3).pair(tmp_path)
    ids = parity.token_ids(1, 12)
    changed = ids.clone()
    changed[0, 4] = 63
    with torch.no_grad():
        differs = (ours(input_ids=ids).logits != ours(input_ids=changed).logits).any(-1)[0]
    assert differs.nonzero().flatten().tolist() == [4, 5, 6]


def test_fresh() -> None:
    causal.check_fresh(Mistral, MistralConfig(**SMALL, half=False))
