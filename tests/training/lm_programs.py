"""Running the programs of examples/language_models on ranks, on tiny models and the small files of
tests/data.
"""

import argparse
import importlib
import os
import runpy
import sys
from pathlib import Path

import torch
from tests.modules import importable
from tests.ranks.runner import run_ranks

from model_center.commands import train as commands_train
from model_center.training.metrics_file import MEASURED, read_metrics

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "examples" / "language_models"
DATA = ROOT / "tests" / "data"
COMMAND = "python -m model_center train"
# A tiny model learns fast, and the CPU computes fp32 best.
TINY = "--dtype fp32 --lr 2e-3 --lr-decay-style constant"


def tiny(family, folder):
    """A tiny model's folder in `folder`."""
    path = folder / family
    if not path.exists():
        module("tiny_model").make(family, path)
    return path


def module(name):
    """A file of the examples, as a module that nobody else sees."""
    with importable(PROGRAMS):
        return importlib.import_module(name)


def on(model, *data):
    """Arguments that say which model and which conversations: small files, or others."""
    names = [DATA / "chat" / name for name in data or ("train.jsonl",)]
    return ["--model-config", model, "--max-length 64", TINY, "--data", *names]


def drawn_adapters(model):
    """peft's model, whose adapters, and whatever else it trains, are drawn."""
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.normal_()
    return model


def words_of(*arguments):
    """A command's words; a text may hold several arguments."""
    return [word for argument in arguments for word in str(argument).split()]


def train(name, *arguments, ranks=2):
    """Run a program on so many ranks, each a process of its own."""
    run_ranks(main, ranks, name, words_of(*arguments), join=False, timeout=120)


def command(*arguments, ranks=2):
    """Run `python -m model_center train` as `train` runs a program; its errors are raised."""
    train(COMMAND, *arguments, ranks=ranks)


def main(name, arguments):
    """On a rank: the program, as if it had been started by torchrun on a machine without GPUs."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    sys.argv = [name, *arguments]
    if name == COMMAND:
        parser = argparse.ArgumentParser()
        commands_train.add_arguments(parser)
        commands_train.run(parser.parse_args(arguments))
        return
    with importable(PROGRAMS):
        runpy.run_path(str(PROGRAMS / f"{name}.py"), run_name="__main__")


def losses(folder):
    """The training loss of each step of a run."""
    return [record["loss"] for record in read_metrics(folder / "metrics.jsonl") if "loss" in record]


def results(folder, name):
    """What each evaluation of a run found."""
    return [record[name] for record in read_metrics(folder / "metrics.jsonl") if name in record]


def same_learning(folder, other):
    """Both runs recorded the same, but for times and memory."""
    got, want = (
        [learning(record) for record in read_metrics(path / "metrics.jsonl")]
        for path in (folder, other)
    )
    assert got == want


def learning(record):
    """What of a record does not depend on the machine."""
    return {name: value for name, value in record.items() if name not in MEASURED}
