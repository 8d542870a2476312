"""`act(gate) * up` of a gated feed-forward network in one pass, for computing without gradients.

Source: Shazeer, "GLU Variants Improve Transformer" (2020).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F

from bmtrain.kernels.gelu import CUBIC, LINEAR
from bmtrain.kernels.launch import kernel, tl

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
    gated_kernel((-(-gate.numel() // BLOCK),), gate, up, out, gate.numel(), ACT=act, num_warps=4)
    return out


@kernel
def activated(x: tl.tensor, ACT: tl.constexpr) -> tl.tensor:
    """The activation of this name, of fp32."""
    if ACT == "relu":
        y = tl.maximum(x, 0.0)
    elif ACT == "silu":
        y = x / (1 + tl.exp(-x))
    elif ACT == "gelu":
        y = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    else:
        y = x / (1 + tl.exp(-x * (LINEAR + CUBIC * x * x)))
    return y


@kernel
def gated_kernel(
    gate: tl.tensor, up: tl.tensor, out: tl.tensor, count: tl.tensor, ACT: tl.constexpr
) -> None:
    """Each program computes BLOCK elements."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    x = tl.load(gate + i, inside, other=0.0).to(tl.float32)
    y = activated(x, ACT) * tl.load(up + i, inside, other=0.0).to(tl.float32)
    tl.store(out + i, y.to(out.dtype.element_ty), inside)
