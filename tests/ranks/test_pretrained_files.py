"""Folders that transformers writes, of architectures whose tensors have other names and shapes
there than in the model: loaded into sharded models, against transformers' own loading.
"""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from tests.ranks.runner import run_ranks

import bmtrain as bmt
from bmtrain.checkpoint.conversions import as_parameters
from bmtrain.checkpoint.entries import entries
from bmtrain.checkpoint.source import Source
from bmtrain.checkpoint.sources import open_source
from bmtrain.errors import CheckpointError

TEXT: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS: dict[str, Any] = {
    **TEXT,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
}
LATENT: dict[str, Any] = {
    **TEXT,
    "num_key_value_heads": 2,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 8,
    "first_k_dense_replace": 1,
}
IMAGES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}

# The class of a model, that of its configuration, and values of it.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "MixtralForCausalLM": ("MixtralConfig", {**TEXT, "num_local_experts": 3}),
    "Qwen2MoeForCausalLM": ("Qwen2MoeConfig", {**EXPERTS, "shared_expert_intermediate_size": 8}),
    "Qwen3MoeForCausalLM": ("Qwen3MoeConfig", EXPERTS),
    "Qwen3NextForCausalLM": (
        "Qwen3NextConfig",
        {
            **EXPERTS,
            "shared_expert_intermediate_size": 8,
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "DeepseekV3ForCausalLM": ("DeepseekV3Config", LATENT),
    "OlmoeForCausalLM": ("OlmoeConfig", EXPERTS),
    "GraniteMoeForCausalLM": ("GraniteMoeConfig", {**TEXT, "num_local_experts": 3}),
    "GptOssForCausalLM": ("GptOssConfig", {**TEXT, "num_local_experts": 3}),
    "JambaForCausalLM": (
        "JambaConfig",
        {
            **TEXT,
            "num_experts": 3,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": 4,
            "mamba_dt_rank": 4,
        },
    ),
    "SwinForImageClassification": (
        "SwinConfig",
        {"image_size": 32, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 2},
    ),
    "ViTForImageClassification": ("ViTConfig", IMAGES),
    "BeitForImageClassification": ("BeitConfig", IMAGES),
    "CLIPModel": (
        "CLIPConfig",
        {"text_config": TEXT, "vision_config": IMAGES, "projection_dim": 8},
    ),
    "LlavaForConditionalGeneration": (
        "LlavaConfig",
        {
            "text_config": {"model_type": "llama", **TEXT},
            "vision_config": {"model_type": "clip_vision_model", **IMAGES},
            "vision_feature_layer": -1,
        },
    ),
}


def make(name: str, seed: int) -> Any:
    """A model whose every parameter has values of its own."""
    config, values = ARCHITECTURES[name]
    torch.manual_seed(seed)
    model = getattr(hf, name)(getattr(hf, config)(**values))
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape))
    return model


def same_state(model: Any, want: dict[str, torch.Tensor], what: str) -> None:
    got = model.state_dict()
    assert list(got) == list(want), what
    for name, value in want.items():
        assert got[name].dtype == value.dtype and torch.equal(got[name], value), (what, name)


def loads_and_exports(folder: str, names: list[str]) -> None:
    for name in names:
        path, there = pathlib.Path(folder, name), pathlib.Path(folder, f"{name} again")
        want = type(make(name, 3)).from_pretrained(path).state_dict()
        same_state(make(name, 3), want, f"{name}: transformers itself")
        model = bmt.BMTrainModelWrapper(make(name, 4))
        result = bmt.load(model, path)
        assert result.missing_keys == result.unexpected_keys == [], name
        same_state(model, want, name)
        model.save_pretrained(there)
        first, second = (load_file(place / "model.safetensors") for place in (path, there))
        assert first.keys() == second.keys(), name
        assert all(torch.equal(first[key], second[key]) for key in first), name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """What transformers writes of each architecture."""
    out = tmp_path_factory.mktemp("pretrained")
    for name in ARCHITECTURES:
        make(name, 3).save_pretrained(out / name)
    return out


def test_what_transformers_writes_is_what_it_reads(folder: pathlib.Path) -> None:
    run_ranks(loads_and_exports, 2, str(folder), list(ARCHITECTURES), timeout=240.0)


def test_the_sample_has_conversions_of_all_kinds(folder: pathlib.Path) -> None:
    """Files in which names, and shapes, differ from the model's, and one where nothing does."""
    differing = {
        name
        for name in ARCHITECTURES
        if {*load_file(folder / name / "model.safetensors")} - {*make(name, 3).state_dict()}
    }
    assert differing >= {"MixtralForCausalLM", "Qwen3NextForCausalLM", "JambaForCausalLM"}
    assert differing >= {"DeepseekV3ForCausalLM", "LlavaForConditionalGeneration"}
    assert "GptOssForCausalLM" not in differing


