"""`bmtrain.distributed.ops`: the functions of distributed/autograd.py."""

from __future__ import annotations

from typing import Any

import torch

from bmtrain.compat.removed import removed
from bmtrain.distributed import nccl
from bmtrain.distributed.autograd import (
    all_gather,
    all_reduce,
    broadcast,
    recv_activations,
    reduce_scatter,
    send_activations,
)


class OpAllGather:
    """`all_gather` under its old name."""

    @staticmethod
    def apply(input: torch.Tensor, comm: Any = None) -> torch.Tensor:
        """As `all_gather`."""
        return all_gather(input, comm)


class OpAllReduce:
    """`all_reduce` under its old name."""

    @staticmethod
    def apply(input: torch.Tensor, op: str, comm: Any = None) -> torch.Tensor:
        """As `all_reduce`."""
        return all_reduce(input, op, comm)


class OpReduceScatter:
    """`reduce_scatter` under its old name."""

    @staticmethod
    def apply(input: torch.Tensor, op: str, comm: Any = None) -> torch.Tensor:
        """As `reduce_scatter`."""
        return reduce_scatter(input, op, comm)


class OpBroadcast:
    """`broadcast` under its old name."""

    @staticmethod
    def apply(src: torch.Tensor, root: int, comm: Any = None) -> torch.Tensor:
        """As `broadcast`."""
        return broadcast(src, root, comm)


_REMEDY = "send_activations and recv_activations carry shape and dtype along."
send_meta = removed("bmtrain.distributed.ops.send_meta", _REMEDY)
recv_meta = removed("bmtrain.distributed.ops.recv_meta", _REMEDY)
commCount, commRank, NCCLCommunicator = nccl.commCount, nccl.commRank, nccl.NCCLCommunicator

__all__ = [
    "NCCLCommunicator",
    "OpAllGather",
    "OpAllReduce",
    "OpBroadcast",
    "OpReduceScatter",
    "all_gather",
    "all_reduce",
    "broadcast",
    "commCount",
    "commRank",
    "recv_activations",
    "recv_meta",
    "reduce_scatter",
    "send_activations",
    "send_meta",
]
