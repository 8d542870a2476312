"""The optimizer in host memory: speed and memory of GPT 2.7B on one GPU with updates hidden, not
hidden, and with some of the states on the GPU; and of the CPU's update alone.

PYTHONPATH=src:benchmarks python benchmarks/offload.py

Each part is a process of its own; what fails says why, and the rest goes on. Writes offload.json
into the folder OUT (or here) and prints a table.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import time
from typing import Any

import torch
from backends import Ours, init_arguments
from throughput import batch_of, measure
from timeline import Recorder, table

import bmtrain as bmt
from bmtrain.kernels.adam import AdamSettings, AdamTensors
from bmtrain.optim import host_update
from bmtrain.optim.host_memory import host_buffer
from bmtrain.optim.offload import AdamOffloadOptimizer
from bmtrain.optim.worker import Worker
from bmtrain.runtime import world
from models import Geometry
from options import from_words

COMMON = "--backend bmtrain --shape 2.7b --batch 8 32 --recompute --warmup 3 --steps 5"
PARTS = {
    "cpu": "",
    "hidden": f"{COMMON} --offload",
    "at once": f"{COMMON} --offload --no-overlap",
    "16 GiB on the GPU": f"{COMMON} --offload --device-states 16",
    "24 GiB on the GPU": f"{COMMON} --offload --device-states 24",
    "states on the GPU": COMMON,
}
LIMIT_S = 170
NUM_RECORDED = 3


def throughput(words: str) -> list[dict[str, Any]]:
    """Records of all batch sizes; with the CPU's and the waiting seconds of a step."""
    options = from_words(words)
    torch._dynamo.config.automatic_dynamic_shapes = False
    bmt.init_distributed(seed=0, **init_arguments(options))
    backend = Ours(options)
    records = []
    for batch in options.batch:
        record = {"batch": batch, **measure(backend, options, batch)}
        if isinstance(backend.optimizer, AdamOffloadOptimizer):
            record |= seconds_of(backend, options.geometry, batch)
        records.append(record)
        print(json.dumps(record), flush=True)
    return records


def seconds_of(backend: Ours, shape: Geometry, batch: int) -> dict[str, Any]:
    """Of three more steps: what happened when; of each, how long the CPU computes, and how long the
    program waits for it.
    """
    optimizer: Any = backend.optimizer
    optimizer.settle()
    found = Recorder(backend).record(batch_of(shape, batch), NUM_RECORDED)
    print("\n".join(table(found)), flush=True)

    def busy(kind: str) -> float:
        return round(sum(end - begin for begin, end in found["spans"][kind]) / NUM_RECORDED, 4)

    return {
        "cpu_s": busy("cpu"),
        "waits_s": busy("wait"),
        "down_s": busy("down"),
        "up_s": busy("up"),
        "not_hidden": len(optimizer._held),
        "updates": len(optimizer._updates),
        "timeline": found,
    }


def cpu_alone() -> list[dict[str, Any]]:
    """Parameters a second of the CPU's update, without copies beside it."""
    bmt.init_distributed(seed=0)
    current, device = world.current(), torch.device("cuda")
    numel, cores = 1 << 27, len(os.sched_getaffinity(0))
    bus, found = host_update.Bus(device), []
    weight, grad = (torch.zeros(numel, dtype=torch.bfloat16, device=device) for _ in range(2))
    states = [host_buffer(numel, torch.float32, device).zero_() for _ in range(3)]
    buffer = host_buffer(numel, torch.bfloat16, device)
    settings = AdamSettings(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, step=3)
    for threads in (cores - 1, cores - 2, cores):
        worker = Worker(current)
        worker._num_threads = threads
        for bits in (20, 21, 22, 23, 24):
            host_update.CHUNK = 1 << bits
            best = 0.0
            for _ in range(3):
                bus.begin()
                series = host_update.Series(bus, worker)
                began = time.perf_counter()
                series.begin(AdamTensors(weight, grad, *states), settings, buffer, records=False)
                series.updates[0].finish()
                torch.cuda.synchronize()
                best = max(best, numel / (time.perf_counter() - began))
            found.append(
                {"threads": threads, "chunk": bits, "billions_per_s": round(best / 1e9, 2)}
            )
            print(json.dumps(found[-1]), flush=True)
    return found


def child(name: str) -> None:
    """Measure one part; its last line is the result."""
    result = cpu_alone() if name == "cpu" else throughput(PARTS[name])
    print("RESULT " + json.dumps(result), flush=True)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a part has found, or the end of what it has printed."""

    records: list[dict[str, Any]]
    failure: str = ""


def run(name: str) -> Outcome:
    """Measure one part in a process of its own."""
    command = [sys.executable, __file__, name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        printed = done.stdout + done.stderr
    except subprocess.TimeoutExpired as error:
        printed = f"{error.stdout!r}\n{error.stderr!r}\nno end after {LIMIT_S} s"
    for line in printed.splitlines():
        if line.startswith("RESULT "):
            return Outcome(json.loads(line.removeprefix("RESULT ")))
    return Outcome([], printed[-4000:])


def main() -> None:
    """All parts, or the one that is named."""
    if len(sys.argv) == 2:
        child(sys.argv[1])
        return
    outcomes = {name: run(name) for name in PARTS}
    out = pathlib.Path(os.environ.get("OUT", ".")) / "offload.json"
    out.write_text(
        json.dumps({name: dataclasses.asdict(one) for name, one in outcomes.items()}, indent=1)
    )
    for name, one in outcomes.items():
        if one.failure:
            print(f"--- {name} failed:\n{one.failure}")
    for record in outcomes["cpu"].records:
        print("cpu", *record.items())
    columns = [
        *("batch", "tokens_per_second_per_gpu", "step_seconds", "cpu_s", "waits_s", "down_s"),
        *("up_s", "not_hidden", "allocated_gib", "device_gib", "host_gib", "loss"),
    ]
    print("| setting |", " | ".join(columns), "|")
    for name, one in outcomes.items():
        for record in one.records if name != "cpu" else []:
            print(f"| {name} |", " | ".join(str(record.get(x, "")) for x in columns), "|")


if __name__ == "__main__":
    main()
