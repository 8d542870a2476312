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
    """What a call runs with: the sharded parameters, the use that gathers them, and the runner.

    Holds no arguments: it lives as long as the graph of the call, and would keep inputs resident
    that are recomputed or offloaded to the host.
    """

    table: ParameterTable
    use: Use
    runner: Runner


@dataclasses.dataclass(frozen=True)
class Execution:
    """How a call runs.

    packs: whether autograd saves tensors of this run until backward. lends: whether Python code of
    the module, such as hooks or inner recomputation, may run in backward and need full parameters.
    moved: tensors that are saved in host memory.
    """

    invocation: Invocation
    run: ModuleCall
    packs: bool
    lends: bool = True
    moved: Sequence[torch.Tensor] = ()
