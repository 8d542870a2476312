"""Checkpoints: full tensors under plain names, or each rank's slices behind the training.

`save` and `load` speak of one file: rank 0 writes it, each rank reads its slices. A
`CheckpointManager` owns a folder of checkpoints of a run: each rank writes and reads its own part
of weights, optimizers and states. `load` reads both, and what others have written.
"""

from bmtrain.checkpoint.loading import LoadResult, load
from bmtrain.checkpoint.manager import CheckpointManager
from bmtrain.checkpoint.saving import save
from bmtrain.checkpoint.writer import Writing

__all__ = ["CheckpointManager", "LoadResult", "Writing", "load", "save"]
