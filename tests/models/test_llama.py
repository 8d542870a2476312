"""LLaMA 1, 2 and 3 against transformers: grouped heads, tied heads, biases, and every scaling of
rotary positions.
"""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
from tests.models import causal, parity
from tests.models.versions import rope
from transformers import LlamaConfig as TheirConfig
from transformers import LlamaForCausalLM

from model_center.errors import ConfigError
from model_center.model.llama import Llama, LlamaConfig

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "max_position_embeddings": 8,
}
FAMILY = causal.Family(Llama, LlamaForCausalLM, TheirConfig, SIZES)
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "dim_model": 32,
    "num_heads": 4,
    "dim_head": 8,
    "dim_ff": 48,
    "num_layers": 2,
}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
VARIANTS = {
    "1": FAMILY,
    "2, grouped": FAMILY.variant(num_key_value_heads=2, rms_norm_eps=0.1),
    "one head of keys": FAMILY.variant(num_key_value_heads=1, head_dim=10, hidden_act="gelu"),
    "3, tied": FAMILY.variant(num_key_value_heads=2, **rope(**LLAMA3), tie_word_embeddings=True),
    "linear": FAMILY.variant(**rope(rope_type="linear", factor=4.0, rope_theta=10000.0)),
    "biases": FAMILY.variant(attention_bias=True, mlp_bias=True),
}


@pytest.mark.parametrize("side", causal.SIDES)
@pytest.mark.parametrize("family", VARIANTS.values(), ids=VARIANTS)
def test_values_and_gradients(family: causal.Family, side: str, tmp_path: pathlib.Path) -> None:
    causal.check_values_and_gradients(family, tmp_path, side)


@pytest.mark.parametrize("family", VARIANTS.values(), ids=VARIANTS)
def test_saved(family: causal.Family, tmp_path: pathlib.Path) -> None:
    causal.check_saved(family, tmp_path)


@pytest.mark.parametrize("name", ["1", "2, grouped", "3, tied"])
def test_cache(name: str, tmp_path: pathlib.Path) -> None:
    causal.check_cache(VARIANTS[name], tmp_path)


def test_masks(tmp_path: pathlib.Path) -> None:
    causal.check_masks(VARIANTS["2, grouped"], tmp_path)


def test_surface(tmp_path: pathlib.Path) -> None:
    causal.check_surface(VARIANTS["2, grouped"], tmp_path)


def test_class_head(tmp_path: pathlib.Path) -> None:
    causal.check_class_head(FAMILY, tmp_path)


def test_errors(tmp_path: pathlib.Path) -> None:
    causal.check_errors(FAMILY, tmp_path)
    with pytest.raises(ConfigError, match="num_heads_kv is 3"):
        Llama(LlamaConfig(**SMALL, num_heads_kv=3))
    with pytest.raises(ConfigError, match="proj_bias is True"):
        LlamaConfig(**SMALL, proj_bias=True).to_hugging_face()
    assert LlamaConfig().num_heads_kv == LlamaConfig().num_heads == 32
    assert LlamaConfig(num_heads_kv=8).num_heads_kv == 8
    with pytest.raises(ConfigError, match="partial_rotary_factor"):
        LlamaConfig.from_dict(
            {**TheirConfig(**SIZES).to_dict(), "rope_parameters": {"partial_rotary_factor": 0.5}}
        )
    with pytest.raises(ConfigError, match="'yarn' is not supported"):
        Llama(LlamaConfig(**SMALL, rope_scaling={"rope_type": "yarn", "factor": 2.0}))
    with pytest.raises(ConfigError, match="lacks low_freq_factor"):
        Llama(
            LlamaConfig(
                **SMALL,
                rope_scaling={
                    name: value for name, value in LLAMA3.items() if name != "low_freq_factor"
                },
            )
        )


def test_positions(tmp_path: pathlib.Path) -> None:
    ours, model = FAMILY.pair(tmp_path)
    ids, positions = parity.token_ids(2, 9), parity.token_ids(2, 9, low=0, high=30, seed=5)
    inputs = {"input_ids": ids, "position_ids": positions}
    parity.assert_same_logits(ours, model, inputs, parity.valid_of(None, ids))
    with torch.no_grad():
        past = ours(
            input_ids=ids[:, :4], position_ids=positions[:, :4], use_cache=True
        ).past_key_values
        rest = ours(input_ids=ids[:, 4:], position_ids=positions, past_key_values=past)
        parity.assert_close(
            rest.logits, ours(**inputs).logits[:, 4:], "positions of all tokens, with a cache"
        )


def test_keys_are_cached_once_per_group(tmp_path: pathlib.Path) -> None:
    ours, _ = VARIANTS["2, grouped"].pair(tmp_path)
    past = ours(input_ids=parity.token_ids(3, 5), use_cache=True).past_key_values
    assert past[0][0].shape == (3, 2, 5, 8)


def test_configurations_of_earlier_versions() -> None:
    """Those of transformers 4 state base and scaling apart; the first of LLaMA have no heads of
    keys.
    """
    old: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 123.0,
        "rope_scaling": {"type": "linear", "factor": 2.0},
    }
    config = LlamaConfig.from_dict(old)
    assert (config.num_heads_kv, config.dim_head, config.rope_base) == (4, 8, 123.0)
    assert config.rope_scaling == {"type": "linear", "factor": 2.0}
    assert LlamaConfig.from_dict({**old, "rope_scaling": None}).rope_scaling is None


def test_configurations_of_model_center() -> None:
    """Its converter writes sizes only."""
    config = LlamaConfig.from_dict(
        {
            "dim_model": 32,
            "dim_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
            "num_heads_kv": 2,
            "dim_head": 8,
            "norm_eps": 1e-5,
        }
    )
    model = Llama(config)
    assert model.get_parameter(
        "encoder.layers.0.self_att.self_attention.project_k.weight"
    ).shape == (16, 32)
    assert model.config.dtype == torch.float16


def test_fresh() -> None:
    causal.check_fresh(Llama, LlamaConfig(**SMALL, half=False))
