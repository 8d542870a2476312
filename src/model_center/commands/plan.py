"""`python -m model_center plan MODEL`: memory of training a model of this package."""

from __future__ import annotations

import argparse
import functools

import torch

import bmtrain as bmt
from bmtrain.plan import Source, command
from model_center.errors import ConfigError
from model_center.model.causal import CausalModel
from model_center.training.setup import class_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `run`."""
    parser.description = "Forecast the memory of training a decoder, without its weights."
    parser.epilog = command.EPILOG
    parser.add_argument("model", metavar="MODEL", help="a folder with a config.json, or a name")
    command.add_run_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Print the forecast; the exit status says whether it fits.

    Raises:
        ConfigError, IdentifierError: for a model that is not known, or is no decoder.
    """
    raise SystemExit(command.report(args, functools.partial(source_of, args.model)))


def source_of(name: str) -> Source:
    """A model of this package, as `bmtrain.plan` takes it."""
    kind = class_of(name, CausalModel)
    if kind is CausalModel:
        raise ConfigError(f"the configuration of {name} names no model_type.")
    config = kind._CONFIG_TYPE.from_pretrained(name)
    return Source(name=name, build=functools.partial(kind, config), loss=loss_of)


def loss_of(model: torch.nn.Module, batch: int, seq: int) -> torch.Tensor:
    """The mean cross-entropy of `batch` rows of `seq` tokens, as `train` computes it."""
    if not isinstance(model, CausalModel):
        raise ConfigError(f"{type(model).__name__} is no decoder.")
    ids = torch.zeros(batch, seq, dtype=torch.long)
    out = model(ids, output_logits=False)
    logits = model.logits(out.last_hidden_state.flatten(0, 1))
    return bmt.loss.FusedCrossEntropy()(logits, ids.flatten())
