"""LoRA on the models of this package, in the files of peft, which fit the same model in
transformers.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import safetensors.torch
import torch

import bmtrain as bmt
from bmtrain.checkpoint.files import check_file
from bmtrain.distributed.agreement import attempt, everyone
from bmtrain.errors import CheckpointError
from bmtrain.runtime import log
from bmtrain.runtime.arguments import with_nearest
from model_center.errors import ConfigError, WeightsError
from model_center.layer.linear import Linear
from model_center.model.base import BaseModel
from model_center.optional import package
from model_center.weights.keymap import TensorPart
from model_center.weights.staging import Staging, writing
from model_center.weights.tokenizers import save_tokenizer

# Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021), adapt the projections of
# attention.
ATTENTION = ("project_q", "project_k", "project_v", "attention_out")
ALL = "all-linear"
OURS, THEIRS = ".weight", "base_model.model."
FILE, OTHER = "adapter_model.safetensors", "adapter_model.bin"
CONFIG = "adapter_config.json"
SHOWN = 5  # names in a message


class Lora:
    """Adapters beside linear layers of a model, all else of which is frozen. Collective.

    Args:
        model: gets the adapters.
        rank, alpha, dropout: of the adapters, which count alpha / rank times.
        targets: names of layers, ours ("project_q") or transformers' ("q_proj"); "all-linear" for
            all but the head.
        base: where the model's own weights are.

    Raises:
        ConfigError: where peft is missing, for a name that is no layer's, and for a model that
            Hugging Face has not, or whose layers are not tensors of their own there.
    """

    def __init__(
        self,
        model: BaseModel,
        rank: int,
        alpha: float,
        dropout: float,
        targets: Sequence[str],
        base: str,
    ) -> None:
        self._peft = _peft()
        self._model = model
        pieces = _pieces(model)
        modules = _chosen(model, targets, pieces)
        self._names = {name: _hugging_face_name(name, pieces.get(name + OURS)) for name in modules}
        self._config = self._peft.LoraConfig(
            r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=modules, bias="none"
        )
        self._base = base
        self._peft.inject_adapter_in_model(self._config, model)
        bmt.BMTrainModelWrapper(model)  # shards what is new

    def save(self, folder: pathlib.Path, tokenizer: Any) -> None:
        """Write the adapters as a folder for `peft.PeftModel.from_pretrained`, with transformers'
        names, and the tokenizer that they were trained with. Collective.

        Raises:
            WeightsError: on every rank, if that cannot be written.
        """
        tensors: Mapping[str, torch.Tensor] = self._peft.get_peft_model_state_dict(self._model)
        content = {}
        for name, tensor in tensors.items():  # whole tensors: all ranks gather
            module, found, rest = name.partition(".lora_")
            content[THEIRS + self._names[module] + found + rest] = (
                tensor.detach().cpu().contiguous()
            )
        attempt(lambda: self._write(folder, content, tokenizer), everyone(), WeightsError)

    def _write(
        self, folder: pathlib.Path, content: dict[str, torch.Tensor], tokenizer: Any
    ) -> None:
        if bmt.rank() != 0:
            return
        facts = {
            "target_modules": sorted({name.rpartition(".")[2] for name in self._names.values()}),
            "base_model_name_or_path": self._base,
            "task_type": "CAUSAL_LM",
            "inference_mode": True,
        }
        written = self._peft.LoraConfig(**{**self._config.to_dict(), **facts})
        staging = adapter_staging(folder)
        try:
            with writing(folder):
                safetensors.torch.save_file(content, staging.path(FILE), {"format": "pt"})
                written.save_pretrained(str(staging.path()))
                save_tokenizer(tokenizer, staging.path())
                staging.commit()
        except BaseException:
            staging.abandon()
            raise


def adapter_staging(folder: pathlib.Path) -> Staging:
    """Files of adapters on their way into a folder."""
    return Staging(folder, weights=("adapter_model.*",), config=CONFIG)


def add_adapters(model: BaseModel, folder: pathlib.Path) -> None:
    """Put LoRA adapters of a folder, as `Lora.save` and peft write it, beside a model's layers.
    Collective if the model is sharded.

    Raises:
        ConfigError: where peft is missing, for a folder that holds no such adapters, and for
            adapters that do not fit the model.
    """
    peft = _peft()
    config, tensors = attempt(lambda: _read(peft, folder), everyone(), ConfigError)
    for name in ("rank_pattern", "alpha_pattern", "modules_to_save"):
        if vars(config)[name]:
            raise ConfigError(f"{folder}: adapters with {name} are not read here.")
    pieces = _pieces(model)
    layers = {
        _layer_name(pieces.get(name + OURS)): name
        for name, module in model.named_modules()
        if isinstance(module, Linear)
    }
    found = {}
    for key, tensor in tensors.items():
        module, lora, rest = key.removeprefix(THEIRS).partition(".lora_")
        if module not in layers:
            raise ConfigError(
                f"{folder} has adapters for {module!r}, no linear layer of the model."
            )
        found[layers[module] + lora + rest] = tensor
    config.target_modules = sorted({name.partition(".lora_")[0] for name in found})
    peft.inject_adapter_in_model(config, model)
    left = peft.set_peft_model_state_dict(model, found)
    missing = [name for name in left.missing_keys if ".lora_" in name]
    if left.unexpected_keys or missing:
        raise ConfigError(
            f"{folder} does not fit the model: {[*left.unexpected_keys, *missing][:SHOWN]}."
        )
    if bmt.is_initialized():
        bmt.BMTrainModelWrapper(model)


def _read(peft: Any, folder: pathlib.Path) -> tuple[Any, dict[str, torch.Tensor]]:
    """The configuration of adapters, and their tensors by peft's names."""
    try:
        check_file(folder / CONFIG)
        check_file(folder / FILE)
        config = peft.LoraConfig.from_pretrained(str(folder))
        if (folder / OTHER).exists() and bmt.rank() == 0:
            log.warn(f"{folder}: {FILE} is read, as peft does, and not {OTHER}.")
        return config, safetensors.torch.load_file(folder / FILE)
    except (CheckpointError, OSError, TypeError, ValueError, safetensors.SafetensorError) as error:
        raise ConfigError(f"{folder} holds no LoRA adapters of peft: {error}") from error


