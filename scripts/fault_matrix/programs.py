"""The programs, tiny, and what their runs leave in their folders."""

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
GPT2, TRAIN, OWN_LOOP = "examples/gpt2/train.py", "model_center train", "own loop"


@dataclasses.dataclass(frozen=True)
class Program:
    """A program with its arguments.

    Attributes:
        name: for the table.
        program: its file, or -m and its module, and what comes first.
        arguments: all but the folder of checkpoints, `save` FOLDER.
        resume: what makes it go on.
        exports: the folder of its finished model, None if it writes none.
    """

    name: str
    program: list[str]
    arguments: list[str]
    save: str
    resume: list[str]
    exports: str | None

    @property
    def folder(self) -> str:
        """A name for the folder of its runs."""
        return re.sub(r"\W+", "-", self.name)

    def command(self, folder: pathlib.Path, *more: str, resume: bool = False) -> list[str]:
        """For a run in this folder; `more` overrides arguments."""
        again = self.resume if resume else []
        return [*self.program, *self.arguments, self.save, str(folder), *again, *more]


def make_programs(folder: pathlib.Path) -> list[Program]:
    """All."""
    own = str(pathlib.Path(__file__).with_name("own_loop.py"))
    return [make_gpt2(folder), make_train(folder), Program(OWN_LOOP, [own], [], "--save", [], None)]


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
    return Program(GPT2, [str(ROOT / GPT2)], flags.split(), "--save-dir", [], None)


def make_train(folder: pathlib.Path) -> Program:
    """The command that trains language models, with its model in this folder."""
    model, data = folder / "qwen3", ROOT / "tests" / "data" / "chat"
    making = [sys.executable, str(ROOT / "examples" / "language_models" / "tiny_model.py")]
    subprocess.run(
        [*making, "qwen3", str(model)],
        env={**os.environ, **plain_environment()},
        check=True,
        stdout=subprocess.DEVNULL,
    )
    flags = f"--model-config {model} --data {data / 'train.jsonl'} --dtype fp32 --lr 2e-3 "
    flags += f"--validation {data / 'val.jsonl'} --max-length 64 --batch-size 1 --epochs 100 "
    flags += f"--train-iters 14 --save-iters {SAVE_EVERY} --max-bad-steps 2 --log-iters 1 "
    flags += "--gradient-accumulation 4"
    program = ["-m", "model_center", "train"]
    return Program(TRAIN, program, flags.split(), "--save", ["--resume"], "model")


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
