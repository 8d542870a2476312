"""GPT-2 against transformers."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
from tests.models import causal, parity
from transformers import GPT2Config as TheirConfig
from transformers import GPT2LMHeadModel

from model_center.errors import ConfigError, InputError
from model_center.model.gpt2 import GPT2, GPT2Config

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "n_embd": 32,
    "n_head": 4,
    "n_layer": 2,
    "n_positions": 16,
}
FAMILY = causal.Family(GPT2, GPT2LMHeadModel, TheirConfig, SIZES)
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "dim_model": 32,
    "num_heads": 4,
    "dim_head": 8,
    "dim_ff": 48,
    "num_layers": 2,
    "position_size": 16,
}
VARIANTS = {
    "usual": FAMILY,
    "untied": FAMILY.variant(tie_word_embeddings=False, n_inner=40),
    "unscaled, erf": FAMILY.variant(
        scale_attn_weights=False, activation_function="gelu", layer_norm_epsilon=0.1
    ),
}


@pytest.mark.parametrize("side", causal.SIDES)
@pytest.mark.parametrize("family", VARIANTS.values(), ids=VARIANTS)
def test_values_and_gradients(family: causal.Family, side: str, tmp_path: pathlib.Path) -> None:
    causal.check_values_and_gradients(family, tmp_path, side)


@pytest.mark.parametrize("family", VARIANTS.values(), ids=VARIANTS)
def test_saved(family: causal.Family, tmp_path: pathlib.Path) -> None:
    causal.check_saved(family, tmp_path)


def test_cache(tmp_path: pathlib.Path) -> None:
    causal.check_cache(FAMILY, tmp_path)


def test_masks(tmp_path: pathlib.Path) -> None:
    causal.check_masks(FAMILY, tmp_path)


def test_surface(tmp_path: pathlib.Path) -> None:
    causal.check_surface(FAMILY, tmp_path)


def test_class_head(tmp_path: pathlib.Path) -> None:
    causal.check_class_head(FAMILY, tmp_path)


def test_errors(tmp_path: pathlib.Path) -> None:
    causal.check_errors(FAMILY, tmp_path)
    ours, _ = FAMILY.pair(tmp_path)
    with pytest.raises(InputError, match="17 tokens: the model's table of positions has 16"):
        ours(input_ids=parity.token_ids(1, 17))
    past = ours(input_ids=parity.token_ids(1, 16), use_cache=True).past_key_values
    with pytest.raises(InputError, match="17 tokens"):
        ours(input_ids=parity.token_ids(1, 1), past_key_values=past)
    with pytest.raises(ConfigError, match="inverse_layer_idx"):
        GPT2Config.from_dict(
            {**TheirConfig(**SIZES).to_dict(), "scale_attn_by_inverse_layer_idx": True}
        )


def test_positions_and_types(tmp_path: pathlib.Path) -> None:
    """Types are not looked at, as in ModelCenter."""
    ours, model = FAMILY.pair(tmp_path)
    ids, positions, types = (
        parity.token_ids(2, 9),
        parity.token_ids(2, 9, low=0, high=16, seed=5),
        parity.token_ids(2, 9, seed=6),
    )
    inputs = {"input_ids": ids, "position_ids": positions}
    parity.assert_same_logits(ours, model, inputs, parity.valid_of(None, ids))
    with torch.no_grad():
        whole = ours(**inputs).logits
        assert torch.equal(ours(**inputs, token_type_ids=types).logits, whole)
        past = ours(
            **{name: value[:, :4] for name, value in inputs.items()}, use_cache=True
        ).past_key_values
        rest = ours(input_ids=ids[:, 4:], position_ids=positions, past_key_values=past)
        parity.assert_close(rest.logits, whole[:, 4:], "numbers of all tokens, with a cache")


def test_weights_of_the_class_without_head(tmp_path: pathlib.Path) -> None:
    ours, model = FAMILY.pair(tmp_path)
    model.transformer.save_pretrained(tmp_path / "bare")
    parity.assert_same_parameters(GPT2.from_pretrained(tmp_path / "bare", dtype="float32"), ours)


def test_what_hugging_face_cannot_say(tmp_path: pathlib.Path) -> None:
    model = GPT2(GPT2Config(**SMALL, att_bias=False, half=False))
    with pytest.raises(ConfigError, match="att_bias is False, there it is True"):
        model.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path, format="model_center")
    parity.assert_same_parameters(GPT2.from_pretrained(tmp_path), model)


def test_fresh() -> None:
    causal.check_fresh(GPT2, GPT2Config(**SMALL, half=False))
