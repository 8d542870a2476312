"""Longformer against transformers' LongformerForMaskedLM and LongformerModel."""

from __future__ import annotations

import copy
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from tests.models import parity
from torch.utils._python_dispatch import TorchDispatchMode

from model_center.errors import ConfigError, InputError
from model_center.model.longformer import Longformer, LongformerConfig

PAD, WINDOW, LENGTH = 1, 6, 19  # no multiple of the window
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "max_position_embeddings": 40,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-5,
    "pad_token_id": PAD,
    "attention_window": WINDOW,
}
SIDES = ("none", "left", "right")
KINDS = ("windows", "global")
OURS: dict[str, Any] = {
    "vocab_size": 64,
    "dim_model": 32,
    "num_heads": 4,
    "dim_head": 8,
    "dim_ff": 48,
    "num_layers": 1,
    "half": False,
}


def inputs_of(side: str, kind: str, length: int = LENGTH) -> tuple[dict[str, Any], torch.Tensor]:
    """Inputs of two sequences, the first padded on this side, with different numbers of global
    tokens, or none.
    """
    ids, mask = parity.token_ids(2, length), parity.padding_mask(2, length, side, 5)
    valid = parity.valid_of(mask, ids)
    inputs = {
        "input_ids": ids.masked_fill(~valid, PAD),
        "attention_mask": mask,
        "token_type_ids": ids % 2,
    }
    if kind == "global":
        chosen = torch.zeros_like(ids)
        chosen[0, [0, 7]] = 1  # with padding on the left the first of them is padding, and so none
        chosen[1, [2, 3, length - 1]] = 1
        inputs["global_attention_mask"] = chosen
    return inputs, valid


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Longformer, Any]:
    model = parity.theirs(
        transformers.LongformerForMaskedLM, transformers.LongformerConfig(**SIZES)
    )
    with pytest.warns(UserWarning, match=r"pooler.dense.weight.*newly initialised"):
        return parity.loaded(Longformer, model, tmp_path_factory.mktemp("longformer")), model


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", SIDES)
def test_scores(pair: tuple[Longformer, Any], side: str, kind: str) -> None:
    for length in (LENGTH, 8, 3 * WINDOW):
        inputs, valid = inputs_of(side, kind, length)
        parity.assert_same_logits(*pair, inputs, torch.ones_like(valid))  # of padding, too


def test_a_text_shorter_than_the_window(pair: tuple[Longformer, Any]) -> None:
    for length in (1, 2, 4):
        parity.assert_same_logits(*pair, *inputs_of("none", "windows", length))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", SIDES)
def test_gradients_of_every_parameter(
    pair: tuple[Longformer, Any], side: str, kind: str, tmp_path: pathlib.Path
) -> None:
    """Those of the projections for global tokens too, which are not 0 where there are some."""
    ours, _ = pair
    parity.assert_same_gradients(*pair, *inputs_of(side, kind), tmp_path)
    for part in ("project_q_global", "project_k_global", "project_v_global"):
        grad = ours.get_parameter(f"encoder.layers.0.self_att.self_attention.{part}.weight").grad
        assert bool(grad is not None and grad.any()) == (kind == "global")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", SIDES)
def test_hidden_states_and_attentions(pair: tuple[Longformer, Any], side: str, kind: str) -> None:
    """Attentions are over all pairs of tokens; theirs are put into that form."""
    ours, model = pair
    inputs, valid = inputs_of(side, kind)
    wanted = {"output_hidden_states": True, "output_attentions": True}
    with torch.no_grad():
        plain, found = (
            ours(**inputs, return_logits=True),
            ours(**inputs, **wanted, output_logits=True),
        )
        expected = model(**inputs, **wanted)
    parity.assert_close(found.logits[valid], plain[valid])
    for one, other in zip(found.hidden_states, expected.hidden_states, strict=True):
        parity.assert_close(one[valid], other[valid])
    for layer, probabilities in enumerate(found.attentions):
        of_global = (
            None if expected.global_attentions is None else expected.global_attentions[layer]
        )
        dense = all_pairs(expected.attentions[layer], of_global, inputs, valid)
        parity.assert_close(probabilities.transpose(1, 2)[valid], dense.transpose(1, 2)[valid])


