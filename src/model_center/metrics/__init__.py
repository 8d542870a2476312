"""Metrics: `update` counts this rank's rows, `compute`, collective, sums over all ranks.

Without a process group, those are the rows of one process. `DistributedDataLoader` hands out every
row once, so that none counts twice.
"""

from model_center.metrics.answers import AnswerScore, exact_match, normalized, token_f1
from model_center.metrics.classification import Accuracy, BinaryF1, MacroF1
from model_center.metrics.grouped import BestOfGroup, GroupExactMatch

__all__ = [
    "Accuracy",
    "AnswerScore",
    "BestOfGroup",
    "BinaryF1",
    "GroupExactMatch",
    "MacroF1",
    "exact_match",
    "normalized",
    "token_f1",
]
