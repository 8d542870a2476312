"""Model checkpoints: full tensors under plain names. Rank 0 writes; each rank reads its slices."""

from bmtrain.checkpoint.loading import LoadResult, load
from bmtrain.checkpoint.saving import save
from bmtrain.checkpoint.writer import Writing

__all__ = ["LoadResult", "Writing", "load", "save"]
