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

from bmtrain.runtime import world
from bmtrain.runtime.process import C_COMPILERS
from bmtrain.version import __version__

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "peft",
    "safetensors",
    "datasets",
    "accelerate",
    "deepspeed",
    "bmtrain",
    "model-center",
    "numpy",
    "ray",
    "tensorboard",
    "wandb",
)
# Variables that change what a run does, by the beginnings of their names.
VARIABLES = (
    "BMTRAIN",
    "CC",
    "CUBLAS",
    "CUDA",
    "CUDNN",
    "CXX",
    "GLOO",
    "HF_",
    "HUGGINGFACE",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "MKL",
    "MODELSCOPE",
    "NCCL",
    "NVIDIA",
    "OMP",
    "PYTHON",
    "PYTORCH",
    "TENSORBOARD",
    "TOKENIZERS",
    "TORCH",
    "TRANSFORMERS",
    "TRITON",
    "WANDB",
)
LAUNCHERS = (
    "FLUX",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "JSM",
    "LOCAL_",
    "MASTER_",
    "MPI_",
    "NODE_RANK",
    "OMPI",
    "PALS",
    "PMI",
    "RANK",
    "RAY",
    "ROLE_",
    "SKYPILOT",
    "SLURM",
    "TORCHELASTIC",
    "WORLD_SIZE",
)
_SECRET = re.compile(r"(TOKEN|KEY|SECRET|PASSWORD|PASSWD|PASS|CREDENTIALS?|AUTH|COOKIE)S?(_|$)")
_MASK = "***"
GIB = 2**30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Print all items; returns 0."""
    found = collect()
    print(json.dumps(found, indent=1) if arguments.json else as_text(found))
    return 0


def collect() -> dict[str, Any]:
    """All items by name; of one that cannot be read, why."""
    return {name: _read(item) for name, item in ITEMS.items()}


def as_text(found: Mapping[str, Any]) -> str:
    """A line for each item; those of several values indented under their names."""
    lines = []
    for name, value in found.items():
        lines += _lines(name, value, "")
    return "\n".join(lines)


def _lines(name: str, value: Any, indent: str) -> list[str]:
    if isinstance(value, dict):
        inside = [line for n, v in value.items() for line in _lines(str(n), v, indent + "  ")]
        return [f"{indent}{name}:", *(inside or [f"{indent}  none"])]
    if isinstance(value, list):
        inside = [f"{indent}  {line}" for line in map(str, value)]
        return [f"{indent}{name}:", *(inside or [f"{indent}  none"])]
    return [f"{indent}{name}: {value}"]


def _read(item: Callable[[], Any]) -> Any:
    try:
        return item()
    except Exception as error:  # one item must not cost the others
        return f"not known ({type(error).__name__}: {str(error).strip() or 'no reason given'})"


def masked(variables: Mapping[str, str]) -> dict[str, str]:
    """Values of names that speak of secrets replaced, and user names and passwords in addresses."""
    return {
        name: _MASK if _SECRET.search(name.upper()) else re.sub(r"//[^/@\s]+@", f"//{_MASK}@", text)
        for name, text in sorted(variables.items())
    }


def _chosen(beginnings: tuple[str, ...]) -> dict[str, str]:
    wanted = {n: v for n, v in world.environment().items() if n.startswith(beginnings)}
    return masked(wanted)


def _packages() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _nccl() -> str:
    if not torch.cuda.is_available():
        return "none (no GPU)"
    return ".".join(map(str, torch.cuda.nccl.version()))


def _gpus() -> Any:
    if not torch.cuda.is_available():
        return "none that torch can use"
    found = []
    for number in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(number)
        capability = f"{facts.major}.{facts.minor}"
        found.append(
            f"{number}: {facts.name}, {facts.total_memory / GIB:.1f} GiB, capability {capability}"
        )
    return found


def _driver() -> Any:
    asked = ["--query-gpu=driver_version,name,memory.total", "--format=csv,noheader"]
    return _output("nvidia-smi", *asked).splitlines()


def _topology() -> Any:
    return _output("nvidia-smi", "topo", "-m").splitlines()


def _peers() -> Any:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < 2:
        return "fewer than two GPUs"
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    missing = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    return "all of each other" if not missing else [f"not from {a} to {b}" for a, b in missing]


def _output(*words: str) -> str:
    if shutil.which(words[0]) is None:
        raise FileNotFoundError(f"{words[0]} is not installed")
    done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise RuntimeError(said[0] if said else f"exit status {done.returncode}")
    return done.stdout.strip()


def _cpu() -> dict[str, Any]:
    info = pathlib.Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8", errors="replace") if info.is_file() else ""
    model = re.search(r"^model name\s*:\s*(.*)$", text, re.MULTILINE)
    return {
        "model": model[1] if model else platform.processor() or platform.machine(),
        "cores of the host": os.cpu_count(),
        "cores of this process": world.num_cores(),
        "limit of the control group": _limit("cpu.max", _cores),
        "torch's threads": torch.get_num_threads(),
    }


def _memory() -> dict[str, Any]:
    text = pathlib.Path("/proc/meminfo").read_text(encoding="ascii")
    sizes = {n: int(kib) * 1024 for n, kib in re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE)}
    shm = shutil.disk_usage("/dev/shm") if pathlib.Path("/dev/shm").is_dir() else None
    return {
        "all": f"{sizes['MemTotal'] / GIB:.1f} GiB",
        "available": f"{sizes['MemAvailable'] / GIB:.1f} GiB",
        "limit of the control group": _limit("memory.max", lambda t: f"{int(t) / GIB:.1f} GiB"),
        "shared memory (/dev/shm)": "none" if shm is None else f"{shm.total / GIB:.1f} GiB",
    }


def _cores(text: str) -> str:
    quota, period = text.split()
    return "none" if quota == "max" else f"{int(quota) / int(period):.1f} cores"


def _limit(file: str, words: Callable[[str], str]) -> str:
    path = pathlib.Path("/sys/fs/cgroup", file)
    if not path.is_file():
        return f"not known ({path} does not exist)"
    text = path.read_text(encoding="ascii").strip()
    return "none" if text == "max" else words(text)


def _compilers() -> dict[str, str]:
    found = {}
    for name in dict.fromkeys((*C_COMPILERS, "g++", "nvcc")):
        path = shutil.which(name)
        found[name] = "not found" if path is None else f"{path}: {_first_line(path)}"
    return found


def _first_line(path: str) -> str:
    said = _read(lambda: _output(path, "--version"))
    lines = str(said).splitlines()
    return lines[-1 if "nvcc" in path else 0] if lines else "says nothing"


def _network() -> Any:
    folder = pathlib.Path("/sys/class/net")
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else "not known"


ITEMS: dict[str, Callable[[], Any]] = {
    "bmtrain": lambda: __version__,
    "python": lambda: f"{platform.python_version()} ({sys.executable})",
    "system": platform.platform,
    "packages": _packages,
    "torch was built with": lambda: f"CUDA {torch.version.cuda}, debug {torch.version.debug}",
    "NCCL": _nccl,
    "GPUs": _gpus,
    "driver": _driver,
    "topology": _topology,
    "peer access": _peers,
    "CPU": _cpu,
    "host memory": _memory,
    "compilers": _compilers,
    "network interfaces": _network,
    "variables": lambda: _chosen(VARIABLES),
    "launcher's variables": lambda: _chosen(LAUNCHERS),
}
