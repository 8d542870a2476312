"""Folders that transformers writes, of architectures whose tensors have other names and shapes
there than in the model: loaded into sharded models, against transformers' own loading.
"""

import json

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from tests.ranks import models
from tests.ranks.runner import run_ranks

import bmtrain as bmt
from bmtrain.checkpoint.entries import entries
from bmtrain.checkpoint.sources import SafetensorsFile, open_source
from bmtrain.errors import CheckpointError
from model_center.weights.conversions import as_parameters, load_transformers

# Configurations, as their files have them.
LAYERS = """"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2"""
TEXT = f"""{LAYERS}, "vocab_size": 61, "num_key_value_heads": 1, "head_dim": 8,
    "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2"""
IMAGES = f"""{LAYERS}, "image_size": 16, "patch_size": 8"""
LOCAL = f"""{TEXT}, "num_local_experts": 3"""
EXPERTS = f"""{TEXT}, "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 8"""
SHARED = f"""{EXPERTS}, "shared_expert_intermediate_size": 8"""
# The class of a model, and of its configuration, without their endings.
CAUSAL = {
    "Mixtral": LOCAL,
    "Jamba": f"""{TEXT}, "num_experts": 3, "attn_layer_period": 2, "attn_layer_offset": 1,
        "mamba_d_state": 4, "mamba_dt_rank": 4""",
    "Qwen3Moe": EXPERTS,
    "GptOss": LOCAL,
    "Qwen2Moe": SHARED,
    "Qwen3Next": f"""{SHARED}, "linear_num_key_heads": 1, "linear_num_value_heads": 2,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"]""",
    "DeepseekV3": f"""{TEXT}, "num_key_value_heads": 2, "kv_lora_rank": 8, "q_lora_rank": 8,
        "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 8,
        "first_k_dense_replace": 1""",
    "Olmoe": EXPERTS,
    "GraniteMoe": LOCAL,
}
OTHERS = {
    "CLIPModel": f"""{{"text_config": {{{TEXT}}}, "vision_config": {{{IMAGES}}},
        "projection_dim": 8}}""",
    "LlavaForConditionalGeneration": f"""{{"vision_feature_layer": -1,
        "text_config": {{"model_type": "llama", {TEXT}}},
        "vision_config": {{"model_type": "clip_vision_model", {IMAGES}}}}}""",
    "SwinForImageClassification": """{"image_size": 32, "embed_dim": 8, "depths": [1, 1],
        "num_heads": [2, 2], "window_size": 2}""",
    "ViTForImageClassification": f"{{{IMAGES}}}",
    "BeitForImageClassification": f"{{{IMAGES}}}",
}
ARCHITECTURES = {f"{name}ForCausalLM": f"{{{text}}}" for name, text in CAUSAL.items()} | OTHERS
MIXTRAL, QWEN = "MixtralForCausalLM", "Qwen3MoeForCausalLM"
SHORT = [MIXTRAL, "JambaForCausalLM", "GptOssForCausalLM", "LlavaForConditionalGeneration"]
LONG = [name for name in ARCHITECTURES if name not in SHORT]


def make(name, seed):
    """A model whose every parameter has values of its own."""
    torch.manual_seed(seed)
    kind = getattr(hf, name)
    model = kind(kind.config_class(**json.loads(ARCHITECTURES[name])))
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape))
    return model


def same_state(model, want, what):
    assert list(model.state_dict()) == list(want), what
    models.assert_same_dicts(model.state_dict(), want, what, 0.0)


def loads_and_exports(folder, names):
    for name in names:
        path, there = folder / name, folder / f"{name} again"
        want = type(make(name, 3)).from_pretrained(path).state_dict()
        same_state(make(name, 3), want, f"{name}: transformers itself")
        model = bmt.BMTrainModelWrapper(make(name, 4))
        assert load_transformers(model, path) == ([], []), name
        same_state(model, want, name)
        model.save_pretrained(there)
        first, second = (load_file(place / "model.safetensors") for place in (path, there))
        models.assert_same_dicts(second, first, f"{name}, exported", 0.0)


