"""Losses."""

from bmtrain.loss.cross_entropy import FusedCrossEntropy
from bmtrain.loss.linear_cross_entropy import FusedLinearCrossEntropy
from bmtrain.loss.token_mean import TokenMean

__all__ = ["FusedCrossEntropy", "FusedLinearCrossEntropy", "TokenMean"]
