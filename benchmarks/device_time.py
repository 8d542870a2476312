"""What a GPU did in a training step: its time by kind of work, and how much of the communication
other work hid.

`traced` runs steps under torch.profiler, `summary` is a pure function of what was traced.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import pathlib
import tempfile
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from intervals import covered, intersection, union

# Kinds of kernels by what their names hold, in lower case; the first kind that fits counts.
KERNELS: dict[str, tuple[str, ...]] = {
    # NCCL; barriers of symmetric memory; the sum that follows copies between ranks
    "communication": ("nccl", "barrier_kernel", "signal_kernel", "sum_parts", "symm_mem"),
    "attention": ("flash", "fmha", "sdpa", "attention", "dot_do_o"),
    "optimizer": ("multi_tensor_apply", "adam", "squares_kernel", "scale_kernel"),
    "matmul": ("gemm", "nvjet", "cutlass", "wgmma", "xmma", "splitk", "cublas", "triton_tem"),
    "copies": (
        "catarray",
        "chunk_cat",
        "split_with_sizes",
        "direct_copy",
        "copy_device_to_device",
        "memcpy",
    ),
    "elementwise and norms": (
        "triton",
        "elementwise",
        "norm",
        "gelu",
        "softmax",
        "reduce_kernel",
        "row_sums",
        "row_gradient",
        "nll_loss",
        "embedding",
        "index",
        "transpose_kernel",
        "gammabeta",
    ),
}
KINDS = (*KERNELS, "host copies", "other")
# What hides communication: work that the step is there for.
COMPUTE = ("attention", "optimizer", "matmul", "elementwise and norms", "other")
TRACED = ("kernel", "gpu_memcpy", "gpu_memset")
STEPS = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """One kernel, copy or fill: times in microseconds, the stream it ran on, and "kernel",
    "gpu_memcpy" or "gpu_memset".
    """

    name: str
    category: str
    stream: int
    begin: float
    end: float

    @property
    def interval(self) -> tuple[float, float]:
        return self.begin, self.end

    @property
    def duration(self) -> float:
        return self.end - self.begin


def kind_of(work: Work, compute_stream: int) -> str:
    """One of KINDS. A copy inside a GPU is communication on a side stream, where ranks fetch each
    other's memory.
    """
    if work.category == "gpu_memcpy":
        if "PtoP" in work.name:
            return "communication"
        if "HtoD" in work.name or "DtoH" in work.name:
            return "host copies"
        return "copies" if work.stream == compute_stream else "communication"
    if work.category == "gpu_memset":
        return "copies"
    name = work.name.lower()
    return next(
        (kind for kind, words in KERNELS.items() if any(word in name for word in words)), "other"
    )


def busiest_stream(works: Iterable[Work]) -> int:
    """Where the matrix products run; NCCL's kernels may be longer in sum, but only wait."""
    busy: collections.Counter[int] = collections.Counter()
    for work in works:
        if kind_of(work, work.stream) in COMPUTE:
            busy[work.stream] += round(1000 * work.duration)
    return busy.most_common(1)[0][0] if busy else 0


def summary(works: Sequence[Work], steps: int) -> dict[str, Any]:
    """Milliseconds a step, and shares.

    span: from the first to the last thing the GPU did. idle: nothing ran at all. kinds: the sum of
    what was done of each kind; streams overlap, so they may add up to more than the span.
    communication: what it covers. hidden: the share of it during which something was computed; None
    without communication. exposed: the rest of it, in milliseconds. longest: names of kernels and
    copies, their milliseconds, and how often they ran in all steps.
    """
    stream = busiest_stream(works)
    of_kind: dict[str, list[Work]] = collections.defaultdict(list)
    for work in works:
        of_kind[kind_of(work, stream)].append(work)
    moved = union(work.interval for work in of_kind["communication"])
    computed = union(work.interval for kind in COMPUTE for work in of_kind[kind])
    span = max(work.end for work in works) - min(work.begin for work in works)
    hidden = covered(intersection(moved, computed))

    def a_step(microseconds: float) -> float:
        return round(microseconds / steps / 1000, 3)

    return {
        "span": a_step(span),
        "idle": a_step(span - covered(work.interval for work in works)),
        "kinds": {
            kind: a_step(sum(work.duration for work in of_kind[kind]))
            for kind in KINDS
            if of_kind[kind]
        },
        "communication": a_step(covered(moved)),
        "exposed": a_step(covered(moved) - hidden),
        "hidden": round(hidden / covered(moved), 4) if moved else None,
        "longest": [[name, a_step(total), number] for name, total, number in longest(works, 12)],
    }


def longest(works: Iterable[Work], count: int) -> list[tuple[str, float, int]]:
    """Names that took the most time, with microseconds and how often they ran, over all steps."""
    times: collections.Counter[str] = collections.Counter()
    numbers: collections.Counter[str] = collections.Counter()
    for work in works:
        times[work.name[:100]] += work.duration  # type: ignore[assignment]  # a Counter adds up floats as well
        numbers[work.name[:100]] += 1
    return [(name, total, numbers[name]) for name, total in times.most_common(count)]


def read_trace(path: pathlib.Path) -> list[Work]:
    """What the device did, of a trace in the format of Chrome that torch.profiler exports."""
    events = json.loads(path.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
    return [
        Work(
            name=event["name"],
            category=event["cat"],
            stream=int(event["args"].get("stream", 0)),
            begin=float(event["ts"]),
            end=float(event["ts"]) + float(event["dur"]),
        )
        for event in events
        if event.get("ph") == "X" and event.get("cat") in TRACED
    ]


def traced(step: Callable[[], object]) -> list[Work]:
    """What the device did in STEPS steps, after one under the profiler that is not counted.

    It costs time: never time these.
    """
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=STEPS, repeat=1)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "trace.json"
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CUDA],
            schedule=schedule,
            acc_events=True,
            on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
        ) as profiler:
            for _ in range(1 + STEPS):
                step()
                torch.cuda.synchronize()
                profiler.step()
        return read_trace(path)
