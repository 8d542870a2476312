"""ModelCenter's generation classes for T5, mT5 and Flan-T5, which fill the gap in a text."""

from __future__ import annotations

from model_center.generation.classic import family
from model_center.generation.generation_utils import (
    BeamHypotheses,
    apply_repetition_penalty,
    pad,
    top_k_top_p_filtering,
)
from model_center.generation.sentinels import SentinelTextGenerator

__all__ = [
    "BeamHypotheses",
    "T5BeamSearch",
    "T5Generation",
    "T5RandomSampling",
    "apply_repetition_penalty",
    "pad",
    "top_k_top_p_filtering",
]

T5Generation, T5BeamSearch, T5RandomSampling = family(
    "T5", __name__, SentinelTextGenerator, more_tokens=1
)
