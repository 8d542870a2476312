"""What every decoder-only model is tested for, against its counterpart in transformers.

Each takes the pair of models.
"""

from __future__ import annotations

import copy
import dataclasses
import pathlib
from typing import Any

import pytest
import torch
from tests.models import parity
from tests.tensors import grad_of

from model_center.errors import ConfigError, InputError
from model_center.model.base import BaseModel
from model_center.model.causal import CausalModel

LENGTH = 12
SIDES = ("none", "left", "right")


@dataclasses.dataclass(frozen=True)
class Family:
    """Our class, theirs, and a small configuration of theirs."""

    ours: type[CausalModel]
    theirs: Any
    config: Any
    options: dict[str, Any]

    def pair(self, folder: pathlib.Path, **overrides: Any) -> tuple[Any, Any]:
        """Our model of the weights of a random one of theirs, and that one.

        `overrides` are of our configuration.
        """
        model = parity.theirs(self.theirs, self.config(**self.options))
        return parity.loaded(self.ours, model, folder / "theirs", **overrides), model

    def variant(self, **options: Any) -> Family:
        """The family with other options in their configuration."""
        return dataclasses.replace(self, options={**self.options, **options})


def inputs_of(side: str, rows: int = 2) -> tuple[dict[str, Any], torch.Tensor]:
    """Ids and mask with padding on this side, and which tokens are valid."""
    ids, mask = parity.token_ids(rows, LENGTH), parity.padding_mask(rows, LENGTH, side)
    return {
        "input_ids": ids,
        **({} if mask is None else {"attention_mask": mask}),
    }, parity.valid_of(mask, ids)


def check_values_and_gradients(
    family: Family, folder: pathlib.Path, side: str, *, extras: bool = True
) -> None:
    """Logits, hidden states and attentions (`extras`), and the gradient of every parameter."""
    ours, model = family.pair(folder)
    inputs, valid = inputs_of(side)
    parity.assert_same_logits(ours, model, inputs, valid)
    if extras:
        parity.assert_same_extras(ours, model, inputs, valid)
    parity.assert_same_gradients(ours, model, inputs, valid, folder)


def check_cache(family: Family, folder: pathlib.Path) -> None:
    """Piece by piece as in one pass, with and without padding; in their format of pairs too;
    gradients flow through it.
    """
    ours, _ = family.pair(folder)
    ids = parity.token_ids(2, LENGTH)
    for side in SIDES[:2]:
        parity.assert_cache_agrees(ours, ids, 5, parity.padding_mask(2, LENGTH, side))
    whole = ours(input_ids=ids).logits[:, 5:]
    first = ours(input_ids=ids[:, :5], use_cache=True)
    pairs = [(keys, values) for keys, values in first.past_key_values]
    rest = ours(input_ids=ids[:, 5:], past_key_values=pairs)
    assert rest.past_key_values is None
    parity.assert_close(rest.logits, whole, "after a list of pairs")
    found = torch.autograd.grad(rest.logits.square().sum(), ours.input_embedding.weight)[0]
    expected = torch.autograd.grad(whole.square().sum(), ours.input_embedding.weight)[0]
    parity.assert_close(
        found / expected.abs().max(), expected / expected.abs().max(), "gradient through the cache"
    )


def check_masks(family: Family, folder: pathlib.Path) -> None:
    """`length`, masks of other dtypes and of all pairs, positions, embeddings and int32 ids say the
    same as what is usual.
    """
    ours, _ = family.pair(folder)
    inputs, valid = inputs_of("right")
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    with torch.no_grad():
        want = ours(**inputs).logits
        pairs = mask[:, None, :].bool() & torch.ones(LENGTH, LENGTH).tril().bool()
        for name, other in {
            "length": {"input_ids": ids, "length": mask.sum(1)},
            "float mask": {"input_ids": ids, "attention_mask": mask.float()},
            "bool mask": {"input_ids": ids, "attention_mask": mask.bool()},
            "int32 ids": {"input_ids": ids.int(), "attention_mask": mask},
            "embeddings": {"inputs_embeds": ours.input_embedding(ids), "attention_mask": mask},
            "pairs": {"input_ids": ids, "attention_mask": pairs},
        }.items():
            parity.assert_close(ours(**other).logits[valid], want[valid], name)
        first = ours(input_ids=ids[:, :7], use_cache=True, attention_mask=pairs[:, :7, :7])
        rest = ours(
            input_ids=ids[:, 7:], past_key_values=first.past_key_values, attention_mask=pairs
        )
        parity.assert_close(
            rest.logits[valid[:, 7:]],
            want[:, 7:][valid[:, 7:]],
            "pairs of all tokens, with a cache",
        )
        everything = ours(input_ids=ids, attention_mask=torch.ones(2, LENGTH, LENGTH)).logits
    assert not torch.allclose(everything[:, 0], want[:, 0], atol=0.01), (
        "a mask of all pairs is used as it is"
    )


