"""ViT against transformers' ViTForImageClassification."""

from __future__ import annotations

import copy
import pathlib
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tests.models import parity

from model_center.errors import ConfigError, InputError
from model_center.layer.embedding import PatchEmbedding
from model_center.model.bert import BertConfig
from model_center.model.vit import ViT, VitConfig

SIZES: dict[str, Any] = {
    "image_size": 24,
    "patch_size": 8,
    "num_channels": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_labels": 5,
}
OURS: dict[str, Any] = {
    "img_size": 24,
    "patch_size": 8,
    "channels_in": 2,
    "num_classes": 5,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "mlp_size": 48,
    "half": False,
}
EVERY = torch.ones(2, dtype=torch.bool)


def hugging_face(**options: Any) -> Any:
    return parity.theirs(
        transformers.ViTForImageClassification, transformers.ViTConfig(**{**SIZES, **options})
    )


def images(*, channels: int = 2, size: int = 24) -> torch.Tensor:
    return torch.randn(2, channels, size, size, generator=torch.Generator().manual_seed(1))


class Named(torch.nn.Module):
    """Our model under the argument name of theirs."""

    def __init__(self, model: ViT) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: torch.Tensor, **options: Any) -> Any:
        return self.model(pixel_values, **options)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[ViT, Any]:
    model = hugging_face()
    return parity.loaded(ViT, model, tmp_path_factory.mktemp("vit")), model


def test_scores_hidden_states_attentions(pair: tuple[ViT, Any]) -> None:
    ours, model = pair
    inputs = {"pixel_values": images()}
    parity.assert_same_logits(Named(ours), model, inputs, EVERY)
    with torch.no_grad():
        plain, found = (
            ours(images()),
            ours(images(), output_hidden_states=True, output_attentions=True, return_dict=True),
        )
        expected = model.vit(**inputs, output_hidden_states=True, output_attentions=True)
    assert isinstance(plain, torch.Tensor)
    parity.assert_close(found.logits, plain)
    parity.assert_close(found.last_hidden_state, expected.last_hidden_state)
    for one, other in zip(found.hidden_states[:-1], expected.hidden_states[:-1], strict=True):
        parity.assert_close(one, other)
    # theirs is the one before the last norm
    assert found.hidden_states[-1] is found.last_hidden_state
    for one, other in zip(found.attentions, expected.attentions, strict=True):
        parity.assert_close(one, other)


def test_gradients_of_every_parameter(pair: tuple[ViT, Any], tmp_path: pathlib.Path) -> None:
    """Those of the class token, positions and the convolution too."""
    ours, model = pair
    for one in pair:
        one.zero_grad()
    parity.loss_of(ours(images()), EVERY).backward()
    parity.loss_of(model(pixel_values=images()), EVERY).backward()
    found, expected = (
        parity.gradients(ours, tmp_path / "ours"),
        parity.gradients(model, tmp_path / "theirs"),
    )
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        parity.assert_close(found[name], grad, name)
    assert expected["vit.embeddings.cls_token"].abs().max() > 0.01


def test_other_values_of_the_configuration(tmp_path: pathlib.Path) -> None:
    """Another activation, eps and labels come from their config.json and go back into it."""
    model = hugging_face(
        hidden_act="gelu_new", layer_norm_eps=1e-2, num_labels=3, num_channels=3, image_size=16
    )
    ours = parity.loaded(ViT, model, tmp_path)
    inputs = {"pixel_values": images(channels=3, size=16)}
    parity.assert_same_logits(Named(ours), model, inputs, EVERY)
    ours.save_pretrained(tmp_path / "again")
    config = transformers.ViTConfig.from_pretrained(tmp_path / "again")
    for name in (
        "hidden_act",
        "layer_norm_eps",
        "num_labels",
        "num_channels",
        "image_size",
        "patch_size",
        "id2label",
    ):
        assert getattr(config, name) == getattr(model.config, name), name


def test_eps_is_theirs_from_their_files_and_modelcenters_otherwise(pair: tuple[ViT, Any]) -> None:
    assert pair[0].config.norm_eps == 1e-12
    assert VitConfig().norm_eps == 1e-5


def test_saved_for_transformers_and_for_us(pair: tuple[ViT, Any], tmp_path: pathlib.Path) -> None:
    ours, model = pair
    ours.save_pretrained(tmp_path / "hf")
    model.save_pretrained(tmp_path / "reference")
    found, expected = (
        load_file(tmp_path / name / "model.safetensors") for name in ("hf", "reference")
    )
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    back = transformers.ViTForImageClassification.from_pretrained(
        tmp_path / "hf", attn_implementation="eager"
    )
    with torch.no_grad():
        assert torch.equal(back.eval()(images()).logits, model(images()).logits)
    ours.save_pretrained(tmp_path / "own", format="model_center")
    for folder in ("hf", "own"):
        again = ViT.from_pretrained(tmp_path / folder, dtype="float32")
        parity.assert_same_parameters(again, ours)
        assert again.config == ours.config


