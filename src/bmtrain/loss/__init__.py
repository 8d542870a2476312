"""Losses."""

from bmtrain.loss.cross_entropy import FusedCrossEntropy
from bmtrain.loss.linear_cross_entropy import FusedLinearCrossEntropy, token_log_probs
from bmtrain.loss.module import TokenMean

__all__ = ["FusedCrossEntropy", "FusedLinearCrossEntropy", "TokenMean", "token_log_probs"]
