"""What a user can choose for a run, as far as memory and time depend on it."""

from __future__ import annotations

import dataclasses

import torch

from bmtrain.errors import ConfigurationError
from bmtrain.optim.form import MASTER_WEIGHTS, MOMENTS, StateForm
from bmtrain.recompute.level import AUTO, Level
from bmtrain.runtime.arguments import AMOUNT, COUNT, FLAG, POSITIVE, SIZE, check, unknown

LEVELS = {
    "nothing": Level.NOTHING,
    "cheap": Level.CHEAP,
    "block": Level.BLOCK,
    "offloaded": Level.OFFLOADED,
}
RECOMPUTE = (*LEVELS, AUTO)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
OPTIMIZERS = ("adam", "offload", "torch")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a run.

    Args:
        batch: rows on each GPU in a micro-batch.
        seq: tokens of a row.
        zero_level: 2 or 3.
        tp_size, pipe_size: ranks that share each layer, and stages.
        recompute: "nothing", "cheap", "block" or "offloaded", the levels of a Block's
            use_checkpoint; "auto" for what fits.
        dtype: "bf16", "fp16" or "fp32", of parameters.
        optimizer: "adam" (AdamOptimizer), "offload" (AdamOffloadOptimizer) or "torch" (AdamW of
            torch.optim).
        moments, master_weights: of "adam" and "offload", as their arguments.
        device_states: GiB of each GPU for states of "offload", as its `device_bytes`.
        overlap: of "offload", as its argument.
        compiled: whether blocks are compiled.
        fused_head: whether the head never holds all logits; for models given by sizes.
        lora: rank of adapters on the linear layers of blocks, all else frozen; 0 for none.
        fp8: linear layers of blocks in FP8.
        memory_limit: GiB that tensors may take under "auto", as in `init_distributed`; None for the
            GPU's.
        num_buffers: of the ring of gathered parameters, as in `init_distributed`.

    Raises:
        ConfigurationError: for values that are none of these, or that the optimizer would refuse.
    """

    batch: int = 1
    seq: int = 1024
    zero_level: int = 3
    tp_size: int = 1
    pipe_size: int = 1
    recompute: str = AUTO
    dtype: str = "bf16"
    optimizer: str = "adam"
    moments: str = "fp32"
    master_weights: str = "fp32"
    device_states: float = 0.0
    overlap: bool = True
    compiled: bool = True
    fused_head: bool = False
    lora: int = 0
    fp8: bool = False
    memory_limit: float | None = None
    num_buffers: int = 3

    def __post_init__(self) -> None:
        sizes = ("batch", "seq", "tp_size", "pipe_size", "num_buffers")
        check("plan", **{name: (vars(self)[name], SIZE) for name in sizes}, lora=(self.lora, COUNT))
        check("plan", device_states=(self.device_states, AMOUNT), overlap=(self.overlap, FLAG))
        if self.memory_limit is not None:
            check("plan", memory_limit=(self.memory_limit, POSITIVE))
        named = {
            "recompute": RECOMPUTE,
            "dtype": tuple(DTYPES),
            "optimizer": OPTIMIZERS,
            "moments": MOMENTS,
            "master_weights": MASTER_WEIGHTS,
        }
        for name, known in named.items():
            wrong = unknown(f"plan's {name}", [vars(self)[name]], known)
            if wrong is not None:
                raise ConfigurationError(f"{wrong} Expected one of {', '.join(known)}.")
        if self.zero_level not in (2, 3):
            raise ConfigurationError(f"plan: zero_level is {self.zero_level!r}: expected 2 or 3.")
        if self.device_states and self.optimizer != "offload":
            raise ConfigurationError(
                f"plan: device_states {self.device_states:g} goes with optimizer offload, got "
                f"{self.optimizer}, whose states are all on the GPU."
            )
        if not self.overlap and self.optimizer != "offload":
            raise ConfigurationError(
                "plan: overlap is False: expected optimizer offload with it, got "
                f"{self.optimizer}, whose updates are never beside the program."
            )
        if not has_form(self.optimizer, self.dtype, self.form):
            raise ConfigurationError(
                f"plan: optimizer {self.optimizer} with {self.dtype} has no moments "
                f"{self.moments} with master weights {self.master_weights}: adam and offload have "
                "them (split and none not for fp16)."
            )

    @property
    def form(self) -> StateForm:
        """Of the optimizer's states."""
        return StateForm(self.moments, self.master_weights)

    def check_world(self, size: int) -> None:
        """Refuse sizes of parallelism that do not divide the number of ranks."""
        if size % (self.tp_size * self.pipe_size):
            raise ConfigurationError(
                f"plan: tp_size {self.tp_size} x pipe_size {self.pipe_size} does not divide "
                f"{size} GPUs."
            )


def has_form(optimizer: str, dtype: str, form: StateForm) -> bool:
    """Whether an optimizer keeps states of parameters of this dtype so."""
    if optimizer == "torch":
        return not form.is_compact
    return form.master_weights == "fp32" or dtype != "fp16"
