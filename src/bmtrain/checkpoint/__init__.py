"""Model files: whole tensors under plain names, written by rank 0 and read by every rank for its
own slices.
"""

from bmtrain.checkpoint.loading import LoadResult, load
from bmtrain.checkpoint.saving import save
from bmtrain.checkpoint.writer import Writing

__all__ = ["LoadResult", "Writing", "load", "save"]
