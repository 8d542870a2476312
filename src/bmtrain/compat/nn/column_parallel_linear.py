"""`bmtrain.nn.column_parallel_linear`: `ColumnParallelLinear` of nn/parallel_linear.py."""

from bmtrain.nn.parallel_linear import ColumnParallelLinear

__all__ = ["ColumnParallelLinear"]
