"""Checkpoints of a run: each rank writes and reads its own slices, behind the training."""

from bmtrain.snapshot.manager import CheckpointManager

__all__ = ["CheckpointManager"]
