"""CPM-1 against a plain reference: context, spans, relative positions, and files of ModelCenter."""

from __future__ import annotations

import copy
import pathlib
from typing import Any

import pytest
import torch
from tests.models import cpm, parity
from tests.tensors import grad_of

from model_center.errors import ConfigError, InputError, WeightsError
from model_center.model.cpm1 import CPM1, CPM1Config

DEPTH, LENGTH = 2, 9
SCALED = {"length_scale": True, "attn_scale": True, "tied": True}  # as the large model
MASK = torch.tensor([[1] * 9, [1] * 6 + [0] * 3])
CONTEXT = torch.tensor([[1, 1, 1, 0, 0, 0, 1, 1, 0], [1, 1, 0, 0, 1, 0, 0, 0, 0]])
SPAN = torch.tensor([[0] * 4 + [1] * 5, [2] * 6 + [3] * 3])
POSITIONS = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3], [5, 3, 0, 17, 2, 2, 30, 1, 0]])
CASES: dict[str, dict[str, torch.Tensor]] = {
    "plain": {},
    "length": {"length": MASK.sum(1)},
    "left padding": {"attention_mask": MASK.flip(1)},
    "context": {"context": CONTEXT.bool()},
    "context and length": {"context": CONTEXT, "length": MASK.sum(1)},
    "span": {"span": SPAN},
    "all of it": {
        "context": CONTEXT,
        "span": SPAN,
        "attention_mask": MASK,
        "position_ids": POSITIONS,
    },
}


def made(folder: pathlib.Path, **options: Any) -> tuple[CPM1, dict[str, torch.Tensor]]:
    """The model of a folder that is written by hand, and the weights in it."""
    shapes: cpm.Shapes = {"input_embedding.weight": (cpm.VOCAB, cpm.DIM)}
    for layer in range(DEPTH):
        shapes |= cpm.layer_shapes(f"encoder.layers.{layer}.")
    shapes |= {
        "encoder.output_layernorm.weight": (cpm.DIM,),
        "position_bias.relative_attention_bias": (cpm.BUCKETS, cpm.HEADS),
    }
    if not options.get("tied", False):
        shapes["output_projection.weight"] = (cpm.VOCAB, cpm.DIM)
    # What is divided by its length is drawn so much larger.
    weights = cpm.write_files(
        folder, shapes, {**cpm.SIZES, "num_layers": DEPTH, **options}, 1.0 if options else 0.15
    )
    return CPM1.from_pretrained(folder).eval(), weights


def reference(
    model: CPM1, weights: dict[str, torch.Tensor], ids: torch.Tensor, case: dict[str, torch.Tensor]
) -> torch.Tensor:
    config = model.config
    answer = cpm.Reference(weights, config.length_scale, config.attn_scale)
    length, mask, context, span = (
        case.get(name) for name in ("length", "attention_mask", "context", "span")
    )
    positions = case.get("position_ids", torch.arange(LENGTH).expand(2, -1))

    def seen(row: int, query: int, key: int) -> bool:
        if (length is not None and key >= length[row]) or (mask is not None and not mask[row, key]):
            return False
        if span is not None and span[row, query] != span[row, key]:
            return False
        if context is None:
            return key <= query
        return bool(context[row, key]) or (not context[row, query] and key <= query)

    def bias(row: int, query: int, key: int) -> torch.Tensor:
        distance = int(positions[row, key] - positions[row, query])
        return weights["position_bias.relative_attention_bias"][
            cpm.bucket(distance, both_ways=True)
        ]

    x = answer.rows("input_embedding.weight", ids, scaled=config.length_scale)
    x = answer.stack(x, "encoder", DEPTH, seen, bias)
    return answer.linear(x, "input_embedding" if config.tied else "output_projection")


def valid_of(case: dict[str, torch.Tensor]) -> torch.Tensor:
    if "length" in case:
        return MASK.bool()
    return case.get("attention_mask", torch.ones(2, LENGTH)).bool()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("options", [{}, SCALED], ids=["plain", "scaled"])
def test_values_and_gradients(options: dict[str, Any], name: str, tmp_path: pathlib.Path) -> None:
    model, weights = made(tmp_path, **options)
    ids, case = parity.token_ids(2, LENGTH, high=cpm.VOCAB).int(), CASES[name]
    scores = model(ids, **case).logits
    cpm.assert_same_answers(
        model, weights, scores, reference(model, weights, ids, case), valid_of(case)
    )


def test_arguments_by_position(tmp_path: pathlib.Path) -> None:
    """In the order in which programs for ModelCenter pass them."""
    model, _ = made(tmp_path)
    ids = parity.token_ids(2, LENGTH, high=cpm.VOCAB)
    named = model(
        input_ids=ids, length=MASK.sum(1), position_ids=POSITIONS, context=CONTEXT, span=SPAN
    ).logits
    assert torch.equal(model(ids, MASK.sum(1), None, None, POSITIONS, CONTEXT, SPAN).logits, named)


