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
from torch.utils.collect_env import get_env_info

from bmtrain.plan.settings import GIB
from bmtrain.runtime import world
from bmtrain.version import __version__

PACKAGES = """torch triton transformers tokenizers peft safetensors datasets accelerate deepspeed
plainshard bmtrain model-center numpy ray tensorboard wandb"""
# Variables that change what a run does, and those of launchers, by patterns of whole names. Values
# of others are never shown: what a secret is called nobody knows.
VARIABLES = r"""CC|CXX|LD_(LIBRARY_PATH|PRELOAD)|PYTHON(PATH|HASHSEED|UTF8|WARNINGS|MALLOC)
|(?!\w*(_KEY|_TOKEN|SECRET|PASSW|CREDENTIAL|AUTH|_URL))
(CUBLAS|CUDA|CUDNN|GLOO|MKL|NCCL|OMP|PYTORCH|TOKENIZERS|TORCH|TORCHINDUCTOR|TRITON)_\w+
|NVIDIA_(VISIBLE_DEVICES|DRIVER_CAPABILITIES|TF32_OVERRIDE)
|HF_(HOME|HUB_CACHE|HUB_OFFLINE|DATASETS_OFFLINE|ENDPOINT|XET_\w+)|TRANSFORMERS_(CACHE|OFFLINE)
|MODELSCOPE_CACHE|WANDB_(MODE|DIR|PROJECT)"""
LAUNCHERS = r"""(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|NODE_RANK|MASTER_(ADDR|PORT)
|TORCHELASTIC_(RESTART_COUNT|MAX_RESTARTS|USE_AGENT_STORE)|PMIX?_(RANK|SIZE)|MPI_LOCAL\w+
|OMPI_COMM_WORLD_\w+|SKYPILOT_NUM_NODES|SKYPILOT_NODE_RANK
|SLURM_(PROCID|LOCALID|NTASKS|NPROCS|NNODES|JOB_ID|JOB_NUM_NODES|STEP_ID|STEP_NUM_\w+|HET_SIZE)
|SLURM_((JOB_|STEP_)?NODELIST|DISTRIBUTION)"""
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


def shown(variables: Mapping[str, str], names: str) -> dict[str, str]:
    """Those whose names match; of addresses without user names, passwords and queries."""
    known = re.compile(names.replace("\n", ""))
    return {
        name: re.sub(r"//\S*@", "//***@", re.sub(r"\?\S*", "?***", text))
        for name, text in sorted(variables.items())
        if known.fullmatch(name)
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


def _packages() -> dict[str, str]:
    found = {
        str(one.name).lower().replace("_", "-"): one.version
        for one in importlib.metadata.distributions()
    }
    return {name: found.get(name, "not installed") for name in PACKAGES.split()}


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
    done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise RuntimeError(said[0] if said else f"exit status {done.returncode}")
    return done.stdout.strip().splitlines()


def _of_torch() -> dict[str, Any]:
    """Versions, driver, compilers and processor, as torch's own reports of faults have them."""
    found = get_env_info()._asdict()
    return {
        name: text.splitlines() if isinstance(text, str) and "\n" in text else text
        for name, text in found.items()
        if text
    }


def _limit(name: str) -> str:
    return (_GROUP / name).read_text("ascii").strip()


ITEMS: dict[str, Callable[[], Any]] = {
    "bmtrain": lambda: __version__,
    "python": lambda: f"{platform.python_version()} ({sys.executable})",
    "packages": _packages,
    "torch": _of_torch,
    "NCCL": lambda: ".".join(map(str, torch.cuda.nccl.version())),
    "GPUs": _gpus,
    "topology": lambda: _output("nvidia-smi", "topo", "-m"),
    "cores of this process": world.num_cores,
    "limit of the control group, of cores": lambda: _limit("cpu.max"),
    "limit of the control group, of memory": lambda: _limit("memory.max"),
    # in all, free and available
    "host memory": lambda: pathlib.Path("/proc/meminfo").read_text("ascii").splitlines()[:3],
    "shared memory (/dev/shm)": lambda: f"{shutil.disk_usage('/dev/shm').total / GIB:.1f} GiB",
    "network interfaces": lambda: sorted(os.listdir("/sys/class/net")),
    "variables": lambda: shown(world.environment(), VARIABLES),
    "launcher's variables": lambda: shown(world.environment(), LAUNCHERS),
}