def check_saved(family: Family, folder: pathlib.Path) -> None:
    """Written and read back by transformers and by us; the other format too."""
    ours, model = family.pair(folder)
    inputs, valid = inputs_of("none")
    parity.assert_saved_alike(ours, model, inputs, valid, folder)
    ours.save_pretrained(folder / "own", format="model_center")
    again = family.ours.from_pretrained(folder / "own", dtype="float32")
    parity.assert_same_parameters(again, ours)
    assert again.config == ours.config


def check_surface(family: Family, folder: pathlib.Path) -> None:
    """Outputs in every form, a deep copy, a head for classes, half precision."""
    ours, _ = family.pair(folder)
    inputs, valid = inputs_of("right")
    out = ours(**inputs)
    plain = ours(**inputs, output_logits=False, return_dict=False)
    assert plain[2] is None and len(plain) == 5
    assert torch.equal(plain[0], out.last_hidden_state) and torch.equal(
        out[0], out["last_hidden_state"]
    )
    copied = copy.deepcopy(ours)
    parity.assert_same_parameters(copied, ours)
    with torch.no_grad():
        copied.input_embedding.weight.add_(1)
    assert torch.equal(ours(**inputs).logits, out.logits)
    for dtype in (torch.bfloat16, torch.float16):
        parity.assert_trains_in(dtype, ours, inputs, valid)


def check_class_head(family: Family, folder: pathlib.Path) -> None:
    """A head for classes is new, said to be so, and scores every position."""
    ours, _ = family.pair(folder)
    with pytest.warns(UserWarning) as told:
        classifier = family.ours.from_pretrained(
            folder / "theirs", cls_head=3, dtype="float32"
        ).eval()
    assert any("does not have cls_projection.weight" in str(one.message) for one in told)
    inputs, _ = inputs_of("none")
    out = classifier(**inputs)
    assert out.logits.shape == (2, LENGTH, 3)
    assert torch.equal(out.last_hidden_state, ours(**inputs).last_hidden_state)
    head = dict(classifier.cls_projection.named_parameters())
    parity.assert_close(
        out.logits, torch.nn.functional.linear(out.last_hidden_state, **head), "scores of classes"
    )
    assert classifier.cls_projection.weight.std() > 0.001
    out.logits.square().sum().backward()
    assert (
        grad_of(classifier.cls_projection.weight).any()
        and grad_of(classifier.input_embedding.weight).any()
    )


def check_errors(family: Family, folder: pathlib.Path) -> None:
    """Bad arguments are errors that say what was wrong."""
    ours, _ = family.pair(folder)
    ids = parity.token_ids(2, LENGTH)
    with pytest.raises(InputError, match="neither"):
        ours()
    with pytest.raises(InputError, match="expected \\(batch, seq\\)"):
        ours(input_ids=ids[0])
    with pytest.raises(InputError, match="expected integers"):
        ours(input_ids=ids.float())
    with pytest.raises(InputError, match="rows got ids"):
        ours(input_ids=ids + 1000)
    with pytest.raises(InputError, match="expected 12 keys"):
        ours(input_ids=ids, attention_mask=torch.ones(2, LENGTH - 1))
    with pytest.raises(InputError, match="expected \\(batch, keys\\)"):
        ours(input_ids=ids, attention_mask=torch.ones(LENGTH))
    with pytest.raises(InputError, match="past_key_values has 1 layers"):
        ours(input_ids=ids, past_key_values=[None])
    config_class: Any = family.ours._CONFIG_TYPE
    with pytest.raises(ConfigError, match="'num_layer' \\(nearest: 'num_layers'\\)"):
        config_class.from_dict({"num_layer": 3})
    with pytest.raises(ConfigError, match="model_type is 'umt5'"):
        config_class.from_dict({"model_type": "umt5"})
    with pytest.raises(ConfigError, match=r"of type '\w+' lacks '\w+'"):
        config_class.from_dict({"model_type": config_class.model_type})
    with pytest.raises(ConfigError, match="expected a whole number above 0"):
        config_class(vocab_size=0)


def check_fresh(model_class: type[BaseModel], config: Any) -> None:
    """A model that is made from a configuration has values everywhere, of the spread that it names,
    and is trainable.
    """
    torch.manual_seed(0)
    model = model_class(config)
    for name, param in model.named_parameters():
        assert param.isfinite().all() and (param.std() > 0 or param.dim() == 1), name
    assert dict(model.named_parameters())["input_embedding.weight"].std().item() == pytest.approx(
        config.emb_init_std, rel=0.2
    )
