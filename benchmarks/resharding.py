"""A checkpoint of a large model, written by some ranks and read by other numbers of them.

    python benchmarks/resharding.py --shape llama-8b-4096 --write 4 --read 1 2 4 \
        --out benchmarks/results/resharding.json --commit $(git rev-parse HEAD)

All ranks train on the same rows, so the mean of their gradients is that of one, exactly for 1, 2, 4
or 8 of them: the losses of every step are the same to the bit for any number of ranks, if weights
and states of Adam came back whole. Each reader makes the steps that the writer made after saving.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch
from machine import machine_from_outside
from reports import report_of, write

import bmtrain as bmt
from models import SHAPES, initialise

RESULT = "RESULT "
STEPS = 2  # before the checkpoint, and after it


def measure(args: argparse.Namespace) -> None:
    """Train, save and go on, or restore and go on, in these ranks."""
    bmt.init_distributed(seed=0, device=args.device)
    shape = SHAPES[args.shape]
    with torch.device("meta"):
        model: Any = shape.model().to(torch.bfloat16)
    model.blocks = bmt.TransformerBlockList(bmt.Block(each) for each in model.blocks)
    model = bmt.BMTrainModelWrapper(model)
    bmt.init_parameters(model)
    initialise(model)
    manager = bmt.optim.OptimManager(loss_scale=None)
    manager.add_optimizer(bmt.optim.AdamOptimizer(model.parameters(), lr=1e-4))
    rows = torch.randint(
        shape.vocab, (1, args.tokens + 1), generator=torch.Generator().manual_seed(0)
    ).to(bmt.device())

    def steps() -> list[float]:
        losses = []
        for _ in range(STEPS):
            manager.zero_grad()
            loss = model(rows[:, :-1], rows[:, 1:])
            manager.backward(loss)
            manager.step()
            losses.append(loss.detach())
        return [float(loss) for loss in losses]

    checkpoints = bmt.CheckpointManager(args.folder, background=False)
    if args.saves:
        steps()
    bmt.synchronize()
    begun = time.perf_counter()
    if args.saves:
        checkpoints.save(STEPS, model, manager)
    elif checkpoints.restore(model, manager) is None:
        raise SystemExit(f"{args.folder}: there is no checkpoint")
    bmt.synchronize()
    seconds = time.perf_counter() - begun
    files = [path for path in args.folder.rglob("*") if path.is_file()]
    record = {
        "what": "resharding",
        "shape": args.shape,
        "ranks": bmt.world_size(),
        "done": "written" if args.saves else "read",
        "seconds": round(seconds, 1),
        "gb": round(sum(path.stat().st_size for path in files) / 1e9, 2),
        "losses_after": steps(),
    }
    bmt.print_rank(RESULT + json.dumps(record), flush=True)


def launched(args: argparse.Namespace, ranks: int, folder: pathlib.Path, saves: bool) -> Any:
    """The record of so many ranks, or what they said last."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={ranks}", __file__, "--measure", "--shape", args.shape]
    command += ["--folder", str(folder), "--tokens", str(args.tokens), "--device", args.device]
    begun = time.perf_counter()
    done = subprocess.run(
        [*command, *(["--saves"] if saves else [])], capture_output=True, text=True, check=False
    )
    found = [x.removeprefix(RESULT) for x in done.stdout.splitlines() if x.startswith(RESULT)]
    record = json.loads(found[0]) if found else {"ranks": ranks, "failed": done.stderr[-800:]}
    record |= {"what": "resharding", "whole_run_s": round(time.perf_counter() - begun, 1)}
    print(json.dumps(record), flush=True)
    return record


def main() -> None:
    """Write once, read by each number of ranks, compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", action="store_true", help="in these processes")
    parser.add_argument("--saves", action="store_true")
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b-4096")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--write", type=int, default=4, help="ranks that write")
    parser.add_argument("--read", type=int, nargs="+", default=[1, 2, 4], help="ranks that read")
    parser.add_argument("--folder", type=pathlib.Path)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args()
    if args.measure:
        measure(args)
        return
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCHMARK_FOLDER")) as folder:
        records = [launched(args, args.write, pathlib.Path(folder), saves=True)]
        records += [launched(args, n, pathlib.Path(folder), saves=False) for n in args.read]
    wanted = records[0].get("losses_after")
    for record in records:
        record["same_to_the_bit"] = wanted is not None and record.get("losses_after") == wanted
    print("same to the bit:", [record["same_to_the_bit"] for record in records])
    if args.out is not None:
        command = (
            f"python benchmarks/resharding.py --shape {args.shape} --write {args.write} "
            f"--read {' '.join(map(str, args.read))}"
        )
        report = report_of(
            records, commit=args.commit, command=command, machine=machine_from_outside()
        )
        write(report, args.out)


if __name__ == "__main__":
    main()