def _peft() -> Any:
    return package("peft", "LoRA", ConfigError, instead="use all weights, without adapters")


def layers_to_adapt(model: BaseModel, targets: Sequence[str]) -> list[str]:
    """The paths of the linear layers that get adapters.

    Raises:
        ConfigError: as `Lora`.
    """
    return _chosen(model, targets, _pieces(model))


def _chosen(
    model: BaseModel, targets: Sequence[str], pieces: Mapping[str, TensorPart]
) -> list[str]:
    """The paths of the linear layers that are named."""
    layers = {
        name: {name.rpartition(".")[2], _layer_of(pieces.get(name + OURS))}
        for name, module in model.named_modules()
        if isinstance(module, Linear) and not name.endswith("_projection")
    }
    if list(targets) == [ALL]:
        return list(layers)
    known = {name for names in layers.values() for name in names if name}
    for target in targets:
        if target not in known:
            raise ConfigError(
                f"--lora-targets {with_nearest(target, known)}: expected {ALL}, or some of "
                f"{', '.join(sorted(known))}."
            )
    return [name for name, names in layers.items() if names & set(targets)]


def _pieces(model: BaseModel) -> Mapping[str, TensorPart]:
    if not model.config.model_type:
        raise ConfigError(
            f"transformers has no {type(model).__name__}: adapters for it cannot be written."
        )
    return type(model).key_map(model.config).pieces


def _layer_name(piece: TensorPart | None) -> str | None:
    """Transformers' path of the module with a weight; None where it has no module of its own."""
    if piece is None or piece.rows is not None or piece.transpose:
        return None
    return piece.name.removesuffix(OURS)


def _layer_of(piece: TensorPart | None) -> str:
    return "" if piece is None else piece.name.removesuffix(OURS).rpartition(".")[2]


def _hugging_face_name(name: str, piece: TensorPart | None) -> str:
    """`encoder...project_q` as `model...q_proj`."""
    found = _layer_name(piece)
    if found is None:
        raise ConfigError(
            f"transformers has no module of its own for {name}: adapters beside it cannot be "
            "written. Name other --lora-targets, or train all weights."
        )
    return found
