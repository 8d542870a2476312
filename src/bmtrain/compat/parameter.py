"""`bmtrain.parameter`: `DistributedParameter` and `ParameterInitializer` of shard/parameter.py."""

from __future__ import annotations

import torch

from bmtrain.errors import ParameterError
from bmtrain.shard.parameter import DistributedParameter, ParameterInitializer


class OpAllGather:
    """`DistributedParameter.gather` under its old name."""

    @staticmethod
    def apply(value: DistributedParameter) -> torch.Tensor:
        """All-gather the full tensor, differentiably. Collective.

        Raises:
            ParameterError: for anything but a DistributedParameter.
        """
        if not isinstance(value, DistributedParameter):
            raise ParameterError(
                f"OpAllGather got {type(value).__name__}: expected a "
                "DistributedParameter; tensors have "
                "bmtrain.distributed.all_gather."
            )
        return value.gather()


__all__ = ["DistributedParameter", "OpAllGather", "ParameterInitializer"]
