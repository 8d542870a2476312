"""Does FP8 train as well as bf16? The GPT-2 example in both, on one GPU: python benchmarks/fp8_losses.py

Writes the losses of both and how they differ to `results/fp8-losses-1gpu.json`.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from machine import machine, machine_from_outside
from reports import report_of, write

ROOT = pathlib.Path(__file__).parents[1]
KINDS: dict[str, list[str]] = {"bf16": [], "fp8": ["--fp8"]}
LAST = 50  # training losses are of single batches: so many are averaged

Metrics = list[dict[str, Any]]


def train(kind: str, folder: pathlib.Path, arguments: Sequence[str]) -> Metrics:
    """The records that the example leaves. Raises CalledProcessError for one that fails."""
    command = [
        sys.executable, str(ROOT / "examples" / "gpt2" / "train.py"), *KINDS[kind], *arguments, "--sample-tokens", "0",
        "--no-deterministic", "--restart", "--save-dir", str(folder / kind), "--cache-dir", str(folder / "cache"),
    ]  # fmt: skip
    subprocess.run(command, check=True, stdout=sys.stderr)
    return [json.loads(line) for line in (folder / kind / "metrics.jsonl").read_text().splitlines()]


def losses_of(metrics: Metrics, name: str) -> dict[int, float]:
    """By step."""
    return {record["step"]: record[name] for record in metrics if record.get(name) is not None}


def compared(runs: dict[str, Metrics]) -> dict[str, Any]:
    """What is left of both in the end, and how much more FP8's is as a part of bf16's."""
    training = {kind: losses_of(metrics, "loss") for kind, metrics in runs.items()}
    validation = {kind: losses_of(metrics, "validation_loss") for kind, metrics in runs.items()}
    ends = {
        "training": {kind: statistics.fmean(list(losses.values())[-LAST:]) for kind, losses in training.items()},
        "validation": {kind: losses[max(losses)] for kind, losses in validation.items()},
    }
    return {name: {**end, "more": end["fp8"] / end["bf16"] - 1} for name, end in ends.items()} | {"losses": training}


def main() -> None:
    """Train twice, compare, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--preset", default="gpt2", help="of the example")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "benchmarks" / "results" / "fp8-losses-1gpu.json")
    args, others = parser.parse_known_args()
    arguments = ["--preset", args.preset, "--steps", str(args.steps), "--val-every", str(max(1, args.steps // 3)), *others]
    with tempfile.TemporaryDirectory() as folder:
        found = compared({kind: train(kind, pathlib.Path(folder), arguments) for kind in KINDS})
    facts = machine_from_outside() if torch.cuda.is_available() else machine("cpu")
    command = " ".join(["benchmarks/fp8_losses.py", *arguments])
    write(report_of([{"what": "fp8 losses", **found}], commit=args.commit, command=command, machine=facts), args.out)
    for name in ("training", "validation"):
        print(f"{name}: bf16 {found[name]['bf16']:.4f}, FP8 {found[name]['fp8']:.4f}, {found[name]['more']:+.2%}")


if __name__ == "__main__":
    main()
