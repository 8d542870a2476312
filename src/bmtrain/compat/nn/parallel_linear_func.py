"""`bmtrain.nn.parallel_linear_func`: `OpParallelLinear` and `ReduceType` of
nn/parallel_linear.py.
"""

from bmtrain.nn.parallel_linear import OpParallelLinear, ReduceType

__all__ = ["OpParallelLinear", "ReduceType"]
