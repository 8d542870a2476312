"""ViT against transformers' ViTForImageClassification."""

import copy

import pytest
import torch
from safetensors.torch import load_file
from tests.models import parity
from tests.models.parity import assert_close, assert_own_format, refuse

from model_center.errors import ConfigError
from model_center.model import BertConfig, ViT, VitConfig

SIZES = (
    "image_size=24 patch_size=8 num_channels=2 hidden_size=32 num_attention_heads=4 "
    "intermediate_size=48 num_hidden_layers=2 num_labels=5"
)
OTHER = "hidden_act=gelu_new layer_norm_eps=1e-2 num_labels=3 num_channels=3 image_size=16"
OURS = parity.values(
    "img_size=24 patch_size=8 channels_in=2 num_classes=5 hidden_size=32 num_layers=2 num_heads=4 "
    "mlp_size=48 half=False"
)
THEIRS = f"ViTForImageClassification {SIZES}"
EVERY = torch.ones(2, dtype=torch.bool)


def images(*, channels=2, size=24):
    return torch.randn(2, channels, size, size, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("special", ["", OTHER])
def test_as_in_transformers(special, tmp_path):
    """Scores, hidden states, attentions, gradients, and files, with their configuration."""
    ours, model = parity.pair(f"{THEIRS} {special}", tmp_path)
    x = images(channels=3, size=16) if special else images()
    for one in (ours, model):
        parity.loss_of(one(x), EVERY).backward()
    found, expected = (parity.gradients(one, tmp_path / "gradients") for one in (ours, model))
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        assert_close(found[name], grad, name, 2 * parity.TOLERANCE)
    assert expected["vit.embeddings.cls_token"].abs().max() > 0.01
    wanted = {"output_hidden_states": True, "output_attentions": True}
    with torch.no_grad():
        plain, out = ours(x), ours(x, **wanted, return_dict=True)
        answer, inside = model(x).logits, model.vit(x, **wanted)
    assert_close(plain, answer)
    assert_close(out.logits, answer)
    assert_close(out.last_hidden_state, inside.last_hidden_state)
    assert out.hidden_states[-1] is out.last_hidden_state  # theirs is the one before the last norm
    for name, ends in (("hidden_states", -1), ("attentions", None)):
        for one, other in zip(out[name][:ends], inside[name][:ends], strict=True):
            assert_close(one, other, name)
    ours.save_pretrained(tmp_path / "saved")
    kept, stored = (load_file(tmp_path / n / "model.safetensors") for n in ("theirs", "saved"))
    assert kept.keys() == stored.keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in kept.items())
    back = type(model).from_pretrained(tmp_path / "saved", attn_implementation="eager").eval()
    assert torch.equal(back(x).logits, model(x).logits)
    for name in (*parity.values(f"{SIZES} {special}"), "id2label"):
        assert getattr(back.config, name) == getattr(model.config, name), name
    again = ViT.from_pretrained(tmp_path / "saved", dtype="float32")
    parity.assert_same_parameters(again, ours)
    assert again.config == ours.config
    assert_own_format(ours, tmp_path)
    for dtype in (torch.bfloat16, torch.float16):  # images stay as they are loaded, in fp32
        parity.assert_trains_in(dtype, ours, {"input_seq": x}, EVERY)
    assert torch.equal(copy.deepcopy(ours)(x), ours(x))
    assert special or (ours.config.norm_eps, VitConfig().norm_eps) == (1e-12, 1e-5)


def test_a_model_without_head(tmp_path):
    """Files of ViTModel have no prefix and no classifier, but a pooler, which is none of ours."""
    ours, model = parity.pair(f"ViTModel {SIZES}", tmp_path)
    with pytest.warns(UserWarning, match=r"head.weight, head.bias: newly initialised"):
        ViT.from_pretrained(tmp_path / "theirs")
    with torch.no_grad():
        hidden = ours(images(), return_dict=True).last_hidden_state
        assert_close(hidden, model(images()).last_hidden_state)
    assert ours.head.weight.std() > 0.005


def test_representation_layer(tmp_path):
    model = ViT(VitConfig(**OURS, representation_size=7)).eval()
    assert model.representation_layer is not None and model.head.weight.shape == (5, 7)
    out = model(images(), return_dict=True)
    token = out.last_hidden_state[:, 0] @ model.representation_layer.weight.T
    assert_close(out.logits, torch.tanh(token) @ model.head.weight.T + model.head.bias)
    with pytest.raises(ConfigError, match=r"representation_size is 7, there it is None"):
        model.save_pretrained(tmp_path)
    assert_own_format(model, tmp_path)


def test_a_mask_hides_patches(tmp_path):
    """What hidden patches show makes no difference to the class."""
    ours, _ = parity.pair(THEIRS, tmp_path)
    mask, changed = torch.ones(2, 10), images()
    mask[:, 9] = 0
    changed[:, :, 16:, 16:] += 1
    with torch.no_grad():
        assert_close(ours(images(), attention_mask=mask), ours(changed, attention_mask=mask))
        assert not torch.allclose(ours(images()), ours(changed))


def test_what_is_refused():
    ours = ViT(VitConfig(**OURS)).eval()
    expected = ours(images())
    refuse(ours, "register_blk is 3", images(), 3)
    refuse(ours, r"images of shape \(2, 2, 16, 16\)", images(size=16))
    refuse(ours, r"images of shape \(2, 3, 24, 24\)", images(channels=3))
    refuse(ours, "expected 10", images(), attention_mask=torch.ones(2, 9))
    for name in ("output_attentions", "output_hidden_states"):
        refuse(ours, "give return_dict=True", images(), **{name: True})
    assert torch.equal(ours(images()), expected)
    parity.refuse_configurations(f"""
Vit model_type=vit {SIZES} qkv_bias=False | qkv_bias False
Vit model_type=vit {SIZES} patch_size=[8,8] | expected squares
Vit image_size=3 | 'image_size' .nearest: 'img_size'
Vit img_size=25 patch_size=8 | img_size is 25: expected a multiple of patch_size=8
Vit num_heads=0 | hidden_size is 768: expected a multiple of num_heads=0
Vit hidden_size=0 | hidden_size is 0: expected
""")
    assert VitConfig(hidden_size=1, num_heads=1, img_size=1, patch_size=1).patch_size == 1
    with pytest.raises(ConfigError, match=r"got BertConfig"):
        ViT(BertConfig(num_layers=1))  # type: ignore[arg-type]
