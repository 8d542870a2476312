"""LoRA on the models of model_center, in the files of peft, which fit the same model in
transformers.
"""

from __future__ import annotations

import pathlib

import peft
import safetensors.torch

import bmtrain as bmt
from model_center.errors import ConfigError
from model_center.model.base import BaseModel

# Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021), adapt the projections of
# attention.
TARGETS = ("project_q", "project_k", "project_v", "attention_out")
OURS, THEIRS = ".weight", "base_model.model."


def add_lora(model: BaseModel, rank: int, alpha: int, dropout: float) -> peft.LoraConfig:
    """Put adapters beside the projections of attention, and freeze all else. Collective."""
    config = peft.LoraConfig(
        r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=list(TARGETS), bias="none"
    )
    peft.inject_adapter_in_model(config, model)
    bmt.BMTrainModelWrapper(model)  # shards what is new
    return config


def save_lora(model: BaseModel, config: peft.LoraConfig, folder: pathlib.Path, base: str) -> None:
    """Write the adapters as a folder for `peft.PeftModel.from_pretrained`, with transformers'
    names. Collective.

    Args:
        model: what `add_lora` has been given.
        config: what it returned.
        folder: made if it is not there.
        base: where the model's own weights are.

    Raises:
        ConfigError: for a model that Hugging Face has not, or whose projections are not tensors of
            their own there.
    """
    tensors = peft.get_peft_model_state_dict(model)
    names = {name: _their_name(model, name) for name in tensors}
    if bmt.rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        content = {
            names[name]: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()
        }
        safetensors.torch.save_file(content, folder / "adapter_model.safetensors", {"format": "pt"})
        theirs = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in content})
        facts = {
            "target_modules": theirs,
            "base_model_name_or_path": base,
            "task_type": "CAUSAL_LM",
            "inference_mode": True,
        }
        written = peft.LoraConfig(**{**config.to_dict(), **facts})
        written.save_pretrained(str(folder))
    bmt.synchronize()


def _their_name(model: BaseModel, name: str) -> str:
    """`encoder...project_q.lora_A.weight` as `base_model.model.model...q_proj.lora_A.weight`."""
    module, found, rest = name.partition(".lora_")
    piece = type(model).key_map(model.config).pieces.get(module + OURS)
    if piece is None or piece.rows is not None or piece.transpose:
        raise ConfigError(
            f"transformers has no module of its own for {module}: they cannot be exported."
        )
    return THEIRS + piece.name.removesuffix(OURS) + found + rest
