"""The ranks of one sharded model, all of which run equally many forward passes."""

from __future__ import annotations

import torch

import bmtrain as bmt
from model_center.errors import InputError


class GenerationRanks:
    """The ranks that share the parameters of a model; one rank alone if they are not sharded.

    Attributes:
        are_several: whether other ranks have parts of the parameters.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.is_sharded = any(
            isinstance(parameter, bmt.DistributedParameter) for parameter in model.parameters()
        )
        self.are_several = self.is_sharded and bmt.world_size() > 1

    def all_can(self, own: bool) -> bool:
        """Whether `own` is true on every rank. Collective."""
        if not self.are_several:
            return own
        flag = torch.tensor([own], dtype=torch.int32, device=bmt.device())
        return bool(bmt.distributed.all_reduce(flag, "min"))

    def which_continue(self, own: torch.Tensor) -> tuple[bool, bool]:
        """Whether this rank continues (`own`: bool () on its device), and whether any does.

        Collective; synchronizes with the device once.
        """
        if not self.are_several:
            continues = bool(own)
            return continues, continues
        own = own.int()
        mine, anyone = torch.stack([own, bmt.distributed.all_reduce(own, "max")]).tolist()
        return bool(mine), bool(anyone)

    def agree(self, error: Exception | None) -> None:
        """Raise this rank's error, or one that names another rank's, before any begins. Collective.

        Raises:
            InputError: where only other ranks have one.
        """
        failed: list[int] = []
        if self.are_several:
            flag = torch.tensor([error is not None], dtype=torch.int32, device=bmt.device())
            failed = bmt.distributed.all_gather(flag).flatten().nonzero().flatten().tolist()
        if error is not None:
            raise error
        if failed:
            raise InputError(
                f"generate failed on rank {failed[0]}, whose message names the cause: call it "
                "again on all ranks."
            )
