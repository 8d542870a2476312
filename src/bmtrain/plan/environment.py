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
import textwrap
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
    print(json.dumps(found, indent=1) if arguments.json else _text(found))
    return 0


def collect() -> dict[str, Any]:
    """All items by name; of one that cannot be read, why."""
    found: dict[str, Any] = {}
    for name, item in ITEMS.items():
        try:
            found[name] = item()
        except Exception as error:  # one item must not cost the others
            found[name] = f"not known ({type(error).__name__}: {error})"
    return found


def shown(variables: Mapping[str, str], names: str) -> dict[str, str]:
    """Those whose names match; of addresses without user names, passwords and queries."""
    known = re.compile(names.replace("\n", ""))
    return {
        name: re.sub(r"//\S*@", "//***@", re.sub(r"\?\S*", "?***", text))
        for name, text in sorted(variables.items())
        if known.fullmatch(name)
    }


def _text(found: Mapping[str, Any]) -> str:
    """A line for each item; those of several lines indented under their names."""
    lines = []
    for name, value in found.items():
        text = (_text(value) or "none") if isinstance(value, dict) else value
        is_long = text is not value or "\n" in text
        lines.append(f"{name}:\n{textwrap.indent(text, '  ')}" if is_long else f"{name}: {text}")
    return "\n".join(lines)


def _packages() -> dict[str, str]:
    found = {
        str(one.name).lower().replace("_", "-"): one.version
        for one in importlib.metadata.distributions()
    }
    return {name: found.get(name, "not installed") for name in PACKAGES.split()}


def _nvidia_smi(*words: str) -> str:
    """What the program says, which may be why it fails."""
    done = subprocess.run(
        ["nvidia-smi", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=20,
        check=False,
    )
    return done.stdout.strip()


ITEMS: dict[str, Callable[[], Any]] = {
    "bmtrain": lambda: __version__,
    "python": lambda: f"{platform.python_version()} ({sys.executable})",
    "packages": _packages,
    # Versions, driver, compilers and processor, as torch's own reports of faults have them.
    "torch": lambda: {name: str(text) for name, text in get_env_info()._asdict().items() if text},
    "NCCL": lambda: ".".join(map(str, torch.cuda.nccl.version())),
    "GPUs": lambda: _nvidia_smi("--query-gpu=index,name,memory.total,compute_cap", "--format=csv"),
    "topology": lambda: _nvidia_smi("topo", "-m"),
    "cores of this process": lambda: str(world.num_cores()),
    "limit of the control group, of cores": lambda: (_GROUP / "cpu.max").read_text().strip(),
    "limit of the control group, of memory": lambda: (_GROUP / "memory.max").read_text().strip(),
    "host memory": lambda: pathlib.Path("/proc/meminfo").read_text("ascii").partition("\nBuf")[0],
    "shared memory (/dev/shm)": lambda: f"{shutil.disk_usage('/dev/shm').total / GIB:.1f} GiB",
    "network interfaces": lambda: " ".join(os.listdir("/sys/class/net")),
    "variables": lambda: shown(world.environment(), VARIABLES),
    "launcher's variables": lambda: shown(world.environment(), LAUNCHERS),
}
