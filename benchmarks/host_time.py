"""What a tiny block costs the host, forward and backward, beside `fully_shard` of torch.

torchrun --standalone --nproc-per-node 2 benchmarks/host_time.py --commit $(git rev-parse HEAD)

Blocks of eight columns on CPUs: nearly all of the time is that of Python and torch. A Block by
default recomputes, as `fully_shard` does under torch's checkpoint; one with use_checkpoint=False
keeps its activations, as `fully_shard` alone. All four take turns in one process. Cores may be
shared: the least of many rounds counts, and the time of processors, which no waiting is part of.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "src"))

from machine import machine
from reports import report_of, write

import bmtrain as bmt
from models import FeedForward

WIDTH, ROWS, BLOCKS, WARM_UP = 8, 2, 8, 5
Forward = Callable[[torch.Tensor], torch.Tensor]


def models() -> dict[str, Forward]:
    """Chains of blocks: ours and torch's, recomputing and keeping."""
    mesh = init_device_mesh("cpu", (bmt.world_size(),))

    def sharded() -> torch.nn.Sequential:
        model = torch.nn.Sequential(*[FeedForward(WIDTH) for _ in range(BLOCKS)])
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model

    def of_blocks(**options: Any) -> torch.nn.Sequential:
        return torch.nn.Sequential(
            *[bmt.Block(FeedForward(WIDTH), **options) for _ in range(BLOCKS)]
        )

    class Recomputed(torch.nn.Module):
        """A layer under torch's checkpoint, as a member of a sharded model."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = FeedForward(WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """x: (rows, width)."""
            out: torch.Tensor = checkpoint(self.inner, x, use_reentrant=False)
            return out

    recomputing = torch.nn.Sequential(*[Recomputed() for _ in range(BLOCKS)])
    for layer in recomputing:
        fully_shard(layer, mesh=mesh)
    fully_shard(recomputing, mesh=mesh)
    return {
        "block": of_blocks(),
        "fully_shard under checkpoint": recomputing,
        "block, use_checkpoint=False": of_blocks(use_checkpoint=False),
        "fully_shard": sharded(),
    }


def turn(model: Forward, x: torch.Tensor) -> tuple[float, float, float, float]:
    """Seconds of forward and of backward, then of processors in each."""
    begin, busy = time.perf_counter(), time.process_time()
    loss = model(x).square().mean()
    middle, busy_until = time.perf_counter(), time.process_time()
    loss.backward()
    end, busy_at_end = time.perf_counter(), time.process_time()
    return middle - begin, end - middle, busy_until - busy, busy_at_end - busy_until


def main() -> None:
    """Measure and save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument(
        "--out", type=pathlib.Path, default=pathlib.Path(__file__).parent / "results"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    bmt.init_distributed(seed=0, device="cpu")
    x = torch.randn(ROWS, WIDTH)
    chains = models()
    seconds: dict[str, list[tuple[float, float, float, float]]] = {name: [] for name in chains}
    for number in range(WARM_UP + args.rounds):
        for name in list(chains) if number % 2 else reversed(list(chains)):
            seconds[name].append(turn(chains[name], x))
    records: list[dict[str, Any]] = []
    for name, rows in seconds.items():
        columns = list(zip(*rows[WARM_UP:], strict=True))
        kinds = ("forward", "backward", "processor_forward", "processor_backward")
        record: dict[str, Any] = {"what": "host time", "library": name}
        record |= {"ranks": bmt.world_size(), "blocks": BLOCKS}
        for kind, values in zip(kinds, columns, strict=True):
            record[kind] = {
                "least_us": round(1e6 * min(values) / BLOCKS, 1),
                "median_us": round(1e6 * statistics.median(values) / BLOCKS, 1),
            }
        records.append(record)
    if bmt.rank() == 0:
        for record in records:
            print(json.dumps(record), flush=True)
        command = (
            f"torchrun --standalone --nproc-per-node {bmt.world_size()} benchmarks/host_time.py "
            f"--rounds {args.rounds}"
        )
        report = report_of(records, commit=args.commit, command=command, machine=machine("cpu"))
        write(report, args.out / f"host-time-{bmt.world_size()}.json")


if __name__ == "__main__":
    main()
