"""CPM-3 against a plain reference: prompts, segments, and what CPM-1 has."""

from __future__ import annotations

import copy
import pathlib
from typing import Any

import pytest
import torch
from tests.models import cpm, parity

from model_center.errors import ConfigError, InputError
from model_center.model.cpm3 import CPM3, CPM3Config

DEPTH, LENGTH, PROMPT, PROMPTS, SEGMENTS = 2, 10, 3, 2, 4
OPTIONS: dict[str, Any] = {
    "num_layers": DEPTH,
    "prompt_types": PROMPTS,
    "prompt_length": PROMPT,
    "segment_types": SEGMENTS,
    "position_bias_num_buckets": cpm.BUCKETS,
    "position_bias_max_distance": cpm.FAR,
}
TYPES = torch.tensor([[0] * 3 + [2] * 3 + [1] * 4, [0] * 3 + [3] * 5 + [2] * 2])
MASK = torch.tensor([[1] * 10, [1] * 7 + [0] * 3])
CONTEXT = torch.tensor([[1, 1, 1, 1, 0, 0, 0, 1, 0, 0], [1, 1, 1, 1, 0, 1, 0, 0, 0, 0]])
SPAN = torch.tensor([[0] * 6 + [1] * 4, [2] * 10])
POSITIONS = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4], [5, 3, 0, 17, 2, 2, 30, 1, 0, 9]])
CASES: dict[str, dict[str, torch.Tensor]] = {
    "plain": {},
    "segments": {"token_type_ids": TYPES},
    "segments and context": {
        "token_type_ids": TYPES,
        "context": CONTEXT.bool(),
        "attention_mask": MASK,
    },
    "all of it": {
        "token_type_ids": TYPES,
        "context": CONTEXT,
        "span": SPAN,
        "attention_mask": MASK,
        "position_ids": POSITIONS,
    },
}
VARIANTS: dict[str, dict[str, Any]] = {
    "usual": {},
    "unscaled, untied": {"length_scale": False, "attn_scale": False, "tied": False},
    "segments alone": {"absolute_inner_segment": False},
}


def made(folder: pathlib.Path, **options: Any) -> tuple[CPM3, dict[str, torch.Tensor]]:
    """The model of a folder that is written by hand, and the weights in it."""
    shapes: cpm.Shapes = {
        "input_embedding.weight": (cpm.VOCAB, cpm.DIM),
        "prompt_embedding.weight": (PROMPTS * PROMPT, cpm.DIM),
    }
    for layer in range(DEPTH):
        shapes |= cpm.layer_shapes(f"encoder.layers.{layer}.")
    shapes["encoder.output_layernorm.weight"] = (cpm.DIM,)
    shapes["position_bias.relative_attention_bias"] = (SEGMENTS**2 + cpm.BUCKETS, cpm.HEADS)
    if not options.get("tied", True):
        shapes["output_projection.weight"] = (cpm.VOCAB, cpm.DIM)
    weights = cpm.write_files(
        folder,
        shapes,
        {**cpm.SIZES, **OPTIONS, **options},
        1.0 if options.get("length_scale", True) else 0.15,
    )
    return CPM3.from_pretrained(folder).eval(), weights


def ids_of() -> torch.Tensor:
    """The second and the first prompt, and texts behind them."""
    ids = parity.token_ids(2, LENGTH, high=cpm.VOCAB)
    ids[:, :PROMPT] = torch.tensor([[3, 4, 5], [0, 1, 2]])
    return ids


