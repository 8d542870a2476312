"""The optimizer in host memory: speed and memory of GPT 2.7B on one GPU with updates hidden, not
hidden, with some of the states on the GPU, and with smaller ones.

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
from typing import Any

import torch
from backends import Ours, init_arguments
from throughput import batch_of, measure
from timeline import Recorder, table

import bmtrain as bmt
from bmtrain.optim.offload import AdamOffloadOptimizer
from models import Geometry
from options import from_words

PLAIN = "--backend bmtrain --shape 2.7b --batch 8 32 --warmup 3 --steps 5"
COMMON = f"{PLAIN} --recompute"
PARTS = {
    "hidden": f"{COMMON} --offload",
    "hidden, nothing recomputed": f"{PLAIN} --offload",
    "at once": f"{COMMON} --offload --no-overlap",
    "16 GiB on the GPU": f"{PLAIN} --offload --device-states 16",
    "what fits on the GPU": f"{PLAIN} --offload --device-states auto",
    "8-bit moments": f"{PLAIN} --offload --moments 8bit --master-weights split",
    "states on the GPU": COMMON,
    "states on the GPU, nothing recomputed": PLAIN,
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
    """Of three more steps: what happened when; of each, how long loads take in all."""
    optimizer: Any = backend.optimizer
    optimizer.wait()
    found = Recorder(backend).record(batch_of(shape, batch), NUM_RECORDED)
    print("\n".join(table(found)), flush=True)
    loads, count = found["loads"], len(found["loads"]) // NUM_RECORDED
    ends = [loads[place : place + count] for place in range(0, len(loads), count)] if count else []
    return {
        "loads": count,
        "passage_s": [round(own[-1][3] - own[0][0], 4) for own in ends],
        "not_hidden": len(optimizer._held),
        "steps": found["steps"],
    }


def child(name: str) -> None:
    """Measure one part; its last line is the result."""
    print("RESULT " + json.dumps(throughput(PARTS[name])), flush=True)


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
    out, outcomes = pathlib.Path(os.environ.get("OUT", ".")) / "offload.json", {}
    for name in PARTS:
        outcomes[name] = run(name)
        found = {name: dataclasses.asdict(one) for name, one in outcomes.items()}
        out.write_text(json.dumps(found, indent=1))
    for name, one in outcomes.items():
        if one.failure:
            print(f"--- {name} failed:\n{one.failure}")
    columns = [
        *("batch", "tokens_per_second_per_gpu", "step_seconds", "passage_s", "not_hidden"),
        *("allocated_gib", "device_gib", "host_gib", "loss"),
    ]
    print("| setting |", " | ".join(columns), "|")
    for name, one in outcomes.items():
        for record in one.records:
            print(f"| {name} |", " | ".join(str(record.get(x, "")) for x in columns), "|")


if __name__ == "__main__":
    main()
