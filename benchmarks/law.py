"""What the ledger costs on CPUs: an ordinary step with it and without it.

torchrun --standalone --nproc-per-node 2 benchmarks/law.py --commit $(git rev-parse HEAD)

Four blocks, a wrapper, an AdamOptimizer and an OptimManager that clips. Steps with and without the
ledger alternate in one process, in pairs whose order alternates too. Without it nothing is logged
and no words travel alone; the data travel as they do with it. Where other programs share the cores,
the least time, the time of processors and the median over pairs tell more than a median of steps.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "src"))

from machine import machine
from reports import report_of, write

import bmtrain as bmt
from bmtrain.distributed.ledger import Ledger
from models import FeedForward

BLOCKS, WARM_UP = 4, 3


class Model(torch.nn.Module):
    """Blocks in a list, and a loss."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([FeedForward(width) for _ in range(BLOCKS)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (rows, width)."""
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def step_of(width: int, rows: int) -> Callable[[], None]:
    """A step of training."""
    model = bmt.BMTrainModelWrapper(Model(width))
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=1e-4)
    manager = bmt.optim.OptimManager(loss_scale=None)
    manager.add_optimizer(optimizer)
    x = torch.randn(rows, width)

    def step() -> None:
        manager.zero_grad()
        manager.backward(model(x))
        manager.clip_grad_norm(optimizer.param_groups, 1.0)
        manager.step()

    return step


@contextmanager
def without() -> Iterator[None]:
    """Nothing is logged, and no words travel alone."""
    with (
        mock.patch.object(Ledger, "note", lambda *_: None),
        mock.patch.object(Ledger, "compare", lambda *_: None),
    ):
        yield


def counted(step: Callable[[], None]) -> dict[str, int]:
    """How often the ranks exchange words alone in a step, and words with data."""
    with (
        mock.patch.object(Ledger, "swap", autospec=True, side_effect=Ledger.swap) as swap,
        mock.patch.object(Ledger, "compare", autospec=True, side_effect=Ledger.compare) as compare,
    ):
        step()
    return {"alone": compare.call_count, "with_data": swap.call_count - compare.call_count}


def main() -> None:
    """Measure and save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument(
        "--out", type=pathlib.Path, default=pathlib.Path(__file__).parent / "results"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    bmt.init_distributed(seed=0, device="cpu")
    step = step_of(args.width, args.rows)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    used: dict[bool, list[float]] = {True: [], False: []}
    for number in range(2 * (WARM_UP + args.steps)):
        is_with = number % 4 in (0, 3)
        with nullcontext() if is_with else without():
            begin, busy = time.perf_counter(), time.process_time()
            step()
            seconds[is_with].append(time.perf_counter() - begin)
            used[is_with].append(time.process_time() - busy)
    record: dict[str, Any] = {"what": "the law", "blocks": BLOCKS, "ranks": bmt.world_size()}
    record |= {"width": args.width, "rows": args.rows, **counted(step)}
    for name, is_with in (("with", True), ("without", False)):
        kept, busy_s = seconds[is_with][WARM_UP:], used[is_with][WARM_UP:]
        record[name] = {
            "median_s": round(statistics.median(kept), 5),
            "least_s": round(min(kept), 5),
            "processor_median_s": round(statistics.median(busy_s), 5),
            "processor_least_s": round(min(busy_s), 5),
        }
    pairs = zip(seconds[True][WARM_UP:], seconds[False][WARM_UP:], strict=True)
    record["median_of_pairs"] = round(statistics.median([a / b for a, b in pairs]), 4)
    if bmt.rank() == 0:
        print(json.dumps(record), flush=True)
        command = (
            f"torchrun --standalone --nproc-per-node {bmt.world_size()} benchmarks/law.py "
            f"--width {args.width} --rows {args.rows} --steps {args.steps}"
        )
        report = report_of([record], commit=args.commit, command=command, machine=machine("cpu"))
        write(report, args.out / "law.json")


if __name__ == "__main__":
    main()
