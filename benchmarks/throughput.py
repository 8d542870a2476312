"""Tokens per second, memory and MFU of one backend. One JSON record per batch size, appended to
--out.

torchrun --standalone --nproc_per_node=4 benchmarks/throughput.py --backend bmtrain --shape 13b
--batch 8 24 `benchmarks/compare.py` runs several backends one after another and writes the
comparison.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import resource
import statistics
import time
from typing import Any

import psutil
import torch
from backends import BACKENDS, Backend, init_arguments
from device_time import STEPS, longest, summary, traced

import bmtrain as bmt
from models import Geometry
from options import Options, checked, parser

# NVIDIA's figures for dense bf16, which MFU is a fraction of (FP8 runs too), by what the name of
# the GPU holds.
PEAK_FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "GH200": 989e12, "B200": 2250e12}
GIB = 2**30


def peak_flops(gpu: str) -> float | None:
    """Of this GPU; None where it is not known here."""
    return next((peak for name, peak in PEAK_FLOPS.items() if name in gpu), None)


def batch_of(shape: Geometry, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and the next tokens, (batch, seq) each, the same for every backend: this rank's
    rows of one batch, which so many rows on any number of ranks make up.
    """
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(
        0, shape.vocab, (bmt.world_size() * batch, shape.seq + 1), generator=generator
    )
    ids = rows.chunk(bmt.world_size())[bmt.rank()].to(bmt.device())
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def wait() -> None:
    """Until the device has done everything."""
    if bmt.device().type != "cpu":
        torch.cuda.synchronize()


def measure(backend: Backend, options: Options, batch: int) -> dict[str, Any]:
    """Median step time over `--steps` steps after warm-up, each timed with the device idle before
    and after; and how long this process had run when the first step of all ended.
    """
    shape = options.geometry
    rows = batch * options.micro_batches
    inputs, targets = batch_of(shape, rows)
    forget_peaks()
    times, losses, first_step = [], [], 0.0
    for number in range(options.warmup + options.steps):
        wait()
        begin = time.perf_counter()
        losses.append(backend.step(inputs, targets))
        wait()
        first_step = first_step or time.time() - psutil.Process().create_time()
        if number >= options.warmup:
            times.append(time.perf_counter() - begin)
    seconds = statistics.median(times)
    rate = rows * shape.seq / seconds
    record: dict[str, Any] = {
        "step_seconds": round(seconds, 5),
        "fastest": round(min(times), 5),
        "slowest": round(max(times), 5),
        "first_step_s": round(first_step, 1),
        "tokens_per_second_per_gpu": round(rate),
        "mfu": None,
        "loss": mean_over_ranks(losses[-1]),
        "losses": list(map(mean_over_ranks, losses)),
        **backend.account(),
    }
    if options.device == "cpu":
        return record
    peak = peak_flops(torch.cuda.get_device_name())
    record |= {"mfu": round(rate * shape.flops_per_token / peak, 4) if peak else None, **memory()}
    if options.profile is not None:
        record["profile"] = profiled(backend, (inputs, targets), options.profile)
    return record


def mean_over_ranks(loss: torch.Tensor) -> float:
    """Of all rows of the batch."""
    return round(float(bmt.sum_loss(loss)), 4)


def forget_peaks() -> None:
    """Memory is counted from here on."""
    if bmt.device().type != "cpu":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def memory() -> dict[str, float]:
    """GiB: the peaks of torch's allocator, all that is in use on the GPU now, NCCL's and
    symmetric memory too, and the peak of this process in host memory.
    """
    free, total = torch.cuda.mem_get_info()
    sizes = {
        "allocated_gib": torch.cuda.max_memory_allocated(),
        "reserved_gib": torch.cuda.max_memory_reserved(),
        "device_gib": total - free,
        "host_gib": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }
    return {name: round(size / GIB, 1) for name, size in sizes.items()}


def profiled(
    backend: Backend, batch: tuple[torch.Tensor, torch.Tensor], path: str
) -> dict[str, Any]:
    """The summary of a few more steps; with a path, a table of kernels too, by this rank if it is
    the first.
    """
    works = traced(lambda: backend.step(*batch))
    if path and bmt.rank() == 0:
        lines = [
            f"{total / STEPS / 1000:10.3f} ms {number // STEPS:6} x  {name}\n"
            for name, total, number in longest(works, 45)
        ]
        pathlib.Path(path).write_text("".join(lines))
    return summary(works, STEPS)


def common_fields(options: Options, build_seconds: float) -> dict[str, Any]:
    """What all records of this run say."""
    shape, on_gpu = options.geometry, options.device != "cpu"
    return {
        **options.mode(),
        "gpus": bmt.world_size(),
        "seq": shape.seq,
        "build_seconds": round(build_seconds, 1),
        "build_peak_gib": round(torch.cuda.max_memory_allocated() / GIB, 2) if on_gpu else None,
        "share_gib": round(shape.num_parameters * 2 / bmt.world_size() / GIB, 2),
    }


def main() -> None:
    """Build once, measure every batch size.

    An error ends it at once on all ranks: compare.py records what is missing then.
    """
    arguments = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[parser()],
    ).parse_args()
    options = checked(arguments)
    # every batch size gets code of its own, as if it were the only one
    torch._dynamo.config.automatic_dynamic_shapes = False
    bmt.init_distributed(seed=0, device=options.device, **init_arguments(options))
    began = time.perf_counter()
    backend = BACKENDS[options.backend](options)
    wait()
    common = common_fields(options, time.perf_counter() - began)
    for batch in options.batch:
        record = {**common, "batch": batch, **measure(backend, options, batch)}
        brief = {name: value for name, value in record.items() if name != "profile"}
        bmt.print_rank("RESULT", json.dumps(brief), flush=True)
        if "profile" in record:
            bmt.print_rank("PROFILE", json.dumps(record["profile"]), flush=True)
        if options.out and bmt.rank() == 0:
            with open(options.out, "a") as file:
                file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
