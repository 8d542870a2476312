"""The two affine maps, split over the tensor-parallel ranks by outputs or by inputs; whole where
there is but one of them.
"""

from __future__ import annotations

import torch

import bmtrain as bmt


def column_linear(
    in_features: int, out_features: int, bias: bool = True, dtype: torch.dtype | None = None
) -> bmt.nn.ColumnParallelLinear:
    """x @ weight.T + bias, split by outputs: (rows, ..., in_features) -> (rows of all ranks, ...,
    out_features / ranks).
    """
    return bmt.nn.ColumnParallelLinear(
        in_features, out_features, bias, dtype, init_method=first_values()
    )


def row_linear(
    in_features: int, out_features: int, bias: bool = True, dtype: torch.dtype | None = None
) -> bmt.nn.RowParallelLinear:
    """x @ weight.T + bias, split by inputs: (rows of all ranks, ..., in_features / ranks) -> (rows,
    ..., out_features).
    """
    return bmt.nn.RowParallelLinear(
        in_features, out_features, bias, dtype, init_method=first_values()
    )


def rows_of_all(x: torch.Tensor) -> torch.Tensor:
    """The rows of all tensor-parallel ranks, (ranks * rows, ...), of each rank's own `x` (rows,
    ...), without a gradient.
    """
    sent = x.to(torch.uint8) if x.dtype == torch.bool else x  # which every backend can send
    whole: torch.Tensor = bmt.distributed.all_gather(sent, bmt.config["tp_comm"]).flatten(0, 1)
    return whole.to(x.dtype)


def first_values(std: float = 0.02) -> bmt.ParameterInitializer:
    """How the weights of GPT-2 start."""
    return bmt.ParameterInitializer(torch.nn.init.normal_, mean=0.0, std=std)
