"""Losses."""

from bmtrain.loss.cross_entropy import FusedCrossEntropy

__all__ = ["FusedCrossEntropy"]