def test_a_model_without_head(tmp_path: pathlib.Path) -> None:
    """Files of ViTModel have no prefix and no classifier, but a pooler, which is none of ours."""
    model = parity.theirs(transformers.ViTModel, transformers.ViTConfig(**SIZES))
    with pytest.warns(UserWarning, match=r"head.weight, head.bias: newly initialised"):
        ours = parity.loaded(ViT, model, tmp_path)
    with torch.no_grad():
        parity.assert_close(
            ours(images(), return_dict=True).last_hidden_state, model(images()).last_hidden_state
        )


def test_patch_embedding_is_what_it_says() -> None:
    """Every patch by hand: the product with the filters, row by row from the top left, behind the
    class token.
    """
    torch.manual_seed(0)
    layer = PatchEmbedding(6, 2, 3, 5, dtype=torch.float32)
    x = torch.randn(2, 3, 6, 6)
    out = layer(x)
    assert out.shape == (2, 10, 5)
    for row in range(3):
        for column in range(3):
            patch = x[:, :, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2].flatten(1)
            embedded = patch @ layer.proj.weight.flatten(1).T + layer.proj.bias
            place = 1 + 3 * row + column
            parity.assert_close(out[:, place], embedded + layer.pos_embed[0, place])
    parity.assert_close(out[:, 0], (layer.cls_token[0, 0] + layer.pos_embed[0, 0]).expand(2, -1))
    assert 0 < layer.cls_token.std() < 0.1


def test_representation_layer_and_scale(tmp_path: pathlib.Path) -> None:
    torch.manual_seed(0)
    model = ViT(VitConfig(**OURS, representation_size=7)).eval()
    assert model.representation_layer is not None
    assert dict(model.named_parameters())["representation_layer.weight"].shape == (7, 32)
    assert model.head.weight.shape == (5, 7)
    out = model(images(), return_dict=True)
    token = out.last_hidden_state[:, 0]
    parity.assert_close(
        out.logits,
        torch.tanh(token @ model.representation_layer.weight.T) @ model.head.weight.T
        + model.head.bias,
    )
    with pytest.raises(ConfigError, match=r"representation_size is 7, there it is None"):
        model.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path, format="model_center")
    parity.assert_same_parameters(ViT.from_pretrained(tmp_path), model)


def test_a_mask_hides_patches(pair: tuple[ViT, Any]) -> None:
    """What hidden patches show makes no difference to the class."""
    ours, _ = pair
    mask, changed = torch.ones(2, 10), images()
    mask[:, 9] = 0
    changed[:, :, 16:, 16:] += 1
    with torch.no_grad():
        parity.assert_close(ours(images(), attention_mask=mask), ours(changed, attention_mask=mask))
        assert not torch.allclose(ours(images()), ours(changed))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(pair: tuple[ViT, Any], dtype: torch.dtype) -> None:
    """Images stay as they are loaded, in fp32."""
    parity.assert_trains_in(dtype, pair[0], {"input_seq": images()}, EVERY)


def test_outputs_and_deep_copy(pair: tuple[ViT, Any]) -> None:
    ours, _ = pair
    assert torch.equal(copy.deepcopy(ours)(images()), ours(images()))
    out = ours(images(), output_attentions=True, return_dict=True)
    assert list(out) == ["last_hidden_state", "logits", "attentions"]
    assert (out.last_hidden_state.shape, out.logits.shape) == ((2, 10, 32), (2, 5))
    assert out.attentions[1].shape == (2, 4, 10, 10)
    for more in ("output_attentions", "output_hidden_states"):
        with pytest.raises(InputError, match=r"give return_dict=True"):
            ours(images(), **{more: True})


def test_bad_arguments(pair: tuple[ViT, Any]) -> None:
    ours, _ = pair
    with pytest.raises(InputError, match=r"register_blk is 3"):
        ours(images(), 3)
    with pytest.raises(InputError, match=r"images of shape \(2, 2, 16, 16\)"):
        ours(images(size=16))
    with pytest.raises(InputError, match=r"images of shape \(2, 3, 24, 24\)"):
        ours(images(channels=3))
    with pytest.raises(InputError, match=r"expected 10"):
        ours(images(), attention_mask=torch.ones(2, 9))
    with pytest.raises(ConfigError, match=r"img_size is 25: expected a multiple of patch_size=8"):
        VitConfig(img_size=25, patch_size=8)
    with pytest.raises(ConfigError, match=r"qkv_bias False"):
        VitConfig.from_dict(transformers.ViTConfig(**SIZES, qkv_bias=False).to_dict())
    with pytest.raises(ConfigError, match=r"'image_size' .nearest: 'img_size'"):
        VitConfig.from_dict({"image_size": 3})
    with pytest.raises(ConfigError, match=r"got BertConfig"):
        ViT(BertConfig(num_layers=1))  # type: ignore[arg-type]


def test_published_defaults() -> None:
    with torch.device("meta"):
        model = ViT(VitConfig())
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
    assert shapes["patch_embed.proj.weight"] == (768, 3, 16, 16)
    assert shapes["patch_embed.pos_embed"] == (1, 197, 768)
    assert shapes["patch_embed.cls_token"] == (1, 1, 768)
    assert shapes["blocks.layers.11.ffn.ffn.w_in.w.weight"] == (3072, 768)
    assert shapes["blocks.output_layernorm.bias"] == (768,)
    assert shapes["head.bias"] == (1000,)
