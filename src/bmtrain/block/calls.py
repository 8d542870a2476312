"""What a call of a block runs with, and how."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from bmtrain.block.binding import ParameterTable
from bmtrain.recompute.runner import ModuleCall, Runner
from bmtrain.shard.unshard import Use


@dataclasses.dataclass(frozen=True)
class Invocation:
    """What a call runs with: the slices that full tensors replace, who gathers those, and what
    computes with them.

    Not its arguments: this lives until the graph of the call is gone, and would keep inputs alive
    that are recomputed or sent to the host.
    """

    table: ParameterTable
    use: Use
    runner: Runner


@dataclasses.dataclass(frozen=True)
class Execution:
    """How a call runs.

    packs: whether autograd saves tensors of this run until backward. lends: whether Python code of
    the module may run in backward, hooks and recomputation inside it, and need full parameters.
    moved: tensors that are saved on the host.
    """

    invocation: Invocation
    run: ModuleCall
    packs: bool
    lends: bool = True
    moved: Sequence[torch.Tensor] = ()
