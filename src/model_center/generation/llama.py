"""ModelCenter's generation classes for LLaMA."""

from __future__ import annotations

from model_center.generation.causal import CausalGeneration
from model_center.generation.classic import BeamSearchTexts, RandomSamplingTexts


class LlamaGeneration(CausalGeneration):
    """Continuation of texts by LLaMA."""


class LlamaBeamSearch(BeamSearchTexts, LlamaGeneration):
    """By beam search."""


class LlamaRandomSampling(RandomSamplingTexts, LlamaGeneration):
    """By drawing tokens."""
