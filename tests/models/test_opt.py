"""OPT against transformers: counted positions, and OPT-350m with norms behind each part and a
narrow embedding.
"""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
from tests.models import causal, parity
from transformers import OPTConfig as TheirConfig
from transformers import OPTForCausalLM

from model_center.errors import ConfigError, InputError
from model_center.model.opt import OPT, OPTConfig

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "ffn_dim": 48,
    "max_position_embeddings": 20,
    "layerdrop": 0.0,
}
FAMILY = causal.Family(OPT, OPTForCausalLM, TheirConfig, SIZES)
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "dim_model": 32,
    "num_heads": 4,
    "dim_head": 8,
    "dim_ff": 48,
    "num_layers": 2,
    "position_size": 20,
}
VARIANTS = {
    "usual": FAMILY,
    "norms behind": FAMILY.variant(do_layer_norm_before=False),
    "as 350m": FAMILY.variant(do_layer_norm_before=False, word_embed_proj_dim=20),
    "without biases or pad": FAMILY.variant(
        enable_bias=False, activation_function="gelu", pad_token_id=None
    ),
}


@pytest.mark.parametrize("side", causal.SIDES)
@pytest.mark.parametrize("family", VARIANTS.values(), ids=VARIANTS)
def test_values_and_gradients(family: causal.Family, side: str, tmp_path: pathlib.Path) -> None:
    causal.check_values_and_gradients(
        family, tmp_path, side, extras=family is not VARIANTS["as 350m"]
    )


def test_the_last_hidden_state_is_as_wide_as_the_others(tmp_path: pathlib.Path) -> None:
    """transformers narrows it already."""
    ours, model = VARIANTS["as 350m"].pair(tmp_path)
    ids = parity.token_ids(2, 9)
    with torch.no_grad():
        found, expected = (
            one(input_ids=ids, output_hidden_states=True).hidden_states for one in (ours, model)
        )
        assert found[-1].shape == (2, 9, 32) and len(found) == len(expected)
        for one, other in zip((*found[:-1], ours.project_out(found[-1])), expected, strict=True):
            parity.assert_close(one, other, "hidden states")


@pytest.mark.parametrize("family", VARIANTS.values(), ids=VARIANTS)
def test_saved(family: causal.Family, tmp_path: pathlib.Path) -> None:
    causal.check_saved(family, tmp_path)


@pytest.mark.parametrize("family", VARIANTS.values(), ids=VARIANTS)
def test_cache(family: causal.Family, tmp_path: pathlib.Path) -> None:
    causal.check_cache(family, tmp_path)


def test_masks(tmp_path: pathlib.Path) -> None:
    causal.check_masks(FAMILY, tmp_path)


@pytest.mark.parametrize("family", VARIANTS.values(), ids=VARIANTS)
def test_surface(family: causal.Family, tmp_path: pathlib.Path) -> None:
    causal.check_surface(family, tmp_path)


@pytest.mark.parametrize("family", VARIANTS.values(), ids=VARIANTS)
def test_class_head(family: causal.Family, tmp_path: pathlib.Path) -> None:
    causal.check_class_head(family, tmp_path)


def test_errors(tmp_path: pathlib.Path) -> None:
    causal.check_errors(FAMILY, tmp_path)
    ours, _ = FAMILY.pair(tmp_path)
    with pytest.raises(InputError, match="21 tokens: the model's table of positions has 20"):
        ours(input_ids=parity.token_ids(1, 21))
    with pytest.raises(ConfigError, match="tie_word_embeddings=False"):
        OPTConfig.from_dict({**TheirConfig(**SIZES).to_dict(), "tie_word_embeddings": False})
    for unknown in ({"layer_norm_elementwise_affine": False}, {"_remove_final_layer_norm": True}):
        with pytest.raises(ConfigError, match="not supported"):
            OPTConfig.from_dict({**TheirConfig(**SIZES).to_dict(), **unknown})
    with pytest.raises(ConfigError, match=r"norm_eps is 0.5, there it is 1e-05"):
        OPTConfig(**SMALL, norm_eps=0.5).to_hugging_face()


def test_positions_are_rows_of_the_table(tmp_path: pathlib.Path) -> None:
    ours, model = FAMILY.pair(tmp_path)
    ids = parity.token_ids(2, 9)
    positions = parity.token_ids(2, 9, low=0, high=20, seed=5)
    with torch.no_grad():
        expected = model(input_ids=ids, position_ids=positions).logits
        parity.assert_close(
            ours(input_ids=ids, position_ids=positions + 2).logits, expected, "given positions"
        )
    assert ours.position_embedding.weight.shape == (22, 32)


def test_padding_has_no_gradient_from_lookups(tmp_path: pathlib.Path) -> None:
    ours, model = FAMILY.pair(tmp_path)
    ids = parity.token_ids(2, 9)
    ids[:, :3] = 1
    for one in (ours, model):
        one(input_ids=ids).logits[..., :0].sum().backward()
        one.zero_grad()
    ours(input_ids=ids, output_logits=False).last_hidden_state.square().sum().backward()
    model.model(input_ids=ids).last_hidden_state.square().sum().backward()
    own, other = ours.input_embedding.weight.grad, model.model.decoder.embed_tokens.weight.grad
    assert not own[1].any() and own[3:60].any()
    parity.assert_close(own, other, "gradient of the embedding", 1e-5 * other.abs().max().item())


def test_fresh() -> None:
    causal.check_fresh(OPT, OPTConfig(**SMALL, half=False))
    assert not OPT(OPTConfig(**SMALL, half=False)).input_embedding.weight[1].any()
    causal.check_fresh(OPT, OPTConfig(**SMALL, half=False, norms_behind=True, dim_embedding=16))
