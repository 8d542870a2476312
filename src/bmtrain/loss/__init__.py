"""Losses."""

from bmtrain.loss.cross_entropy import FusedCrossEntropy
from bmtrain.loss.linear_cross_entropy import FusedLinearCrossEntropy
from bmtrain.loss.module import TokenMean

__all__ = ["FusedCrossEntropy", "FusedLinearCrossEntropy", "TokenMean"]