def opened(path: pathlib.Path, model: Any) -> Source:
    shapes = {name: entry.shape for entry in entries(model) for name in entry.names}
    return as_parameters(open_source(path), model, shapes)


@pytest.mark.parametrize(
    "name", ["MixtralForCausalLM", "JambaForCausalLM", "ViTForImageClassification"]
)
def test_any_part_is_that_of_the_whole(folder: pathlib.Path, name: str) -> None:
    model = make(name, 3)
    source = opened(folder / name, model)
    want = model.state_dict()
    for key, value in want.items():
        flat, size = value.reshape(-1), value.numel()
        assert torch.equal(source.mapped(key), value)
        for start, stop in ((0, size), (size // 3, 2 * size // 3), (size - 1, size), (size, size)):
            assert torch.equal(source.part(key, start, stop), flat[start:stop]), (key, start, stop)


def test_only_experts_that_are_asked_for_are_read(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make("MixtralForCausalLM", 3)
    read: list[str] = []
    files = type(open_source(folder / "MixtralForCausalLM" / "model.safetensors"))
    mapped = files.mapped

    def recorded(self: Source, key: str) -> torch.Tensor:
        read.append(key)
        return mapped(self, key)

    monkeypatch.setattr(files, "mapped", recorded)
    source = opened(folder / "MixtralForCausalLM", model)
    assert read == []
    name = "model.layers.0.mlp.experts.gate_up_proj"
    third = model.get_parameter(name).numel() // 3
    source.part(name, third, 2 * third - 5)
    source.part(name, 2 * third - 5, 2 * third)
    assert len(read) == 2 and all(".experts.1." in key for key in read), read


def own_names(folder: str) -> None:
    """What bmtrain saves has the model's names, and the file of a wrapper's a prefix more."""
    model = bmt.BMTrainModelWrapper(make("MixtralForCausalLM", 3))
    want = model.state_dict()
    for name in ("own.pt", "own.safetensors", "prefixed.pt"):
        path = pathlib.Path(folder, name)
        if name.startswith("own"):
            bmt.save(model, path)
        elif bmt.rank() == 0:
            torch.save({f"module.{key}": value.clone() for key, value in want.items()}, path)
        bmt.synchronize()
        other = bmt.BMTrainModelWrapper(make("MixtralForCausalLM", 4))
        if name == "prefixed.pt" and bmt.rank() == 0:
            with pytest.warns(UserWarning, match="'module.'"):
                bmt.load(other, path)
        else:
            bmt.load(other, path)
        same_state(other, want, name)


def test_own_names_are_read_as_they_are(tmp_path: pathlib.Path) -> None:
    run_ranks(own_names, 2, str(tmp_path))


def refused(folder: str) -> None:
    for name, reason in (
        ("an expert", r"gate_up_proj' has shape \(3, 16, 16\) in the model and \(2, 16, 16\)"),
        ("a matrix", r"gate_up_proj"),
        ("a shape", r"cannot be converted to 'model\.layers\.1\.mlp\.experts\.down_proj'"),
        ("beyond", r"unexpected in the file: 'model\.layers\.7\.mlp\.experts\.0\.up_proj\.weight'"),
    ):
        model = bmt.BMTrainModelWrapper(make("Qwen3MoeForCausalLM", 4))
        before = model.state_dict()
        with pytest.raises(CheckpointError, match=reason):
            bmt.load(model, pathlib.Path(folder, name))
        same_state(model, before, name)


def test_what_does_not_fit_is_refused(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """On every rank, and before anything is changed."""
    tensors = load_file(folder / "Qwen3MoeForCausalLM" / "model.safetensors")
    last = "model.layers.1.mlp.experts.2."
    cases = {
        "an expert": {key: value for key, value in tensors.items() if not key.startswith(last)},
        "a matrix": {
            key: value for key, value in tensors.items() if key != last + "up_proj.weight"
        },
        "a shape": {**tensors, last + "down_proj.weight": torch.zeros(16, 9)},
        "beyond": {**tensors, "model.layers.7.mlp.experts.0.up_proj.weight": torch.zeros(8, 16)},
    }
    for name, content in cases.items():
        (tmp_path / name).mkdir()
        save_file(content, tmp_path / name / "model.safetensors", {"format": "pt"})
    run_ranks(refused, 2, str(tmp_path))