@pytest.mark.fresh  # a progress bar leaves a thread
@pytest.mark.parametrize("names", [SHORT, pytest.param(LONG, marks=pytest.mark.long)])
def test_what_transformers_writes_is_what_it_reads(names, tmp_path):
    """Files in which names, and shapes, differ from the model's, and one where nothing does."""
    differing = set()
    for name in names:
        model = make(name, 3)
        model.save_pretrained(tmp_path / name)
        if {*load_file(tmp_path / name / "model.safetensors")} - {*model.state_dict()}:
            differing.add(name)
    assert len(differing) >= 3 and "GptOssForCausalLM" not in differing
    run_ranks(loads_and_exports, 2, tmp_path, names, timeout=240.0)


def opened(path, model):
    shapes = {name: entry.shape for entry in entries(model) for name in entry.names}
    return as_parameters(open_source(path), model, shapes)


def test_parts(tmp_path, monkeypatch):
    """Any part is that of the whole, and only experts that are asked for are read."""
    for name in (MIXTRAL, "JambaForCausalLM", "ViTForImageClassification"):
        model = make(name, 3)
        model.save_pretrained(tmp_path / name)
        source = opened(tmp_path / name, model)
        for key, value in model.state_dict().items():
            flat, size = value.reshape(-1), value.numel()
            assert torch.equal(source.mapped(key), value)
            ends = ((0, size), (size // 3, 2 * size // 3), (size - 1, size), (size, size))
            for start, stop in ends:
                assert torch.equal(source.part(key, start, stop), flat[start:stop]), (key, start)
    read = []
    mapped = SafetensorsFile.mapped

    def recorded(self, key):
        read.append(key)
        return mapped(self, key)

    monkeypatch.setattr(SafetensorsFile, "mapped", recorded)
    model = make(MIXTRAL, 3)
    source = opened(tmp_path / MIXTRAL, model)
    assert read == []
    name = "model.layers.0.mlp.experts.gate_up_proj"
    third = model.get_parameter(name).numel() // 3
    source.part(name, third, 2 * third - 5)
    source.part(name, 2 * third - 5, 2 * third)
    assert len(read) == 2 and all(".experts.1." in key for key in read), read


def refused(folder):
    model = bmt.BMTrainModelWrapper(make(QWEN, 4))
    before = model.state_dict()
    for name, reason in (
        ("an expert", r"gate_up_proj' has shape \(3, 16, 16\) in the model and \(2, 16, 16\)"),
        ("a matrix", r"gate_up_proj"),
        ("a shape", r"cannot be converted to 'model\.layers\.1\.mlp\.experts\.down_proj'"),
        ("beyond", r"unexpected in the file: 'model\.layers\.7\.mlp\.experts\.0\.up_proj\.weight'"),
    ):
        with pytest.raises(CheckpointError, match=reason):
            load_transformers(model, folder / name)
        same_state(model, before, name)
    # What bmtrain saves has the model's names, and the file of a wrapper's a prefix more.
    want = make(QWEN, 3).state_dict()
    other = bmt.BMTrainModelWrapper(make(QWEN, 3))
    for name in ("own.pt", "own.safetensors"):
        bmt.save(other, folder / name)
        load_transformers(model, folder / name)
        same_state(model, want, name)
        model.load_state_dict(before)
    if bmt.rank() == 0:
        with pytest.warns(UserWarning, match="'module.'"):
            load_transformers(model, folder / "prefixed.pt")
    else:
        load_transformers(model, folder / "prefixed.pt")
    same_state(model, want, "prefixed")


def test_what_does_not_fit_is_refused(tmp_path):
    """On every rank, and before anything is changed; names of the model's own are read as they
    are.
    """
    model = make(QWEN, 3)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    state = {f"module.{key}": value.clone() for key, value in model.state_dict().items()}
    torch.save(state, tmp_path / "prefixed.pt")
    last = "model.layers.1.mlp.experts.2."
    up, beyond = last + "up_proj.weight", "model.layers.7.mlp.experts.0.up_proj.weight"
    cases = {
        "an expert": {key: value for key, value in tensors.items() if not key.startswith(last)},
        "a matrix": {key: value for key, value in tensors.items() if key != up},
        "a shape": {**tensors, last + "down_proj.weight": torch.zeros(16, 9)},
        "beyond": {**tensors, beyond: torch.zeros(8, 16)},
    }
    for name, content in cases.items():
        (tmp_path / name).mkdir()
        save_file(content, tmp_path / name / "model.safetensors", {"format": "pt"})
    run_ranks(refused, 2, tmp_path)
