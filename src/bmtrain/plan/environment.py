"""`python -m bmtrain env`: what a bug report needs to say of a machine.

Every item is read on its own: one that cannot be read says why, and the others follow.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from bmtrain.plan.settings import GIB
from bmtrain.runtime import world
from bmtrain.runtime.process import C_COMPILERS
from bmtrain.version import __version__

PACKAGES = """torch, triton, transformers, tokenizers, peft, safetensors, datasets, accelerate,
deepspeed, plainshard, bmtrain, model-center, numpy, ray, tensorboard, wandb"""
# Variables that change what a run does, and those of launchers, by how their names begin.
VARIABLES = """BMTRAIN, CC, CUBLAS, CUDA, CUDNN, CXX, GLOO, HF_, HUGGINGFACE, LD_LIBRARY_PATH,
LD_PRELOAD, MKL, MODELSCOPE, NCCL, NVIDIA, OMP, PYTHON, PYTORCH, TENSORBOARD, TOKENIZERS, TORCH,
TRANSFORMERS, TRITON, WANDB"""
LAUNCHERS = """FLUX, GROUP_RANK, GROUP_WORLD_SIZE, JSM, LOCAL_, MASTER_, MPI_, NODE_RANK, OMPI,
PALS, PMI, RANK, RAY, ROLE_, SKYPILOT, SLURM, TORCHELASTIC, WORLD_SIZE"""
_SECRET = re.compile(r"(TOKEN|KEY|SECRET|PASSWORD|PASSWD|PASS|CREDENTIALS?|AUTH|COOKIE)S?(_|$)")
_GROUP = pathlib.Path("/sys/fs/cgroup")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Print all items; returns 0."""
    found = collect()
    print(json.dumps(found, indent=1) if arguments.json else "\n".join(_lines(found, "")))
    return 0


def collect() -> dict[str, Any]:
    """All items by name; of one that cannot be read, why."""
    return {name: _read(item) for name, item in ITEMS.items()}


def masked(variables: Mapping[str, str]) -> dict[str, str]:
    """Values of names that speak of secrets replaced, and user names and passwords in addresses."""
    return {
        name: "***" if _SECRET.search(name.upper()) else re.sub(r"//[^/@\s]+@", "//***@", text)
        for name, text in sorted(variables.items())
    }


def _lines(found: Mapping[str, Any], indent: str) -> list[str]:
    """A line for each item; those of several values indented under their names."""
    lines = []
    for name, value in found.items():
        inside = value
        if isinstance(value, dict):
            inside = _lines(value, indent + "  ")
        elif isinstance(value, list):
            inside = [f"{indent}  {line}" for line in value]
        if inside is value:
            lines.append(f"{indent}{name}: {value}")
        else:
            lines += [f"{indent}{name}:", *(inside or [f"{indent}  none"])]
    return lines


def _read(item: Callable[[], Any]) -> Any:
    try:
        return item()
    except Exception as error:  # one item must not cost the others
        return f"not known ({type(error).__name__}: {str(error).strip() or 'no reason given'})"


def _variables(beginnings: str) -> dict[str, str]:
    chosen = tuple(beginnings.replace("\n", " ").split(", "))
    return masked({n: text for n, text in world.environment().items() if n.startswith(chosen)})


def _packages() -> dict[str, str]:
    def version(name: str) -> str:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return "not installed"

    return {name: version(name) for name in PACKAGES.replace("\n", " ").split(", ")}


def _gpus() -> list[str]:
    found, count = [], torch.cuda.device_count()
    for one in range(count):
        facts = torch.cuda.get_device_properties(one)
        missing = [
            other
            for other in range(count)
            if other != one and not torch.cuda.can_device_access_peer(one, other)
        ]
        found.append(
            f"{one}: {facts.name}, {facts.total_memory / GIB:.1f} GiB, capability "
            f"{facts.major}.{facts.minor}, no peer access to {missing or 'none'}"
        )
    return found


def _output(*words: str) -> list[str]:
    if shutil.which(words[0]) is None:
        raise FileNotFoundError(f"{words[0]} is not installed")
    done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise RuntimeError(said[0] if said else f"exit status {done.returncode}")
    return done.stdout.strip().splitlines()


def _cpu() -> dict[str, Any]:
    info = pathlib.Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8", errors="replace") if info.is_file() else ""
    model = re.search(r"^model name\s*:\s*(.*)$", text, re.MULTILINE)
    return {
        "model": model[1] if model else platform.processor() or platform.machine(),
        "cores of the host": os.cpu_count(),
        "cores of this process": world.num_cores(),
        "limit of the control group": _read(
            lambda: (_GROUP / "cpu.max").read_text("ascii").strip()
        ),
        "torch's threads": torch.get_num_threads(),
    }


def _memory() -> dict[str, Any]:
    text = pathlib.Path("/proc/meminfo").read_text(encoding="ascii")
    sizes = {n: int(kib) * 1024 for n, kib in re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE)}
    return {
        "all": f"{sizes['MemTotal'] / GIB:.1f} GiB",
        "available": f"{sizes['MemAvailable'] / GIB:.1f} GiB",
        "limit of the control group": _read(
            lambda: (_GROUP / "memory.max").read_text("ascii").strip()
        ),
        "shared memory (/dev/shm)": _read(
            lambda: f"{shutil.disk_usage('/dev/shm').total / GIB:.1f} GiB"
        ),
    }


def _compilers() -> dict[str, Any]:
    found = {}
    for name in dict.fromkeys((*C_COMPILERS, "g++", "nvcc")):
        said = _read(lambda: _output(name, "--version")[-1 if name == "nvcc" else 0])  # noqa: B023
        found[name] = f"{shutil.which(name)}: {said}"
    return found


ITEMS: dict[str, Callable[[], Any]] = {
    "bmtrain": lambda: __version__,
    "python": lambda: f"{platform.python_version()} ({sys.executable})",
    "system": platform.platform,
    "packages": _packages,
    "torch was built with": lambda: f"CUDA {torch.version.cuda}, debug {torch.version.debug}",
    "NCCL": lambda: ".".join(map(str, torch.cuda.nccl.version())),
    "GPUs": _gpus,
    "driver": lambda: _output("nvidia-smi", "--query-gpu=driver_version,name", "--format=csv"),
    "topology": lambda: _output("nvidia-smi", "topo", "-m"),
    "CPU": _cpu,
    "host memory": _memory,
    "compilers": _compilers,
    "network interfaces": lambda: sorted(os.listdir("/sys/class/net")),
    "variables": lambda: _variables(VARIABLES),
    "launcher's variables": lambda: _variables(LAUNCHERS),
}