def reference(
    model: CPM3, weights: dict[str, torch.Tensor], ids: torch.Tensor, case: dict[str, torch.Tensor]
) -> torch.Tensor:
    config = model.config
    answer = cpm.Reference(weights, config.length_scale, config.attn_scale)
    mask, context, span = (case.get(name) for name in ("attention_mask", "context", "span"))
    positions = case.get("position_ids", torch.arange(LENGTH).expand(2, -1))
    types = case.get("token_type_ids", torch.zeros(2, LENGTH, dtype=torch.long))
    table = weights["position_bias.relative_attention_bias"]

    def seen(row: int, query: int, key: int) -> bool:
        if (mask is not None and not mask[row, key]) or (
            span is not None and span[row, query] != span[row, key]
        ):
            return False
        if context is None:
            return key <= query
        return bool(context[row, key]) or (not context[row, query] and key <= query)

    def bias(row: int, query: int, key: int) -> torch.Tensor:
        one, other = int(types[row, query]), int(types[row, key])
        if one == other and config.absolute_inner_segment:
            return table[
                cpm.bucket(int(positions[row, key] - positions[row, query]), both_ways=True)
            ]
        return table[cpm.BUCKETS + one * SEGMENTS + other]

    prompt = answer.rows("prompt_embedding.weight", ids[:, :PROMPT], scaled=config.length_scale)
    text = answer.rows("input_embedding.weight", ids[:, PROMPT:], scaled=config.length_scale)
    x = answer.stack(torch.cat([prompt, text], 1), "encoder", DEPTH, seen, bias)
    return answer.linear(x, "input_embedding" if config.tied else "output_projection")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_values_and_gradients(options: dict[str, Any], name: str, tmp_path: pathlib.Path) -> None:
    model, weights = made(tmp_path, **options)
    ids, case = ids_of().int(), CASES[name]
    scores = model(ids, **case).logits
    valid = case.get("attention_mask", torch.ones(2, LENGTH)).bool()
    cpm.assert_same_answers(model, weights, scores, reference(model, weights, ids, case), valid)


@pytest.mark.parametrize("name", CASES)
def test_cache(name: str, tmp_path: pathlib.Path) -> None:
    model, _ = made(tmp_path)
    ids, case = ids_of(), dict(CASES[name])
    if "context" in case:
        case["context"] = case["context"] * (torch.arange(LENGTH) < 5)
    valid = case.get("attention_mask", torch.ones(2, LENGTH)).bool()
    with torch.no_grad():
        whole = model(ids, **case).logits
        past, pieces = None, []
        for start, stop in ((0, 5), (5, 7), (7, 8), (8, 9), (9, 10)):
            so_far = {key: value[:, :stop] for key, value in case.items()}
            out = model(ids[:, start:stop], past_key_values=past, use_cache=True, **so_far)
            past = out.past_key_values
            pieces.append(out.logits)
    parity.assert_close(torch.cat(pieces, 1)[valid], whole[valid], "with a cache")


def test_surface(tmp_path: pathlib.Path) -> None:
    model, _ = made(tmp_path / "own")
    parity.assert_same_parameters(copy.deepcopy(model), model)
    model.save_pretrained(tmp_path / "again", format="model_center")
    again = CPM3.from_pretrained(tmp_path / "again")
    parity.assert_same_parameters(again, model)
    assert again.config == model.config
    embeddings = torch.cat(
        [model.prompt_embedding(ids_of()[:, :PROMPT]), model.input_embedding(ids_of()[:, PROMPT:])],
        1,
    )
    parity.assert_close(
        model(inputs_embeds=embeddings).logits, model(ids_of()).logits, "embeddings"
    )
    for dtype in (torch.bfloat16, torch.float16):
        parity.assert_trains_in(
            dtype,
            model,
            {"input_ids": ids_of(), "token_type_ids": TYPES},
            torch.ones(2, LENGTH, dtype=torch.bool),
        )
    classifier = CPM3(CPM3Config(**cpm.SIZES | OPTIONS, cls_head=4))
    assert classifier(ids_of()).logits.shape == (2, LENGTH, 4)


def test_a_configuration_file(tmp_path: pathlib.Path) -> None:
    """The class knows its configuration, with the catalogue's defaults."""
    CPM3Config(**cpm.SIZES | OPTIONS).to_json_file(tmp_path / "config.json")
    model = CPM3.from_json_file(tmp_path / "config.json")
    assert model.config.tied and model.config.length_scale and model.config.attn_scale
    assert model(ids_of()).logits.shape == (2, LENGTH, cpm.VOCAB)


def test_errors(tmp_path: pathlib.Path) -> None:
    model, _ = made(tmp_path)
    with pytest.raises(InputError, match="expected 3 ids of the prompt first"):
        model(ids_of()[:, :2])
    with pytest.raises(InputError, match="6 rows got ids"):
        model(ids_of() + 6)
    with pytest.raises(InputError, match="segments of 4 rows got ids from 0 to 7"):
        model(ids_of(), token_type_ids=TYPES * 7 // 3)
    with pytest.raises(
        InputError, match="token_type_ids has shape \\(2, 4\\): expected \\(batch, 10\\)"
    ):
        model(ids_of(), token_type_ids=TYPES[:, :4])
    with pytest.raises(ConfigError, match=r"max_exact_rate=0\.5"):
        CPM3Config(max_exact_rate=0.5)
