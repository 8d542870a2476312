"""Start and end of a training program: process group, model, the folder to load from."""

from __future__ import annotations

import argparse
import pathlib
from typing import Any, TypeVar

import torch

import bmtrain as bmt
from model_center.config.base import CONFIG_FILE, read_json
from model_center.errors import ConfigError
from model_center.hub.resolving import resolve
from model_center.model.base import BaseModel
from model_center.model.registry import model_class

Model = TypeVar("Model", bound=BaseModel)

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def setup(args: argparse.Namespace) -> None:
    """Join the run and seed it: `bmtrain.init_distributed` with the values of these flags.

    Args:
        args: from `model_center.get_args`, of which `seed`, `zero_level`, `timeout` and `watchdog`
            are read.
    """
    bmt.init_distributed(
        seed=args.seed, zero_level=args.zero_level, timeout=args.timeout, watchdog=args.watchdog
    )


def default_dtype() -> str:
    """bf16 where the device computes in it: on other CPUs it takes 30 times as long as fp32."""
    if bmt.device().type != "cpu":
        return "bf16"
    facts = pathlib.Path("/proc/cpuinfo")
    words = facts.read_text(errors="replace").split() if facts.exists() else []
    return "bf16" if {"avx512_bf16", "amx_bf16", "bf16"} & {*words} else "fp32"


def model_options(args: argparse.Namespace) -> dict[str, Any]:
    """Configuration values by the flags `dtype`, `use_checkpoint` and `zero_level` of `args`."""
    return {
        "dtype": DTYPES[args.dtype],
        "use_checkpoint": args.use_checkpoint,
        "zero_level": args.zero_level,
    }


def class_of(name: str, default: type[Model]) -> type[Model]:
    """The class of the model in a folder or of a known name.

    Args:
        name: a folder, a name the project knows, or a Hugging Face repository.
        default: the class where config.json names none; the model must be one of it.

    Raises:
        ConfigError: for a model that is not known, or none of the kind of `default`.
    """
    content = read_json(pathlib.Path(resolve(name, "config"), CONFIG_FILE))
    kind = model_class(content) if "model_type" in content else default
    if not issubclass(kind, default):
        raise ConfigError(
            f"{name} is a {kind.__name__}: expected a {default.__name__}, or what is built "
            "like one."
        )
    return kind


def pretrained(kind: type[Model], args: argparse.Namespace, **overrides: Any) -> Model:
    """A model of `--model-config` with its weights, or with those of `--load`. Collective.

    Args:
        kind: its class.
        args: from `model_center.get_args`.
        overrides: values that replace the configuration's.

    Raises:
        ConfigError, IdentifierError, WeightsError: as `from_pretrained`.
    """
    if args.load is None:
        return kind.from_pretrained(args.model_config, **model_options(args), **overrides)
    config = kind._CONFIG_TYPE.from_pretrained(
        args.model_config, **model_options(args), **overrides
    )
    return _loaded(kind.without_values(config), args.load)


def untrained(kind: type[Model], args: argparse.Namespace, **overrides: Any) -> Model:
    """The model of `--model-config`, with initial values or the weights of `--load`. Collective.

    Args:
        kind: its class.
        args: from `model_center.get_args`.
        overrides: values that replace the configuration's.

    Raises:
        ConfigError, IdentifierError, WeightsError: as `from_pretrained`.
    """
    config = kind._CONFIG_TYPE.from_pretrained(
        args.model_config, **model_options(args), **overrides
    )
    if args.load is not None:
        return _loaded(kind.without_values(config), args.load)
    model = kind(config)
    bmt.init_parameters(model)
    return model


def _loaded(model: Model, path: str) -> Model:
    model.load_folder(path)
    return model


def save_model(
    model: BaseModel, args: argparse.Namespace, tokenizer: Any = None
) -> pathlib.Path | None:
    """Write model and tokenizer to the folder `--save-name` in `--save`. Collective.

    Args:
        model: written in Hugging Face's format where it has the model, else in ModelCenter's.
        args: from `model_center.get_args`, of which `save` and `save_name` are read.
        tokenizer: written beside, if given.

    Returns the folder; None without --save.

    Raises:
        WeightsError: on every rank, if the files cannot be written.
    """
    if args.save is None:
        return None
    folder = pathlib.Path(args.save, args.save_name or "model")
    model.save_pretrained(
        folder, format="hf" if model.config.model_type else "model_center", tokenizer=tokenizer
    )
    return folder
