"""How fast a checkpoint of Hugging Face gets into a model, beside how fast the same files can be
read at all.

    python benchmarks/loading.py --layout gpt2 --gigabytes 1 --folder /tmp/loading

makes a sharded safetensors checkpoint of random numbers in that folder (once), and prints a line of
JSON: gigabytes (10^9 bytes) per second of plain reading, of loading into a model on this machine's
GPU (or CPU) in a process group of one, and of `safetensors.torch.load_file` with copies into
tensors of the same device; each cold, which is with no page of the files in the kernel's cache, and
warm. The least time of `--repeat` is taken.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import safetensors.torch
import torch

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "src"))

import bmtrain as bmt
from bmtrain.checkpoint.entries import entries
from bmtrain.checkpoint.source import Header
from model_center.config.base import TransformerConfig
from model_center.model.base import BaseModel
from model_center.model.gpt2 import GPT2, GPT2Config
from model_center.model.llama import Llama, LlamaConfig
from model_center.weights.export import targets_of
from model_center.weights.loading import load_weights
from model_center.weights.safetensors_writer import SafetensorsWriter, nbytes

BLOCK = 2**24  # bytes of one plain read


def configuration(
    layout: str, gigabytes: float, dtype: torch.dtype
) -> tuple[type[BaseModel], TransformerConfig]:
    """As many layers as make up that size; as wide as models of 2.7e9 parameters, but for small
    sizes.
    """
    width = 2560 if gigabytes >= 4 else 1024
    # the feed-forward of a LLaMA has a third matrix
    per_layer = (16 if layout == "llama" else 12) * width**2
    layers = max(
        1,
        round(
            (gigabytes * 1e9 / dtype.itemsize - 32000 * width * (2 if layout == "llama" else 1))
            / per_layer
        ),
    )
    common: dict[str, Any] = {
        "dim_model": width,
        "num_heads": width // 64,
        "dim_head": 64,
        "dim_ff": 4 * width,
        "num_layers": layers,
    }
    if layout == "llama":
        return Llama, LlamaConfig(**common, vocab_size=32000, dtype=dtype)
    return GPT2, GPT2Config(**common, vocab_size=32000, dtype=dtype)


def make(folder: pathlib.Path, model: BaseModel, dtype: torch.dtype, shard: int) -> None:
    """Write a checkpoint for the model: every tensor takes its values from one buffer of random
    bytes.
    """
    headers = {entry.name: Header(entry.shape, dtype) for entry in entries(model)}
    sizes = {
        name: target.header
        for name, target in targets_of(model.key_map(model.config), headers).items()
    }
    folder.mkdir(parents=True)
    writer = SafetensorsWriter(folder, sizes, shard)
    noise = torch.randint(
        0, 127, (max(nbytes(header) for header in sizes.values()),), dtype=torch.uint8
    )
    for name, header in sizes.items():
        writer.write(name, noise[: nbytes(header)])


def forget(files: list[pathlib.Path]) -> None:
    """Have the kernel drop the files' pages."""
    os.sync()
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def read_plainly(files: list[pathlib.Path]) -> None:
    """All bytes, one after the other, into the same memory."""
    memory = memoryview(bytearray(BLOCK))
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(memory):
                continue


def read_mapped(files: list[pathlib.Path], device: torch.device) -> None:
    """All tensors by the format's library, copied to the device (on the CPU: into memory of their
    own).
    """
    for file in files:
        for tensor in safetensors.torch.load_file(file).values():
            tensor.to(device, copy=True)
    finish(device)


def finish(device: torch.device) -> None:
    """Wait for the device."""
    if device.type != "cpu":
        torch.cuda.synchronize(device)


def speeds(files: list[pathlib.Path], step: Callable[[], object], repeat: int) -> dict[str, float]:
    """GB/s of `step`, which reads all files, cold and warm."""
    total = sum(file.stat().st_size for file in files)
    best = {"cold": float("inf"), "warm": float("inf")}
    for state in ["cold", "warm"] * repeat:
        if state == "cold":
            forget(files)
        start = time.perf_counter()
        step()
        best[state] = min(best[state], time.perf_counter() - start)
    return {state: round(total / seconds / 1e9, 3) for state, seconds in best.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layout", choices=("gpt2", "llama"), default="llama")
    parser.add_argument(
        "--gigabytes", type=float, default=1.0, help="of the checkpoint (default: %(default)s)"
    )
    parser.add_argument(
        "--file-dtype", choices=("float32", "float16", "bfloat16"), default="bfloat16"
    )
    parser.add_argument(
        "--model-dtype", choices=("float32", "float16", "bfloat16"), default="bfloat16"
    )
    parser.add_argument(
        "--shard-gigabytes", type=float, default=0.5, help="of one file (default: %(default)s)"
    )
    parser.add_argument(
        "--folder", type=pathlib.Path, required=True, help="where the checkpoint is made, or was"
    )
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    bmt.init_distributed()
    stored = getattr(torch, args.file_dtype)
    kind, config = configuration(args.layout, args.gigabytes, stored)
    config.dtype = getattr(torch, args.model_dtype)
    folder = args.folder / f"{args.layout}-{args.gigabytes:g}-{args.file_dtype}"
    model, device = kind.without_values(config), bmt.device()
    if not folder.exists():
        make(folder, model, stored, int(args.shard_gigabytes * 1e9))
    files = sorted(folder.glob("*.safetensors"))

    def load() -> None:
        load_weights(model, folder, kind.key_map(config))
        finish(device)

    load()  # the device's context and libraries
    result = {
        "layout": args.layout,
        "gigabytes": round(sum(file.stat().st_size for file in files) / 1e9, 3),
        "files": len(files),
        "file_dtype": args.file_dtype,
        "model_dtype": args.model_dtype,
        "device": str(device),
        "read": speeds(files, lambda: read_plainly(files), args.repeat),
        "load": speeds(files, load, args.repeat),
        "load_file": speeds(files, lambda: read_mapped(files, device), args.repeat),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