@pytest.mark.parametrize("name", ["plain", "left padding", "context", "span", "all of it"])
def test_cache(name: str, tmp_path: pathlib.Path) -> None:
    """What generated tokens are preceded by is seen whole: the context is in the first piece."""
    model, _ = made(tmp_path)
    ids, case = parity.token_ids(2, LENGTH, high=cpm.VOCAB), dict(CASES[name])
    if "context" in case:
        case["context"] = case["context"] * (torch.arange(LENGTH) < 5)
    with torch.no_grad():
        whole = model(ids, **case).logits
        past, pieces = None, []
        for start, stop in ((0, 5), (5, 7), (7, 8), (8, 9)):
            so_far = {key: value[:, :stop] for key, value in case.items()}
            out = model(ids[:, start:stop], past_key_values=past, use_cache=True, **so_far)
            past = out.past_key_values
            pieces.append(out.logits)
    parity.assert_close(torch.cat(pieces, 1)[valid_of(case)], whole[valid_of(case)], "with a cache")


def test_masks_of_all_pairs(tmp_path: pathlib.Path) -> None:
    model, _ = made(tmp_path)
    ids = parity.token_ids(2, LENGTH, high=cpm.VOCAB)
    with torch.no_grad():
        pairs = torch.ones(2, LENGTH, LENGTH).tril()
        parity.assert_close(
            model(ids, attention_mask=pairs).logits, model(ids).logits, "causal pairs"
        )


def test_surface(tmp_path: pathlib.Path) -> None:
    model, _ = made(tmp_path / "own")
    ids = parity.token_ids(2, LENGTH, high=cpm.VOCAB)
    parity.assert_same_parameters(copy.deepcopy(model), model)
    model.save_pretrained(tmp_path / "again", format="model_center")
    again = CPM1.from_pretrained(tmp_path / "again")
    parity.assert_same_parameters(again, model)
    assert again.config == model.config
    out = model(ids, output_hidden_states=True, output_attentions=True)
    assert len(out.hidden_states) == DEPTH + 1 and torch.equal(
        out.hidden_states[-1], out.last_hidden_state
    )
    parity.assert_close(
        torch.stack(out.attentions).sum(-1),
        torch.ones(DEPTH, 2, cpm.HEADS, LENGTH),
        "probabilities",
    )
    for dtype in (torch.bfloat16, torch.float16):
        parity.assert_trains_in(
            dtype,
            model,
            {"input_ids": ids, "context": CONTEXT},
            torch.ones(2, LENGTH, dtype=torch.bool),
        )
    embedded = model(inputs_embeds=model.input_embedding(ids)).logits
    parity.assert_close(embedded, model(ids).logits, "embeddings")


def test_all_buckets_learn(tmp_path: pathlib.Path) -> None:
    model, _ = made(tmp_path)
    model(
        parity.token_ids(2, 30, high=cpm.VOCAB), context=torch.ones(2, 30)
    ).logits.square().sum().backward()
    learns = grad_of(model.get_parameter("position_bias.relative_attention_bias")).any(-1).tolist()
    # that row is for keys 0 tokens after the query
    assert learns == [row != cpm.BUCKETS // 2 for row in range(cpm.BUCKETS)]


def test_errors(tmp_path: pathlib.Path) -> None:
    model, weights = made(tmp_path)
    ids = parity.token_ids(2, LENGTH, high=cpm.VOCAB)
    for name in ("position_ids", "context", "span"):
        with pytest.raises(
            InputError, match=f"{name} has shape \\(2, 3\\): expected \\(batch, 9\\)"
        ):
            model(ids, **{name: torch.ones(2, 3)})
    past = model(ids, use_cache=True).past_key_values
    with pytest.raises(
        InputError, match="position_ids has shape \\(2, 1\\): expected \\(batch, 10\\)"
    ):
        model(ids[:, :1], past_key_values=past, position_ids=torch.ones(2, 1))
    with pytest.raises(ConfigError, match="no counterpart in Hugging Face"):
        model.save_pretrained(tmp_path / "out")
    with pytest.raises(ConfigError, match="'position_size'"):
        CPM1Config.from_dict({"position_size": 3})
    torch.save(
        {name: tensor for name, tensor in weights.items() if "layers.1.ffn.ffn.w_out" not in name},
        tmp_path / "pytorch_model.pt",
    )
    with pytest.raises(WeightsError, match=r"layers\.1\.ffn\.ffn\.w_out\.weight"):
        CPM1.from_pretrained(tmp_path)


def test_a_head_for_classes(tmp_path: pathlib.Path) -> None:
    model = CPM1(CPM1Config(**cpm.SIZES, num_layers=DEPTH, cls_head=4))
    assert model(parity.token_ids(2, LENGTH, high=cpm.VOCAB)).logits.shape == (2, LENGTH, 4)
    assert "output_projection.weight" not in model.state_dict()
