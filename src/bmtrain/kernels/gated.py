"""`act(gate) * up` of a gated feed-forward network in one pass, for computing without gradients.

Source: Shazeer, "GLU Variants Improve Transformer" (2020).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from bmtrain.kernels.chunks import launching_on
from bmtrain.kernels.gelu import CUBIC, LINEAR

BLOCK = 1024

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_new": functools.partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}


def gated(gate: torch.Tensor, up: torch.Tensor, act: str) -> torch.Tensor:
    """`act(gate) * up`, two tensors of one shape in fp32, fp16 or bf16, rounded once.

    Args:
        act: relu, gelu, gelu_new (in its tanh form) or silu.
    """
    by = gated_reference if gate.device.type == "cpu" else gated_by_triton
    return by(gate, up, act)


def gated_reference(gate: torch.Tensor, up: torch.Tensor, act: str) -> torch.Tensor:
    """`gated` by the formula."""
    out = gate.new_empty(gate.shape)
    return out.copy_(ACTIVATIONS[act](gate.float()) * up.float())


def gated_by_triton(gate: torch.Tensor, up: torch.Tensor, act: str) -> torch.Tensor:
    """`gated` in one kernel."""
    gate, up, out = gate.contiguous(), up.contiguous(), gate.new_empty(gate.shape)
    count = gate.numel()
    if count:
        with launching_on(gate.device):
            _triton_kernel()[(-(-count // BLOCK),)](
                gate, up, out, count, ACT=act, LINEAR=LINEAR, CUBIC=CUBIC, BLOCK=BLOCK, num_warps=4
            )
    return out


@functools.cache
def _triton_kernel() -> Any:
    """Import lazily: Triton is slow to import, and is installed only where CUDA is."""
    from bmtrain.kernels.gated_triton import gated_kernel

    return gated_kernel
