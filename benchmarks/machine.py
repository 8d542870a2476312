"""What a result was measured on."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import platform
import subprocess
import sys

import torch


def machine(device: str = "cuda") -> dict[str, object]:
    """What the numbers were measured on."""
    facts: dict[str, object] = {
        "gpu": "none",
        "num_gpus": 0,
        "cpu": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": "none",
    }
    for package in ("triton", "deepspeed"):
        installed = importlib.util.find_spec(package) is not None
        facts[package] = importlib.metadata.version(package) if installed else None
    if device == "cpu":
        return facts
    return facts | {
        "gpu": torch.cuda.get_device_name(),
        "num_gpus": torch.cuda.device_count(),
        "gpu_gib": round(torch.cuda.get_device_properties(0).total_memory / 2**30),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }


@functools.cache
def machine_from_outside() -> dict[str, object]:
    """The same, asked in a process of its own: who asks for the name of a GPU may hold memory of it
    until the process ends.
    """
    done = subprocess.run([sys.executable, __file__], check=True, stdout=subprocess.PIPE, text=True)
    facts: dict[str, object] = json.loads(done.stdout)
    return facts


if __name__ == "__main__":
    print(json.dumps(machine()))
