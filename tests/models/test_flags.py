"""Flags of configurations as ModelCenter reads them, against its formulas by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.models import parity

from model_center.errors import ConfigError
from model_center.model.bert import Bert, BertConfig
from model_center.model.longformer import Longformer, LongformerConfig
from model_center.model.masked import MaskedModel
from model_center.model.opt import OPT, OPTConfig
from model_center.model.roberta import Roberta, RobertaConfig
from model_center.model.t5 import T5, T5Config
from model_center.model.vit import ViT, VitConfig

WIDTH = 16
SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "dim_model": WIDTH,
    "num_heads": 2,
    "dim_head": 8,
    "dim_ff": 20,
    "half": False,
    "dropout_p": 0.0,
}
IDS = parity.token_ids(2, 8)
MASKED = {Bert: BertConfig, Roberta: RobertaConfig, Longformer: LongformerConfig}


def scores_by_hand(model: MaskedModel, hidden: torch.Tensor, scale: float) -> torch.Tensor:
    """The head of a masked language model: its activation is gelu, and its matrix the embedding."""
    head = model.lm_head
    hidden = F.gelu(F.linear(hidden, head.dense.weight, head.dense.bias))
    norm = head.layer_norm
    hidden = F.layer_norm(hidden, (WIDTH,), norm.weight, norm.bias, norm.eps)
    return (hidden / scale) @ model.input_embedding.weight.T + head.decoder.bias


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("kind", MASKED, ids=lambda kind: kind.__name__)
def test_the_head_of_a_masked_model(kind: Any, scaled: bool) -> None:
    """Length scaling divides what a tied head multiplies; the layers' activation is not the
    head's.
    """
    config = MASKED[kind](**SIZES, num_layers=1, length_scale=scaled, ffn_activate_fn="relu")
    model = parity.randomized(kind(config))
    more = {"output_logits": True} if kind is Longformer else {}
    out = model(IDS, **more)
    expected = scores_by_hand(model, out.last_hidden_state, math.sqrt(WIDTH) if scaled else 1.0)
    parity.assert_close(out.logits, expected)
    assert out.logits.std() > 0.1


def test_a_head_of_bert_that_hugging_face_cannot_have(tmp_path: Any) -> None:
    config = BertConfig(**SIZES, num_layers=1, ffn_activate_fn="relu")
    with pytest.raises(ConfigError, match="head_activate_fn is 'gelu', there it is 'relu'"):
        Bert(config).save_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("options", "num_scores"),
    [({}, 61), ({"tied": False, "proj_bias": True}, 61), ({"cls_head": 3, "proj_bias": True}, 3)],
)
def test_scale_of_t5_is_that_of_all_scores(options: dict[str, Any], num_scores: int) -> None:
    model, plain = (
        T5(T5Config(**SIZES, num_encoder_layers=1, num_decoder_layers=1, scale=scale, **options))
        for scale in (True, None)
    )
    plain.load_state_dict(parity.randomized(model).state_dict())
    inputs = {"input_ids": IDS, "decoder_input_ids": IDS}
    found = model.eval()(**inputs).logits
    assert found.shape[-1] == num_scores
    parity.assert_close(found, plain.eval()(**inputs).logits * 100 * WIDTH**-0.5, tolerance=1e-4)


def test_attention_is_always_scaled_in_longformer_and_vit() -> None:
    """Global tokens' too."""
    chosen = torch.zeros_like(IDS)
    chosen[:, 3] = 1
    config = LongformerConfig(**SIZES, num_layers=2, attention_window=4, attn_scale=False)
    model = parity.randomized(Longformer(config))
    other = Longformer(LongformerConfig(**SIZES, num_layers=2, attention_window=4))
    other.load_state_dict(model.state_dict())
    given = {"input_ids": IDS, "global_attention_mask": chosen, "return_logits": True}
    assert torch.equal(model.eval()(**given), other.eval()(**given))
    sizes: dict[str, Any] = {"img_size": 8, "patch_size": 4, "hidden_size": 16, "num_heads": 2}
    images = torch.randn(2, 3, 8, 8)
    found = []
    for scale in (None, True, False):
        torch.manual_seed(0)
        vit = ViT(VitConfig(**sizes, mlp_size=8, num_layers=2, half=False, attn_scale=scale))
        found.append(vit.eval()(images))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_opt_does_not_look_at_token_types() -> None:
    model = parity.randomized(OPT(OPTConfig(**SIZES, num_layers=1)))
    assert torch.equal(model(IDS, token_type_ids=IDS % 2).logits, model(IDS).logits)
