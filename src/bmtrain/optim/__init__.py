"""Optimizers for sharded parameters, gradient clipping and loss scaling."""

from bmtrain.optim.adam import AdamOptimizer
from bmtrain.optim.clip import clip_grad_norm
from bmtrain.optim.manager import OptimManager, optim_step
from bmtrain.optim.offload import AdamOffloadOptimizer

__all__ = ["AdamOffloadOptimizer", "AdamOptimizer", "OptimManager", "clip_grad_norm", "optim_step"]