def all_pairs(
    local: torch.Tensor, of_global: torch.Tensor | None, inputs: dict[str, Any], valid: torch.Tensor
) -> torch.Tensor:
    """Probabilities (batch, heads, seq, seq) from those of the global keys and the window, and from
    those of global queries.
    """
    batch, heads, length = local.shape[0], local.shape[1], LENGTH
    dense = torch.zeros(batch, heads, length, length)
    chosen = (
        inputs.get("global_attention_mask", torch.zeros_like(inputs["input_ids"])).bool() & valid
    )
    most = int(chosen.sum(1).max())
    for row in range(batch):
        places = chosen[row].nonzero()[:, 0].tolist()
        for query in range(length):
            for number, place in enumerate(places):
                dense[row, :, query, place] += local[row, :, query, number]
            for offset in range(-WINDOW // 2, WINDOW // 2 + 1):
                if 0 <= query + offset < length:
                    dense[row, :, query, query + offset] += local[
                        row, :, query, most + offset + WINDOW // 2
                    ]
        for number, place in enumerate(places):
            assert of_global is not None
            dense[row, :, place] = of_global[row, :, :length, number]
    return dense


def test_without_masks_and_types(pair: tuple[Longformer, Any]) -> None:
    """What is left out is all valid, no global token, type 0, whatever the length."""
    everything = torch.ones(2, LENGTH, dtype=torch.bool)
    ids = parity.token_ids(2, LENGTH)
    parity.assert_same_logits(*pair, {"input_ids": ids}, everything)
    chosen = torch.zeros_like(ids)
    chosen[:, 0] = 1
    parity.assert_same_logits(
        *pair, {"input_ids": ids, "global_attention_mask": chosen}, everything
    )
    embeds = torch.randn(2, LENGTH, 32, generator=torch.Generator().manual_seed(3))
    parity.assert_same_logits(*pair, {"inputs_embeds": embeds}, everything)
    positions = torch.arange(LENGTH).flip(0)[None]
    parity.assert_same_logits(*pair, {"input_ids": ids, "position_ids": positions}, everything)


def test_length(pair: tuple[Longformer, Any]) -> None:
    ours, _ = pair
    ids, length = parity.token_ids(2, LENGTH), torch.tensor([11, LENGTH])
    mask = torch.arange(LENGTH) < length[:, None]
    with torch.no_grad():
        found, expected = ours(ids, length), ours(ids, attention_mask=mask)
        found, expected = found.last_hidden_state, expected.last_hidden_state
    parity.assert_close(found[mask], expected[mask])
    assert found.shape == (2, LENGTH, 32)


def test_the_model_without_head(tmp_path: pathlib.Path) -> None:
    """LongformerModel: no prefix in its files; last hidden state and pooler."""
    model = parity.theirs(transformers.LongformerModel, transformers.LongformerConfig(**SIZES))
    with pytest.warns(UserWarning, match=r"lm_head.*newly initialised"):
        ours = parity.loaded(Longformer, model, tmp_path)
    inputs, valid = inputs_of("right", "global")
    with torch.no_grad():
        out, expected = ours(**inputs), model(**inputs)
    parity.assert_close(out.last_hidden_state[valid], expected.last_hidden_state[:, :LENGTH][valid])
    parity.assert_close(out.pooler_output, expected.pooler_output)
    assert list(out) == ["last_hidden_state", "pooler_output"]
    last, pooled, past, logits, *others = ours(**inputs, return_dict=False)
    assert last.shape == (2, LENGTH, 32)
    assert pooled.shape == (2, 32)
    assert past is None
    assert [logits, *others] == [None] * 3


def test_saved_for_transformers_and_for_us(
    pair: tuple[Longformer, Any], tmp_path: pathlib.Path
) -> None:
    ours, model = pair
    parity.assert_saved_alike(ours, model, *inputs_of("right", "global"), tmp_path)
    ours.save_pretrained(tmp_path / "own", format="model_center")
    again = Longformer.from_pretrained(tmp_path / "own", dtype="float32")
    parity.assert_same_parameters(again, ours)
    assert again.config == ours.config


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(pair: tuple[Longformer, Any], dtype: torch.dtype) -> None:
    parity.assert_trains_in(dtype, pair[0], *inputs_of("left", "global"))


class Largest(TorchDispatchMode):
    """Remembers the shape with most elements of all tensors that operations make."""

    def __init__(self) -> None:
        super().__init__()
        self.shape = torch.Size()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for made in out if isinstance(out, (tuple, list)) else (out,):
            if (
                isinstance(made, torch.Tensor)
                and made.untyped_storage().nbytes() > 0
                and made.numel() > self.shape.numel()
            ):
                self.shape = made.shape
        return out


def test_memory_grows_with_the_length_not_its_square() -> None:
    """Forward and backward with global tokens: twice the tokens, twice the largest tensor."""
    torch.manual_seed(0)
    model = Longformer(
        LongformerConfig(**{**OURS, "dropout_p": 0.0}, attention_window=8, position_size=2060)
    )
    largest = []
    for length in (1024, 2048):
        ids = parity.token_ids(1, length)
        chosen = torch.zeros_like(ids)
        chosen[:, :2] = 1
        with Largest() as watch:
            model(ids, global_attention_mask=chosen).last_hidden_state.sum().backward()
        largest.append(watch.shape.numel())
    assert largest[1] == 2 * largest[0]
    assert largest[1] < 2048 * 2048 / 4


def test_classification_head_dropout_and_deep_copy(pair: tuple[Longformer, Any]) -> None:
    ids = parity.token_ids(2, 5)
    model = Longformer(LongformerConfig(**OURS, cls_head=3, attention_window=4))

    def scores(model: Longformer) -> torch.Tensor:
        return model(ids, return_logits=True)

    assert scores(model).shape == (2, 5, 3)
    assert not torch.equal(scores(model), scores(model))
    other = copy.deepcopy(model.eval())
    assert torch.equal(scores(other), scores(model))


def test_bad_arguments(pair: tuple[Longformer, Any], tmp_path: pathlib.Path) -> None:
    ours, _ = pair
    ids = parity.token_ids(1, 12)
    with pytest.raises(InputError, match=r"sequence has 39 tokens.*38 at most"):
        ours(parity.token_ids(1, 39))
    with pytest.raises(InputError, match=r"global_attention_mask has shape"):
        ours(ids, global_attention_mask=torch.ones(1, 11))
    with pytest.raises(InputError, match=r"attention_mask has shape \(1, 12, 12\)"):
        ours(ids, attention_mask=torch.ones(1, 12, 12))
    for more in ("output_attentions", "output_hidden_states"):
        with pytest.raises(InputError, match=r"return_logits.*output_logits=True"):
            ours(ids, return_logits=True, **{more: True})
    with pytest.raises(ConfigError, match=r"attention_window is 5"):
        Longformer(LongformerConfig(**OURS, attention_window=5))
    with pytest.raises(ConfigError, match=r"attention_window is \[4, 6\]"):
        LongformerConfig.from_dict(
            transformers.LongformerConfig(**{**SIZES, "attention_window": [4, 6]}).to_dict()
        )
    with pytest.raises(ConfigError, match=r"'window'"):
        LongformerConfig.from_dict({"window": 4})


def test_published_defaults() -> None:
    with torch.device("meta"):
        model = Longformer(LongformerConfig())
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
    attention = "encoder.layers.11.self_att.self_attention."
    for name in ("project_q", "project_k_global", "project_v_global", "attention_out"):
        assert shapes[f"{attention}{name}.weight"] == (768, 768)
        assert shapes[f"{attention}{name}.bias"] == (768,)
    assert (model.config.attention_window, model.config.dropout_p, model.config.pad_token_id) == (
        512,
        0.1,
        1,
    )
