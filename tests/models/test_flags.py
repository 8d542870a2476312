"""Flags of configurations as ModelCenter reads them, against its formulas by hand."""

import pytest
import torch
import torch.nn.functional as F
from tests.models import parity, small

import model_center.model as models
from model_center.errors import ConfigError

IDS = parity.token_ids(2, 8)
CHOSEN = torch.zeros_like(IDS)
CHOSEN[:, 3] = 1


@pytest.mark.parametrize("name", ["Bert", "Roberta", "Longformer"])
def test_the_head_of_a_masked_model(name, tmp_path):
    """Length scaling divides what a tied head multiplies; the layers' activation is not the
    head's, which is gelu.
    """
    for scale in (1.0, 4.0):
        model = small.model(name, length_scale=scale > 1, ffn_activate_fn="relu")
        out = model(IDS, **({"output_logits": True} if name == "Longformer" else {}))
        head = model.lm_head
        hidden = F.linear(out.last_hidden_state, head.dense.weight, head.dense.bias)
        norm = head.layer_norm
        hidden = F.layer_norm(F.gelu(hidden), (16,), norm.weight, norm.bias, norm.eps)
        expected = (hidden / scale) @ model.input_embedding.weight.T + head.decoder.bias
        parity.assert_close(out.logits, expected)
        assert out.logits.std() > 0.1
    if name == "Bert":
        with pytest.raises(ConfigError, match="head_activate_fn is 'gelu', there it is 'relu'"):
            small.model(name, ffn_activate_fn="relu").save_pretrained(tmp_path)


def test_scale_of_t5_is_that_of_all_scores():
    """Of tied heads, others, and those for classes."""
    for more in ({}, {"tied": False, "proj_bias": True}, {"cls_head": 3, "proj_bias": True}):
        found, plain = (
            small.model("T5", scale=scale, **more)(IDS, decoder_input_ids=IDS).logits
            for scale in (True, None)
        )
        assert found.shape[-1] == more.get("cls_head", 61)
        parity.assert_close(found, plain * 100 / 4, tolerance=1e-4)


def test_flags_that_change_nothing():
    """Attention, global tokens' too, is always scaled in Longformer and ViT; OPT does not look at
    token types.
    """
    given = {"input_ids": IDS, "global_attention_mask": CHOSEN, "return_logits": True}
    window = {"attention_window": 4}
    found = [small.model("Longformer", **window, attn_scale=on)(**given) for on in (True, False)]
    assert torch.equal(found[0], found[1])
    images = torch.randn(2, 3, 6, 6)
    found = [small.model("ViT", attn_scale=on)(images) for on in (None, True, False)]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    opt = small.model("OPT")
    assert isinstance(opt, models.OPT)
    assert torch.equal(opt(IDS, token_type_ids=IDS % 2).logits, opt(IDS).logits)
