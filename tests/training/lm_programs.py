"""Running the programs of examples/language_models on ranks, on tiny models and the small files of
tests/data.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import pathlib
import runpy
import sys
from types import ModuleType
from typing import Any

from tests.modules import importable
from tests.ranks.runner import run_ranks

from model_center.commands import train as commands_train
from model_center.training.metrics_file import MEASURED, read_metrics

ROOT = pathlib.Path(__file__).parents[2]
PROGRAMS = ROOT / "examples" / "language_models"
DATA = ROOT / "tests" / "data"
COMMAND = "python -m model_center train"
# A tiny model learns fast, and the CPU computes fp32 best.
TINY = "--dtype fp32 --lr 2e-3 --lr-decay-style constant"


def tiny(family: str, folder: pathlib.Path) -> pathlib.Path:
    """A tiny model's folder in `folder`."""
    path = folder / family
    if not path.exists():
        module("tiny_model").make(family, path)
    return path


def module(name: str) -> ModuleType:
    """A file of the examples, as a module that nobody else sees."""
    spec = importlib.util.spec_from_file_location(
        f"language_models_{name}", PROGRAMS / f"{name}.py"
    )
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    with importable(PROGRAMS):
        spec.loader.exec_module(loaded)
    return loaded


def train(name: str, *arguments: object, ranks: int = 2, timeout: float = 120) -> None:
    """Run a program on so many ranks, each a process of its own; a text may hold several
    arguments.
    """
    split = [
        part
        for argument in arguments
        for part in (argument.split() if isinstance(argument, str) else [str(argument)])
    ]
    run_ranks(main, ranks, name, split, join=False, timeout=timeout)


def command(*arguments: object, ranks: int = 2, timeout: float = 120) -> None:
    """Run `python -m model_center train` as `train` runs a program; its errors are raised."""
    train(COMMAND, *arguments, ranks=ranks, timeout=timeout)


def main(name: str, arguments: list[str]) -> None:
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


def losses(folder: pathlib.Path) -> list[float]:
    """The training loss of each step of a run."""
    return [record["loss"] for record in read_metrics(folder / "metrics.jsonl") if "loss" in record]


def results(folder: pathlib.Path, name: str) -> list[float]:
    """What each evaluation of a run found."""
    return [record[name] for record in read_metrics(folder / "metrics.jsonl") if name in record]


def same_learning(folder: pathlib.Path, other: pathlib.Path, rel: float = 0.0) -> None:
    """Both runs recorded the same, but for times and memory."""
    pairs = [
        [learning(record) for record in read_metrics(path / "metrics.jsonl")]
        for path in (folder, other)
    ]
    assert [record.keys() for record in pairs[0]] == [record.keys() for record in pairs[1]]
    for got, want in zip(*pairs, strict=True):
        for key, value in want.items():
            assert abs(got[key] - value) <= rel * abs(value), (
                f"step {want['step']}: {key} is {got[key]}, expected {value}"
            )


def learning(record: dict[str, Any]) -> dict[str, Any]:
    """What of a record does not depend on the machine."""
    return {name: value for name, value in record.items() if name not in MEASURED}
