"""Tiny causal models of transformers, made of their default configurations."""

import argparse
import pathlib
import shutil
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from tests.models import parity
from tests.ranks.models import full_gradients, plain_gradients
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import bmtrain as bmt
from model_center.dataset.instructions import InstructionDataset
from model_center.dataset.packing import PackedSamples
from model_center.training.objectives import Objective
from model_center.training.trained_model import TrainedModel, trained_model_of

DATA = pathlib.Path(__file__).parents[1] / "data"
# An attribute of this name, or with this last part of it, becomes so large at most.
SIZES = {
    64: "max_position_embeddings n_positions sliding_window",
    24: "intermediate_size ffn_dim d_ff n_inner d_inner ffn_hidden_size shared_expert_intermediate_size",
    16: "hidden_size hidden_dim d_model n_embd embed_dim embedding_size word_embed_proj_dim",
    8: "head_dim moe_intermediate_size kv_lora_rank q_lora_rank v_head_dim hidden_size_per_layer_input "
    "state_size vocab_size_per_layer_input ssm_state_size mamba_d_state time_step_rank mamba_d_head "
    "linear_key_head_dim linear_value_head_dim",
    4: "num_experts num_local_experts n_routed_experts qk_rope_head_dim qk_nope_head_dim "
    "linear_num_key_heads linear_num_value_heads",
    2: "num_hidden_layers num_layers n_layer n_layers num_key_value_heads num_attention_heads "
    "num_heads n_head n_heads num_experts_per_tok num_kv_heads top_k first_k_dense_replace "
    "mamba_n_heads moe_k",
    1: "n_group topk_group n_groups mamba_n_groups",
}
LIMITS = [(name, size) for size, names in SIZES.items() for name in names.split()]
HEADS: dict[str, Any] = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
LISTS = ("layer_types", "mlp_layer_types", "layers_block_type", "attention_layers")


def tiny_config(kind, **changes):
    """The default configuration of a model type with some changes, its sizes small."""
    config = transformers.AutoConfig.for_model(kind, **changes)
    config = config.get_text_config() if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else config
    for key, value in list(vars(config).items()):
        if (isinstance(value, float) and "dropout" in key) or key.endswith("pdrop"):
            setattr(config, key, 0.0)
        elif isinstance(value, int) and not isinstance(value, bool):
            for name, limit in LIMITS:
                if key == name:
                    setattr(config, key, min(value, limit))
        if key.endswith("_token_id"):
            setattr(config, key, 0)
        if key in LISTS and isinstance(value, list):
            some = list(dict.fromkeys(value)) * 2
            setattr(config, key, some[:2])
    if "qk_rope_head_dim" in vars(config):
        config.head_dim = config.qk_rope_head_dim
    return config


def make(kind, folder, dtype=torch.float32, **changes):
    """A folder with a tiny model of a type, and a tokenizer."""
    path = folder / kind
    shutil.copytree(DATA / "tokenizers" / "gpt2", path)
    (path / "config.json").unlink(missing_ok=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    config = tiny_config(kind, **changes)
    config.vocab_size = len(tokenizer)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.1)
    model.to(dtype).save_pretrained(path)
    return path


def arguments(path, **values):
    """What `train` asks a trained_model with."""
    base = parity.values(
        "load=None dtype=fp32 from_scratch=False samples=0 seed=0 use_checkpoint=True zero_level=3 "
        "save=None save_name=None lora_rank=0 lora_alpha=16 lora_dropout=0.0 lora_targets=None "
        "batch_size=2 max_length=100 load_in_4bit=False"
    )
    goal = {"model_config": str(path), "objective": Objective.NEXT_TOKEN}
    return argparse.Namespace(**{**base, **goal, **values})


def check_learning(path):
    """On a rank: loss and gradients of packed rows are those of transformers' own model on each
    sample alone, and in bf16 the loss. Returns whether samples share rows.
    """
    trained_model = trained_model_of(str(path))
    trained_model.load(arguments(path, max_length=2**40))  # so that scores are not held
    samples = InstructionDataset(DATA / "chat" / "train.jsonl", trained_model.tokenizer, 48)
    packed = PackedSamples(samples, 100, alone=not trained_model.is_packed)
    own = range(bmt.rank(), len(packed) // 2 * 2, bmt.world_size())
    batch = packed.collate([packed[number] for number in own])
    mean = bmt.loss.TokenMean([batch["targets"]])
    loss = mean(trained_model.loss_sum(batch))
    with torch.no_grad():  # and where they are
        held = mean(TrainedModel.loss_sum(trained_model, batch))
    assert float(held) == pytest.approx(float(loss), rel=1e-5), path.name
    (loss / bmt.world_size()).backward()  # as an OptimManager does: ranks add up
    mean_loss = float(bmt.sum_loss(loss.detach()))
    plain = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).train()
    total, count = torch.zeros(()), 0
    for number in (n for row in packed.rows[: len(packed) // 2 * 2] for n in row):
        item = samples[number]
        logits = plain(input_ids=item["input_ids"][None]).logits[0]
        total = total + F.cross_entropy(logits, item["targets"], ignore_index=-100, reduction="sum")
        count += int((item["targets"] != -100).sum())
    (total / count).backward()
    assert mean_loss == pytest.approx(float(total) / count, rel=1e-4), path.name
    want, got = plain_gradients(plain), full_gradients(trained_model.model)
    largest = max(float(grad.abs().max()) for grad in want.values() if grad is not None)
    assert sorted(got) == sorted(want)
    for name, grad in want.items():
        expected = torch.zeros(()) if grad is None else grad
        value = got[name]
        found = torch.zeros(()) if value is None else value
        error = float((found - expected).abs().max())
        limit = 2e-4 * max(float(expected.abs().max()), 1e-2 * largest)
        assert error <= limit, f"{path.name}: {name} is off by {error:g} of {limit:g}"
    trained_model.load(arguments(path, max_length=2**40, dtype="bf16"))
    loss = mean(trained_model.loss_sum(batch))
    (loss / bmt.world_size()).backward()
    assert float(bmt.sum_loss(loss.detach())) == pytest.approx(mean_loss, rel=1e-2), path.name
    return trained_model.is_packed
