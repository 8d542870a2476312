"""`bmtrain.nn.row_parallel_linear`: `RowParallelLinear` of nn/parallel_linear.py."""

from bmtrain.nn.parallel_linear import RowParallelLinear

__all__ = ["RowParallelLinear"]
