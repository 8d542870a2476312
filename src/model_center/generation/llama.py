"""ModelCenter's generation classes for LLaMA."""

from __future__ import annotations

from model_center.generation.classic import family
from model_center.generation.generation_utils import (
    BeamHypotheses,
    apply_repetition_penalty,
    pad,
    top_k_top_p_filtering,
)

__all__ = [
    "BeamHypotheses",
    "LlamaBeamSearch",
    "LlamaGeneration",
    "LlamaRandomSampling",
    "apply_repetition_penalty",
    "pad",
    "top_k_top_p_filtering",
]

LlamaGeneration, LlamaBeamSearch, LlamaRandomSampling = family("Llama", __name__, more_tokens=1)
