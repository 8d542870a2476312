"""What a user chooses for a run, and its machine, as far as memory depends on them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from bmtrain.errors import ConfigurationError
from bmtrain.optim.form import MASTER_WEIGHTS, MOMENTS, StateForm
from bmtrain.recompute.level import AUTO, Level
from bmtrain.recompute.memory import MARGIN
from bmtrain.runtime.arguments import AMOUNT, POSITIVE, SIZE, check, unknown

GIB = 2**30
LEVELS = {level.name.lower(): level for level in Level}
RECOMPUTE = (*LEVELS, AUTO)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
MOST_GPUS = 16  # of one host
# GiB that the driver of each kind of GPU leaves to programs.
GPUS = {
    "a10g": 22.0,
    "a100-40": 39.4,
    "a100": 79.2,
    "a800": 79.2,
    "b200": 178.0,
    "h20": 95.0,
    "h100-pcie": 79.2,
    "h100": 79.2,
    "h800": 79.2,
    "h200": 139.8,
    "l40s": 44.4,
    "rtx3090": 23.7,
    "rtx4090": 23.6,
}


def _option(
    default: Any, about: str, choices: Sequence[Any] | None = None, kind: Any = None
) -> Any:
    """A field that is also a flag of the command: its help, what it may be, its type."""
    meta = {"help": about, "choices": choices, "type": kind or type(default)}
    return dataclasses.field(default=default, metadata=meta)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a run. Each field is a flag of `python -m bmtrain plan` too.

    Args:
        batch: rows on each GPU in a micro-batch.
        seq: tokens of a row.
        recompute: "nothing", "cheap", "block" or "offloaded", the levels of a Block's
            use_checkpoint; "auto" for what fits.
        zero_level: 2 or 3.
        tp_size: ranks that share each tensor-parallel layer.
        pipe_size: pipeline stages; 1 for none.
        dtype: "bf16", "fp16" or "fp32", of parameters.
        optimizer: "adam" (AdamOptimizer), "offload" (AdamOffloadOptimizer) or "torch" (AdamW of
            torch.optim).
        moments, master_weights: of "adam" and "offload", as their arguments.
        device_states: GiB of each GPU for states of "offload", as its `device_bytes`.
        compiled: whether blocks are compiled (`--compile`).

    Raises:
        ConfigurationError: for values that are none of these, or that the optimizer would refuse.
    """

    batch: int = _option(1, "rows on each GPU")
    seq: int = _option(1024, "tokens of a row")
    recompute: str = _option(AUTO, "what blocks compute again in backward", RECOMPUTE)
    zero_level: int = _option(3, "ZeRO level", (2, 3))
    tp_size: int = _option(1, "ranks that share each layer")
    pipe_size: int = _option(1, "pipeline stages")
    dtype: str = _option("bf16", "of parameters", tuple(DTYPES))
    optimizer: str = _option("adam", "whose states", ("adam", "offload", "torch"))
    moments: str = _option("fp32", "of adam, offload", MOMENTS)
    master_weights: str = _option("fp32", "of adam, offload", MASTER_WEIGHTS)
    device_states: float = _option(0.0, "GiB of states on each GPU, with offload")
    compiled: bool = _option(True, "blocks")

    def __post_init__(self) -> None:
        given = {"device_states": (self.device_states, AMOUNT)}
        for name in ("batch", "seq", "tp_size", "pipe_size"):
            given[name] = vars(self)[name], SIZE
        check("plan", **given)
        for field in dataclasses.fields(self):
            value, known = vars(self)[field.name], field.metadata["choices"]
            if known and value not in known:
                wrong = unknown(f"plan's {field.name}", [str(value)], map(str, known))
                raise ConfigurationError(f"{wrong} Expected one of {', '.join(map(str, known))}.")
        if self.device_states and self.optimizer != "offload":
            raise ConfigurationError(
                f"plan: device_states {self.device_states:g} goes with optimizer offload, got "
                f"{self.optimizer}, whose states are all on the GPU."
            )
        split = self.master_weights != "fp32" and self.dtype == "fp16"
        if self.form.is_compact and (self.optimizer == "torch" or split):
            raise ConfigurationError(
                f"plan: optimizer {self.optimizer} with {self.dtype} has no moments "
                f"{self.moments} with master weights {self.master_weights}: adam and offload have "
                "them (split and none not for fp16)."
            )

    @property
    def form(self) -> StateForm:
        """Of the optimizer's states."""
        return StateForm(self.moments, self.master_weights)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """Hosts with GPUs, all of one kind.

    Args:
        gpus: GPUs of each host, at most 16.
        hosts: how many.
        gpu: a name of GPUS; None where only the memory is known.
        gpu_memory: GiB of each GPU; None for that of the kind.
        host_memory: GiB of each host; None if unknown.

    Raises:
        ConfigurationError: for an unknown GPU, no memory, or numbers that are not positive.
    """

    gpus: int = _option(1, "GPUs of each host, not of all")
    hosts: int = _option(1, "number of hosts")
    gpu: str | None = _option(None, "kind of GPU", sorted(GPUS), str)
    gpu_memory: float | None = _option(None, "GiB of each GPU", None, float)
    host_memory: float | None = _option(None, "GiB of each host", None, float)

    def __post_init__(self) -> None:
        memory = {"gpu_memory": self.gpu_memory, "host_memory": self.host_memory}
        given = {name: (x, POSITIVE) for name, x in memory.items() if x is not None}
        check("plan", gpus=(self.gpus, SIZE), hosts=(self.hosts, SIZE), **given)
        if self.gpus > MOST_GPUS:
            raise ConfigurationError(
                f"plan: gpus (--gpus) counts the GPUs of one host, and {self.gpus} are more than "
                f"a host has: {self.gpus} GPUs on hosts of 8 are --gpus 8 --hosts "
                f"{-(-self.gpus // 8)}."
            )
        if self.gpu is not None and self.gpu not in GPUS:
            raise ConfigurationError(
                f"{unknown('plan', [self.gpu], GPUS)} Expected one of {', '.join(GPUS)}, or "
                "the memory of a GPU alone (gpu_memory, --gpu-memory)."
            )
        if self.gpu is None and self.gpu_memory is None:
            raise ConfigurationError(
                "plan needs the GPU's kind (gpu, --gpu h200) or its memory (gpu_memory, "
                "--gpu-memory 80); memory of a CPU is not forecast."
            )

    @property
    def world_size(self) -> int:
        """Processes: one for each GPU."""
        return self.gpus * self.hosts

    @property
    def memory(self) -> int:
        """Bytes of a GPU."""
        given = self.gpu_memory
        return int((GPUS[self.gpu or ""] if given is None else given) * GIB)

    @property
    def room(self) -> int:
        """Bytes of a GPU that a run may take: what `use_checkpoint="auto"` would."""
        return int(self.memory * (1 - MARGIN))
