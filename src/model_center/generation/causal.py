"""ModelCenter's generation classes for GPT-2, GPT-J, OPT, Mistral, Qwen and all others that
continue plain texts.
"""

from __future__ import annotations

from model_center.generation.classic import BeamSearchTexts, Generation, RandomSamplingTexts


class CausalGeneration(Generation):
    """Continuation of texts by a decoder-only model."""


class CausalBeamSearch(BeamSearchTexts, CausalGeneration):
    """By beam search."""


class CausalRandomSampling(RandomSamplingTexts, CausalGeneration):
    """By drawing tokens."""
