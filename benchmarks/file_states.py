"""States of Adam in files: how fast the disk is, how fast pages of files are, and whole updates.

python benchmarks/file_states.py --folder /nvme --parameters 2.5e9 --commit $(git rev-parse HEAD)

disk    loads of 128 MiB, as an update makes them, through pages of a file that are copied, as
        `AdamOffloadOptimizer` does it, and by direct I/O of four threads, which no cache of the
        kernel is in the way of. `cold`: nothing of the file is in memory; `cached`: all of it is.
        `settled_gb_s` counts until all is on the disk.
update  whole updates of bf16 weights with fp32 states, all in host memory and all in files; files
        that are larger than what is free of the memory come from the disk and go to it at every
        step.

Bandwidth in 10^9 bytes a second, each way. The states of --parameters are 12 bytes each.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import pathlib
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import torch

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "src"))

from machine import machine
from reports import report_of, write

import bmtrain as bmt
from bmtrain.optim.streaming import LOAD_BYTES

NUM_LOADS, THREADS = 16, 4
DIM = 8192  # of the matrices that are updated
BYTES_OF_STATE = 12
Copy = Callable[[int], object]


class File:
    """A file without a name, mapped and open for direct I/O; and memory for one load."""

    def __init__(self, folder: str) -> None:
        self.num_bytes = NUM_LOADS * LOAD_BYTES
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, self.num_bytes)
            self.pages = mmap.mmap(file.fileno(), self.num_bytes)
            self._number = os.dup(file.fileno())
            self._direct = os.open(f"/proc/self/fd/{file.fileno()}", os.O_RDWR | os.O_DIRECT)
        self.state = torch.frombuffer(self.pages, dtype=torch.uint8)
        self._memory = mmap.mmap(-1, LOAD_BYTES)
        self.load = torch.frombuffer(self._memory, dtype=torch.uint8).fill_(1)
        self._threads = ThreadPoolExecutor(THREADS)

    def forget(self) -> None:
        """Have nothing of it in memory."""
        self.settle()
        self.pages.madvise(mmap.MADV_DONTNEED)
        os.posix_fadvise(self._number, 0, self.num_bytes, os.POSIX_FADV_DONTNEED)

    def settle(self) -> None:
        """Return when all is on the disk."""
        os.fsync(self._number)

    def read(self, begin: int) -> None:
        """Copy one load out of its pages."""
        self.load.copy_(self.state[begin : begin + LOAD_BYTES])

    def write(self, begin: int) -> None:
        """Copy one load into its pages."""
        self.state[begin : begin + LOAD_BYTES].copy_(self.load)

    def read_directly(self, begin: int) -> None:
        """Read one load past the kernel's cache."""
        self._in_parts(os.preadv, begin)

    def write_directly(self, begin: int) -> None:
        """Write one load past the kernel's cache."""
        self._in_parts(os.pwritev, begin)

    def _in_parts(self, move: Callable[[int, Sequence[memoryview], int], int], begin: int) -> None:
        part, view = LOAD_BYTES // THREADS, memoryview(self._memory)
        calls = [
            self._threads.submit(move, self._direct, [view[at : at + part]], begin + at)
            for at in range(0, LOAD_BYTES, part)
        ]
        if sum(call.result() for call in calls) != LOAD_BYTES:
            raise OSError("the file ended early")


def disk_records(folder: str) -> Iterator[dict[str, Any]]:
    """Each way of reading and writing, cold first."""
    file = File(folder)
    ways: tuple[tuple[str, bool, Copy], ...] = (
        ("pages, first written", True, file.write),
        ("pages, read cold", True, file.read),
        ("pages, read cached", False, file.read),
        ("pages, written cold", True, file.write),
        ("pages, written cached", False, file.write),
        ("direct, read", True, file.read_directly),
        ("direct, written", True, file.write_directly),
    )
    for name, is_cold, copy in ways:
        if is_cold:
            file.forget()
        began = time.perf_counter()
        for begin in range(0, file.num_bytes, LOAD_BYTES):
            copy(begin)
        copied = time.perf_counter() - began
        file.settle()
        settled = time.perf_counter() - began
        yield {
            "what": "file states disk",
            "way": name,
            "gb": round(file.num_bytes / 1e9, 2),
            "gb_s": round(file.num_bytes / 1e9 / copied, 2),
            "settled_gb_s": round(file.num_bytes / 1e9 / settled, 2),
        }


def update_record(num_parameters: float, steps: int, folder: str | None) -> dict[str, Any]:
    """Seconds of whole updates, the first, which makes the states, apart."""
    blocks = [
        bmt.Block(torch.nn.Linear(DIM, DIM, bias=False, dtype=torch.bfloat16), use_checkpoint=False)
        for _ in range(max(1, round(num_parameters / DIM**2)))
    ]
    layers = bmt.TransformerBlockList(blocks)
    optimizer = bmt.optim.AdamOffloadOptimizer(
        layers.parameters(),
        1e-4,
        overlap=False,
        host_bytes=None if folder is None else 0,
        folder=folder,
    )
    x = torch.randn(1, DIM, dtype=torch.bfloat16, device=bmt.device())
    seconds = []
    for _ in range(1 + steps):
        optimizer.zero_grad()
        layers(x).float().square().mean().backward()
        bmt.synchronize()
        began = time.perf_counter()
        optimizer.step()
        bmt.synchronize()
        seconds.append(time.perf_counter() - began)
        print(f"{'host' if folder is None else 'files'}: {seconds[-1]:.2f} s", flush=True)
    states, step = BYTES_OF_STATE * len(blocks) * DIM**2, statistics.median(seconds[1:])
    return {
        "what": "file states update",
        "states": "in host memory" if folder is None else "in files",
        "parameters": len(blocks) * DIM**2,
        "states_gb": round(states / 1e9, 2),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "first_s": round(seconds[0], 2),
        "seconds": round(step, 2),
        "gb_s": round(states / 1e9 / step, 2),
    }


def main() -> None:
    """Measure and save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="of the disk")
    parser.add_argument("--parameters", type=float, default=2e8, help="with all states in files")
    parser.add_argument("--host-parameters", type=float, default=2e8, help="and in host memory")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--name", default="file-states")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument(
        "--out", type=pathlib.Path, default=pathlib.Path(__file__).parent / "results"
    )
    args = parser.parse_args()
    bmt.init_distributed(seed=0)
    device = bmt.device().type
    command = [
        "benchmarks/file_states.py",
        *("--parameters", f"{args.parameters:g}"),
        *("--host-parameters", f"{args.host_parameters:g}"),
        *("--steps", str(args.steps), "--name", args.name),
    ]
    report = report_of([], commit=args.commit, command=shlex.join(command), machine=machine(device))
    records = report["records"]
    for record in disk_records(args.folder):
        print(json.dumps(record), flush=True)
        records.append(record)
    for number, folder in ((args.host_parameters, None), (args.parameters, args.folder)):
        records.append(update_record(number, args.steps, folder))
        print(json.dumps(records[-1]), flush=True)
    write(report, args.out / f"{args.name}.json")


if __name__ == "__main__":
    main()
