"""CPM-2 against a plain reference."""

from __future__ import annotations

import copy
import pathlib
from typing import Any

import pytest
import torch
from tests.models import cpm, parity

from model_center.errors import ConfigError, InputError
from model_center.model.cpm2 import CPM2, CPM2Config

DEPTH, SOURCE, TARGET = 2, 8, 6
SCALED = {"length_scale": True, "attn_scale": True, "tied": True}
LENGTH, DECODER_LENGTH = torch.tensor([8, 5]), torch.tensor([4, 6])


def made(folder: pathlib.Path, **options: Any) -> tuple[CPM2, dict[str, torch.Tensor]]:
    """The model of a folder that is written by hand, and the weights in it."""
    shapes: cpm.Shapes = {"input_embedding.weight": (cpm.VOCAB, cpm.DIM)}
    for name, short in (("encoder", "enc"), ("decoder", "dec")):
        for layer in range(DEPTH):
            shapes |= cpm.layer_shapes(f"{name}.layers.{layer}.", cross=name == "decoder")
        shapes[f"{name}.output_layernorm.weight"] = (cpm.DIM,)
        shapes[f"position_bias_{short}.relative_attention_bias"] = (cpm.BUCKETS, cpm.HEADS)
    if not options.get("tied", False):
        shapes["output_projection.weight"] = (cpm.VOCAB, cpm.DIM)
    config = {**cpm.SIZES, "num_encoder_layers": DEPTH, "num_decoder_layers": DEPTH, **options}
    weights = cpm.write_files(folder, shapes, config, 0.8 if options else 0.15)
    return CPM2.from_pretrained(folder).eval(), weights


def reference(
    model: CPM2, weights: dict[str, torch.Tensor], ids: torch.Tensor, decoder_ids: torch.Tensor
) -> torch.Tensor:
    config = model.config
    answer = cpm.Reference(weights, config.length_scale, config.attn_scale)

    def bias(name: str, both_ways: bool) -> cpm.Bias:
        table = weights[f"position_bias_{name}.relative_attention_bias"]
        return lambda _, query, key: table[cpm.bucket(key - query, both_ways=both_ways)]

    x = answer.rows("input_embedding.weight", ids, scaled=False)
    states = answer.stack(
        x, "encoder", DEPTH, lambda row, _, key: key < LENGTH[row], bias("enc", True)
    )
    x = answer.rows("input_embedding.weight", decoder_ids, scaled=False)
    x = answer.stack(
        x,
        "decoder",
        DEPTH,
        lambda _, query, key: key <= query,
        bias("dec", False),
        states,
        lambda row, _, key: key < LENGTH[row],
    )
    # The embedding is not scaled, as a head neither.
    return (
        x @ weights["input_embedding.weight"].T
        if config.tied
        else answer.linear(x, "output_projection")
    )


@pytest.mark.parametrize(
    "options", [{}, SCALED, {"length_scale": True}], ids=["plain", "scaled", "scaled with a head"]
)
def test_values_and_gradients(options: dict[str, Any], tmp_path: pathlib.Path) -> None:
    model, weights = made(tmp_path, **options)
    ids, decoder_ids = (
        parity.token_ids(2, SOURCE, high=cpm.VOCAB).int(),
        parity.token_ids(2, TARGET, high=cpm.VOCAB, seed=5).int(),
    )
    scores = model(ids, LENGTH, decoder_ids, DECODER_LENGTH).logits
    valid = torch.arange(TARGET) < DECODER_LENGTH[:, None]
    cpm.assert_same_answers(
        model, weights, scores, reference(model, weights, ids, decoder_ids), valid
    )


def test_cache(tmp_path: pathlib.Path) -> None:
    model, _ = made(tmp_path)
    ids, decoder_ids = (
        parity.token_ids(2, SOURCE, high=cpm.VOCAB),
        parity.token_ids(2, TARGET, high=cpm.VOCAB, seed=5),
    )
    with torch.no_grad():
        whole = model(ids, LENGTH, decoder_ids).logits
        states = model.encode(ids, length=LENGTH).last_hidden_state
        past, pieces = None, []
        for start, stop in ((0, 3), (3, 5), (5, 6)):
            out = model(
                None,
                LENGTH,
                decoder_ids[:, start:stop],
                encoder_outputs=states,
                past_key_values=past,
                use_cache=True,
            )
            past = out.past_key_values
            pieces.append(out.logits)
    parity.assert_close(torch.cat(pieces, 1), whole, "with a cache")


def test_surface(tmp_path: pathlib.Path) -> None:
    model, _ = made(tmp_path / "own")
    ids = parity.token_ids(2, SOURCE, high=cpm.VOCAB)
    parity.assert_same_parameters(copy.deepcopy(model), model)
    model.save_pretrained(tmp_path / "again", format="model_center")
    again = CPM2.from_pretrained(tmp_path / "again")
    parity.assert_same_parameters(again, model)
    assert again.config == model.config
    inputs = {"input_ids": ids, "length": LENGTH, "decoder_input_ids": ids}
    for dtype in (torch.bfloat16, torch.float16):
        parity.assert_trains_in(dtype, model, inputs, torch.ones(2, SOURCE, dtype=torch.bool))
    classifier = CPM2(
        CPM2Config(**cpm.SIZES, num_encoder_layers=1, num_decoder_layers=1, cls_head=4)
    )
    assert classifier(**inputs).logits.shape == (2, SOURCE, 4)


def test_errors(tmp_path: pathlib.Path) -> None:
    model, _ = made(tmp_path)
    ids = parity.token_ids(2, SOURCE, high=cpm.VOCAB)
    with pytest.raises(InputError, match="decoder_input_ids or decoder_inputs_embeds: got neither"):
        model(ids)
    with pytest.raises(InputError, match="rows got ids"):
        model(ids + 100, None, ids)
    with pytest.raises(ConfigError, match="'scale'"):
        CPM2Config.from_dict({"scale": True})
    with pytest.raises(ConfigError, match="no counterpart in Hugging Face"):
        model.save_pretrained(tmp_path / "out")
