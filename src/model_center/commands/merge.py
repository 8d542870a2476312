"""`python -m model_center merge`: adapters are added to the weights of their model."""

from __future__ import annotations

import argparse
import pathlib

import bmtrain as bmt
from bmtrain.checkpoint.sources import open_source
from model_center.commands.configuration import model_in
from model_center.errors import ConfigError
from model_center.hub.resolving import resolve
from model_center.optional import package
from model_center.training.trained_model import reward_config
from model_center.weights.staging import Staging, writing
from model_center.weights.tokenizers import save_tokenizer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `run`."""
    parser.description = (
        "Merge adapters into their base model, for programs that load whole models only. The "
        "host needs memory for the model."
    )
    parser.add_argument("adapter", help="folder of the adapters, or of the run that made them")
    parser.add_argument("out", type=pathlib.Path, help="folder that the model goes to")
    parser.add_argument("--model-config", metavar="MODEL", help="(default: as the adapters say)")


def run(args: argparse.Namespace) -> None:
    """Write the model.

    Raises:
        ConfigError: for a folder without adapters, or with those of another model.
        CheckpointError: for weights that cannot be read, or of which any might be meant.
        WeightsError: if the model cannot be written.
    """
    base, adapters = model_in(args.adapter)
    if adapters is None:
        raise ConfigError(f"{args.adapter} holds no adapters: expected an adapter_config.json.")
    transformers = package("transformers", "merge", ConfigError)
    peft = package("peft", "merge", ConfigError)
    folder = resolve(args.model_config or base, "model")
    open_source(folder)  # says which file is read, or refuses, as all that load do
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(adapters)
        kind, options = transformers.AutoModelForCausalLM, {}
        if peft.PeftConfig.from_pretrained(adapters).task_type == peft.TaskType.SEQ_CLS:
            # a reward model: its head is among the adapters' files
            kind = transformers.AutoModelForSequenceClassification
            options = reward_config(tokenizer)
        model = kind.from_pretrained(folder, dtype="auto", **options)
        merged = peft.PeftModel.from_pretrained(model, adapters).merge_and_unload()
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{adapters} does not fit {folder}: {error}") from error
    staging = Staging(args.out)
    try:
        with writing(args.out):
            merged.save_pretrained(str(staging.path()))
            save_tokenizer(tokenizer, staging.path())
            staging.commit()
    except BaseException:
        staging.abandon()
        raise
    bmt.print_rank(f"{args.out}: {type(merged).__name__}")
