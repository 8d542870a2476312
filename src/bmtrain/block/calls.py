"""One call of a block: what it runs with, and how."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from bmtrain.block.binding import ParameterTable
from bmtrain.recompute.runner import ModuleCall, Runner
from bmtrain.shard.unshard import Use


@dataclasses.dataclass(frozen=True)
class BlockCall:
    """One call. Holds no arguments: it lives as long as the graph of the call, and would keep
    inputs resident that are recomputed or offloaded to the host.

    table, use: the sharded parameters, and what gathers them. runner, run: what runs the module,
    and its function for this call. packs: whether autograd saves tensors of this run until
    backward. lends: whether Python code of the module, such as hooks or inner recomputation, may
    run in backward and need full parameters. moved: tensors that are saved in host memory.
    """

    table: ParameterTable
    use: Use
    runner: Runner
    run: ModuleCall
    packs: bool
    lends: bool = True
    moved: Sequence[torch.Tensor] = ()
