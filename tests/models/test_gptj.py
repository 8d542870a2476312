"""GPT-J against transformers: two norms a layer that are alike, interleaved rotary positions on a
part of the channels.
"""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
from tests.models import causal, parity
from transformers import GPTJConfig as TheirConfig
from transformers import GPTJForCausalLM

from model_center.errors import ConfigError, WeightsError
from model_center.model.gptj import GPTj, GPTjConfig

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "n_embd": 32,
    "n_head": 2,
    "n_layer": 2,
    "n_positions": 32,
    "rotary_dim": 8,
}
FAMILY = causal.Family(GPTj, GPTJForCausalLM, TheirConfig, SIZES)
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "dim_model": 32,
    "num_heads": 4,
    "dim_head": 8,
    "dim_ff": 48,
    "num_layers": 2,
    "pos_rotary_dim": 4,
}
NORMS = [
    (
        f"encoder.layers.{layer}.self_att.layernorm_before_attention.{kind}",
        f"encoder.layers.{layer}.ffn.layernorm_before_ffn.{kind}",
    )
    for layer in range(2)
    for kind in ("weight", "bias")
]
VARIANTS = {
    "usual": FAMILY,
    "all channels, erf": FAMILY.variant(
        rotary_dim=16, n_inner=40, activation_function="gelu", layer_norm_epsilon=0.1
    ),
}


@pytest.mark.parametrize("side", causal.SIDES)
@pytest.mark.parametrize("family", VARIANTS.values(), ids=VARIANTS)
def test_values_and_gradients(family: causal.Family, side: str, tmp_path: pathlib.Path) -> None:
    causal.check_values_and_gradients(family, tmp_path, side)


def test_saved(tmp_path: pathlib.Path) -> None:
    causal.check_saved(FAMILY, tmp_path)


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
    with pytest.raises(ConfigError, match="lacks 'rotary_dim'"):
        GPTjConfig.from_dict(
            {
                name: value
                for name, value in TheirConfig(**SIZES).to_dict().items()
                if name != "rotary_dim"
            }
        )
    with pytest.raises(ConfigError, match="expected an even number"):
        GPTj(GPTjConfig(**{**SMALL, "pos_rotary_dim": 3}))
    with pytest.raises(ConfigError, match=r"att_bias is True, there it is False"):
        GPTjConfig(**SMALL, att_bias=True).to_hugging_face()


def test_positions_and_types_are_not_looked_at(tmp_path: pathlib.Path) -> None:
    """As in ModelCenter."""
    ours, _ = FAMILY.pair(tmp_path)
    ids, others = parity.token_ids(2, 9), parity.token_ids(2, 9, low=0, high=30, seed=5)
    with torch.no_grad():
        expected = ours(input_ids=ids)
        for name in ("position_ids", "token_type_ids"):
            assert torch.equal(ours(input_ids=ids, **{name: others}).logits, expected.logits)


def test_a_layer_has_two_norms() -> None:
    """Each with values and gradients of its own, as in ModelCenter's files and optimizers."""
    model = parity.randomized(GPTj(GPTjConfig(**SMALL, half=False)))
    names = [name for name, _ in model.named_parameters()]
    ids = parity.token_ids(2, 9)
    before = model(ids).logits
    for pair in NORMS:
        for name in pair:
            param = model.get_parameter(name)
            assert names.count(name) == 1
            (grad,) = torch.autograd.grad(model(ids).logits.square().sum(), param)
            assert grad.abs().max() > 1e-3, name
            with torch.no_grad():
                kept = param.clone()
                param += 0.5
                assert (model(ids).logits - before).abs().max() > 1e-3, name
                param.copy_(kept)


def test_files_of_model_center_have_both_norms(tmp_path: pathlib.Path) -> None:
    config = GPTjConfig(**SMALL, half=False)
    assert config.ffn_activate_fn == "gelu"
    config.to_json_file(tmp_path / "config.json")
    model = parity.randomized(GPTj(config))
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.save(weights, tmp_path / "pytorch_model.pt")
    parity.assert_same_parameters(GPTj.from_pretrained(tmp_path), model)
    other = NORMS[-1][1]
    left_out = {name: tensor for name, tensor in weights.items() if name != other}
    torch.save(left_out, tmp_path / "pytorch_model.pt")
    with pytest.raises(WeightsError, match=other):
        GPTj.from_pretrained(tmp_path)
    ids = parity.token_ids(1, 9)
    before = model(ids).logits
    weights[other][3] += 0.5
    torch.save(weights, tmp_path / "pytorch_model.pt")
    read = GPTj.from_pretrained(tmp_path)
    assert torch.equal(read.get_parameter(other), weights[other])
    assert not torch.equal(read(ids).logits, before)
    with pytest.raises(WeightsError, match=r"are one tensor, .*ln_1.* but differ: it cannot hold"):
        read.save_pretrained(tmp_path / "hf")
    read.save_pretrained(tmp_path / "own", format="model_center")
    parity.assert_same_parameters(GPTj.from_pretrained(tmp_path / "own"), read)


def test_fresh() -> None:
    causal.check_fresh(GPTj, GPTjConfig(**SMALL, half=False))
