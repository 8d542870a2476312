"""Tokens per second, memory and MFU of one backend. One JSON record per batch size, appended to --out.

torchrun --standalone --nproc_per_node=4 benchmarks/throughput.py --backend bmtrain --shape 13b --batch 8 24 --compile
`benchmarks/compare.py` runs several backends one after another and writes the comparison.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import time

import torch
import torch.distributed as dist
from backends import BACKENDS, Backend

import bmtrain as bmt
from models import SHAPES, Shape

# NVIDIA's figure for dense bf16 on H100 and H200: what MFU is a fraction of.
PEAK_FLOPS = 989e12
GIB = 2**30


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=sorted(BACKENDS), required=True)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="13b")
    parser.add_argument("--batch", type=int, nargs="+", default=[8], help="sequences per GPU")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--offload", action="store_true", help="optimizer on the CPU")
    parser.add_argument("--zero-level", type=int, default=3)
    parser.add_argument("--tp", type=int, default=1, help="ranks that share each layer (bmtrain only)")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--profile", help="write a table of kernel times of one step to this file")
    parser.add_argument("--out", help="file to append the records to")
    return parser.parse_args()


def measure(backend: Backend, shape: Shape, batch: int, args: argparse.Namespace) -> dict[str, object]:
    """Median step time over `args.steps` steps after warm-up, each timed with the device idle before and after."""
    ids = torch.randint(0, shape.vocab, (batch, shape.seq + 1), device="cuda")
    inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    times, loss = [], torch.zeros(())
    for number in range(args.warmup + args.steps):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        loss = backend.step(inputs, targets)
        torch.cuda.synchronize()
        if number >= args.warmup:
            times.append(time.perf_counter() - begin)
    seconds = statistics.median(times)
    rate = batch * shape.seq / seconds
    return {
        "step_seconds": round(seconds, 4), "slowest": round(max(times), 4), "tokens_per_second_per_gpu": round(rate),
        "mfu": round(rate * shape.flops_per_token / PEAK_FLOPS, 4), "loss": round(float(loss), 4),
        "allocated_gib": round(torch.cuda.max_memory_allocated() / GIB, 1),
        "reserved_gib": round(torch.cuda.max_memory_reserved() / GIB, 1),
    }  # fmt: skip


def write_profile(backend: Backend, shape: Shape, batch: int, path: str) -> None:
    """Kernel times of one step, by name."""
    ids = torch.randint(0, shape.vocab, (batch, shape.seq), device="cuda")
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profiler:
        backend.step(ids, ids)
        torch.cuda.synchronize()
    if dist.get_rank() == 0:
        pathlib.Path(path).write_text(
            profiler.key_averages().table(sort_by="self_cuda_time_total", row_limit=45, max_name_column_width=70)
        )


def main() -> None:
    """Build once, measure every batch size, stop at the first that does not fit."""
    args = parse()
    shape = SHAPES[args.shape]
    bmt.init_distributed(seed=0, tp_size=args.tp)
    began = time.perf_counter()
    backend = BACKENDS[args.backend](shape, args)
    torch.cuda.synchronize()
    common = {
        "backend": args.backend, "shape": args.shape, "gpus": bmt.world_size(), "seq": shape.seq, "compile": args.compile,
        "recompute": args.recompute, "offload": args.offload, "tp": args.tp, "build_seconds": round(time.perf_counter() - began, 1),
        "build_peak_gib": round(torch.cuda.max_memory_allocated() / GIB, 2),
        "share_gib": round(shape.num_parameters * 2 / bmt.world_size() / GIB, 2),
    }  # fmt: skip
    torch.manual_seed(bmt.rank())
    for batch in args.batch:
        record = {**common, "batch": batch}
        try:
            record |= measure(backend, shape, batch, args)
            if args.profile:
                write_profile(backend, shape, batch, args.profile)
        except torch.OutOfMemoryError:
            record["out_of_memory"] = True
        bmt.print_rank("RESULT", json.dumps(record), flush=True)
        if args.out and bmt.rank() == 0:
            with open(args.out, "a") as file:
                file.write(json.dumps(record) + "\n")
        if record.get("out_of_memory"):
            break
    os._exit(0)  # after an out-of-memory error on one rank an orderly exit would wait for collectives that never come


if __name__ == "__main__":
    main()
