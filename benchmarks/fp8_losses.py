"""Does FP8 train as well as bf16? The GPT-2 example in both, one run per GPU: python
benchmarks/fp8_losses.py --seeds 0 1 2 3

Two runs of a small model differ by tenths of a percent already, so there are several seeds. Writes
the losses of all runs and how the two kinds differ, by seed and on average, to
`results/fp8-losses-1gpu.json`.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import pathlib
import queue
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from machine import machine, machine_from_outside
from reports import report_of, write
from tables import tables_of

ROOT = pathlib.Path(__file__).parents[1]
KINDS: dict[str, list[str]] = {"bf16": [], "fp8": ["--fp8"]}
LAST = 50  # training losses are of single batches: so many are averaged

Metrics = list[dict[str, Any]]


def train(
    kind: str, seed: int, folder: pathlib.Path, arguments: Sequence[str], gpu: str
) -> Metrics:
    """The records that the example leaves. Raises CalledProcessError for one that fails."""
    own = folder / f"{kind}-{seed}"
    command = [
        sys.executable,
        str(ROOT / "examples" / "gpt2" / "train.py"),
        *KINDS[kind],
        *arguments,
        "--seed",
        str(seed),
        "--sample-tokens",
        "0",
        "--no-deterministic",
        "--restart",
        "--save-dir",
        str(own),
        "--cache-dir",
        str(folder / f"cache-{gpu}"),
    ]
    subprocess.run(
        command, check=True, stdout=sys.stderr, env={**os.environ, "CUDA_VISIBLE_DEVICES": gpu}
    )
    return [json.loads(line) for line in (own / "metrics.jsonl").read_text().splitlines()]


def gpus() -> list[str]:
    """Names of those that this program may use; without any, one that is none."""
    count, visible = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
    names = map(str, range(count)) if visible is None else visible.split(",")[:count]
    return list(names) or [""]


def train_all(
    seeds: Sequence[int], arguments: Sequence[str], names: Sequence[str]
) -> dict[int, dict[str, Metrics]]:
    """By seed and kind; one at a time on each of the GPUs of these names."""
    free: queue.Queue[str] = queue.Queue()
    for gpu in names:
        free.put(gpu)

    def one(seed: int, kind: str) -> Metrics:
        gpu = free.get()
        try:
            return train(kind, seed, pathlib.Path(folder), arguments, gpu)
        finally:
            free.put(gpu)

    with (
        tempfile.TemporaryDirectory() as folder,
        concurrent.futures.ThreadPoolExecutor(len(names)) as pool,
    ):
        under_way = {seed: {kind: pool.submit(one, seed, kind) for kind in KINDS} for seed in seeds}
        return {
            seed: {kind: run.result() for kind, run in runs.items()}
            for seed, runs in under_way.items()
        }


def losses_of(metrics: Metrics, name: str) -> dict[int, float]:
    """By step."""
    return {record["step"]: record[name] for record in metrics if record.get(name) is not None}


def compared(runs: dict[str, Metrics]) -> dict[str, Any]:
    """What is left of both in the end, and how much more FP8's is as a part of bf16's."""
    training = {kind: losses_of(metrics, "loss") for kind, metrics in runs.items()}
    validation = {kind: losses_of(metrics, "validation_loss") for kind, metrics in runs.items()}
    ends = {
        "training": {
            kind: statistics.fmean(list(losses.values())[-LAST:])
            for kind, losses in training.items()
        },
        "validation": {kind: losses[max(losses)] for kind, losses in validation.items()},
    }
    return {name: {**end, "more": end["fp8"] / end["bf16"] - 1} for name, end in ends.items()} | {
        "losses": training
    }


def main() -> None:
    """Train all, compare, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--preset", default="gpt2", help="of the example")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--commit", default="unknown")
    parser.add_argument(
        "--out", type=pathlib.Path, default=ROOT / "benchmarks" / "results" / "fp8-losses-1gpu.json"
    )
    args, others = parser.parse_known_args()
    arguments = [
        "--preset",
        args.preset,
        "--steps",
        str(args.steps),
        "--val-every",
        str(max(1, args.steps // 3)),
        *others,
    ]
    runs = train_all(args.seeds, arguments, gpus())
    records = [
        {"what": "fp8 losses", "seed": seed, **compared(of_seed)} for seed, of_seed in runs.items()
    ]
    facts = machine_from_outside() if torch.cuda.is_available() else machine("cpu")
    command = " ".join(["benchmarks/fp8_losses.py", *arguments, "--seeds", *map(str, args.seeds)])
    report = report_of(records, commit=args.commit, command=command, machine=facts)
    write(report, args.out)
    print(tables_of(report))


if __name__ == "__main__":
    main()
