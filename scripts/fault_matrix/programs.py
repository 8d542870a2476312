"""The two programs, tiny, and what their runs leave in their folders."""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

from scripts.fault_matrix.jobs import ROOT, plain_environment

from bmtrain.checkpoint import folder as folders
from bmtrain.checkpoint.shards import NAME, verify
from bmtrain.errors import CheckpointError
from model_center.training.metrics_file import MEASURED, read_metrics

SAVE_EVERY = 3  # steps


@dataclasses.dataclass(frozen=True)
class Program:
    """A program with its arguments.

    Attributes:
        name: for the table.
        path: of it.
        arguments: all but the folder of checkpoints, `save` FOLDER.
        resume: what makes it go on.
        exports: the folder of its finished model, None if it writes none.
    """

    name: str
    path: pathlib.Path
    arguments: list[str]
    save: str
    resume: list[str]
    exports: str | None

    def command(self, folder: pathlib.Path, *more: str, resume: bool = False) -> list[str]:
        """For a run in this folder; `more` overrides arguments."""
        again = self.resume if resume else []
        return [str(self.path), *self.arguments, self.save, str(folder), *again, *more]


def make_programs(folder: pathlib.Path) -> list[Program]:
    """Both."""
    return [make_gpt2(folder), make_bert(folder)]


def make_gpt2(folder: pathlib.Path) -> Program:
    """The example, with its data in this folder."""
    text = folder / "text"
    text.mkdir(parents=True)
    lines = pathlib.Path(argparse.__file__).read_text(encoding="utf-8").splitlines()
    for start in range(0, 1500, 50):
        part = "\n".join(lines[start : start + 50])
        (text / f"{start}.txt").write_text(part, encoding="utf-8")
    flags = f"--data {text} --cache-dir {folder / 'cache'} --layers 2 --dim 32 --heads 4 "
    flags += "--vocab-size 512 --seq-len 32 --batch-size 4 --steps 14 --warmup 2 --val-every 7 "
    flags += f"--val-samples 5 --sample-tokens 3 --save-every {SAVE_EVERY} --max-bad-steps 2"
    path = ROOT / "examples" / "gpt2" / "train.py"
    return Program("examples/gpt2/train.py", path, flags.split(), "--save-dir", [], None)


def make_bert(folder: pathlib.Path) -> Program:
    """A program on `model_center`, with its model in this folder."""
    examples, model = ROOT / "examples" / "language_models", folder / "bert"
    making = [sys.executable, str(examples / "tiny_model.py"), "bert", str(model)]
    subprocess.run(
        making, env={**os.environ, **plain_environment()}, check=True, stdout=subprocess.DEVNULL
    )
    flags = f"--model-config {model} --base-path {ROOT / 'tests' / 'data'} --dtype fp32 --lr 2e-3 "
    flags += "--lr-decay-style cosine --dataset_name BoolQ --batch-size 16 --epochs 2 "
    flags += f"--max-encoder-length 48 --save-iters {SAVE_EVERY} --max-bad-steps 2"
    name, path = "examples/language_models/finetune_bert.py", examples / "finetune_bert.py"
    return Program(name, path, flags.split(), "--save", ["--resume"], "model")


def records(folder: pathlib.Path) -> list[dict[str, Any]]:
    """What of a run's record does not depend on the machine."""
    return [
        {key: value for key, value in record.items() if key not in MEASURED}
        for record in read_metrics(folder / "metrics.jsonl")
    ]


def steps_done(folder: pathlib.Path) -> int:
    """The last step of the record."""
    return max((record["step"] for record in records(folder) if "loss" in record), default=0)


def resumed_step(printed: str) -> int | None:
    """From which step a job went on; None if it never began."""
    found = re.search(
        r"resuming from \S*?step-([0-9]{8})|starting from scratch", printed.replace("\n", "")
    )
    return None if found is None else int(found[1] or 0)


def damaged(folder: pathlib.Path) -> list[str]:
    """What is wrong with checkpoints that count."""
    wrong = []
    for path in folders.complete(folder):
        try:
            verify(path)
        except CheckpointError as error:
            if (path / NAME).exists():
                wrong.append(str(error))
    return wrong
