"""Qwen2 and Qwen3 against transformers: biases of queries, keys and values; norms of heads; windows
of all layers or none.
"""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
from tests.models import causal
from transformers import Qwen2Config as Their2Config
from transformers import Qwen2ForCausalLM, Qwen3ForCausalLM
from transformers import Qwen3Config as Their3Config

from model_center.errors import ConfigError
from model_center.model.qwen2 import Qwen2, Qwen2Config
from model_center.model.qwen3 import Qwen3, Qwen3Config

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
}
QWEN2 = causal.Family(Qwen2, Qwen2ForCausalLM, Their2Config, SIZES)
QWEN3 = causal.Family(Qwen3, Qwen3ForCausalLM, Their3Config, {**SIZES, "head_dim": 10})
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "dim_model": 32,
    "num_heads": 4,
    "dim_head": 8,
    "dim_ff": 48,
    "num_layers": 2,
    "num_heads_kv": 2,
}
WINDOW = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
VARIANTS = {
    "2": QWEN2,
    "2, tied, window": QWEN2.variant(tie_word_embeddings=True, **WINDOW),
    "3": QWEN3,
    "3, tied, window, biases": QWEN3.variant(
        tie_word_embeddings=True, attention_bias=True, rms_norm_eps=0.1, **WINDOW
    ),
}
FAMILIES = {"2": QWEN2, "3": QWEN3}


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


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_masks(family: causal.Family, tmp_path: pathlib.Path) -> None:
    causal.check_masks(family, tmp_path)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_surface(family: causal.Family, tmp_path: pathlib.Path) -> None:
    causal.check_surface(family, tmp_path)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_class_head(family: causal.Family, tmp_path: pathlib.Path) -> None:
    causal.check_class_head(family, tmp_path)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_errors(family: causal.Family, tmp_path: pathlib.Path) -> None:
    causal.check_errors(family, tmp_path)
    config_class, content = family.ours._CONFIG_TYPE, family.config(**family.options).to_dict()
    mixed = {
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 1,
        "layer_types": None,
    }
    with pytest.raises(ConfigError, match="several kinds of attention"):
        config_class.from_dict({**content, **mixed})
    with pytest.raises(ConfigError, match="several kinds of attention"):
        config_class.from_dict({**content, "layer_types": ["full_attention", "sliding_attention"]})
    with pytest.raises(ConfigError, match="says that there is no window"):
        config_class.from_dict(
            {**content, "layer_types": ["sliding_attention", "sliding_attention"]}
        )
    with pytest.raises(ConfigError, match="'linear_attention'"):
        config_class.from_dict({**content, "layer_types": ["linear_attention", "linear_attention"]})


def test_windows_of_configurations() -> None:
    """What the files of Qwen2 say: a window that is not used, and none of the layers beyond
    `max_window_layers`.
    """
    content = {**Their2Config(**SIZES).to_dict(), "sliding_window": 4, "layer_types": None}
    assert (
        Qwen2Config.from_dict(
            {**content, "use_sliding_window": False, "max_window_layers": 1}
        ).sliding_window
        is None
    )
    assert (
        Qwen2Config.from_dict(
            {**content, "use_sliding_window": True, "max_window_layers": 28}
        ).sliding_window
        is None
    )
    assert (
        Qwen2Config.from_dict(
            {**content, "use_sliding_window": True, "max_window_layers": 0}
        ).sliding_window
        == 4
    )


def test_what_hugging_face_cannot_say() -> None:
    with pytest.raises(ConfigError, match="att_bias is False"):
        Qwen2Config(**SMALL, att_bias=False).to_hugging_face()
    with pytest.raises(ConfigError, match="ffn_bias is True"):
        Qwen3Config(**SMALL, ffn_bias=True).to_hugging_face()


def test_fresh() -> None:
    causal.check_fresh(Qwen2, Qwen2Config(**SMALL, half=False))
    causal.check_fresh(Qwen3, Qwen3Config(**SMALL, half=False))
