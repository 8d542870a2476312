"""`bmtrain.nn.parallel_linear_func`: names of nn/parallel_linear.py."""

from bmtrain.nn.parallel_linear import OpParallelLinear, ReduceType

__all__ = ["OpParallelLinear", "ReduceType"]
