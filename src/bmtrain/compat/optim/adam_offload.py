"""`bmtrain.optim.adam_offload`: `AdamOffloadOptimizer` of optim/offload.py."""

from bmtrain.optim.offload import AdamOffloadOptimizer

__all__ = ["AdamOffloadOptimizer"]
