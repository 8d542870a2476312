"""ModelCenter's generation classes for models that continue plain texts (GPT-2, OPT, Qwen)."""

from __future__ import annotations

from model_center.generation.classic import family

CausalGeneration, CausalBeamSearch, CausalRandomSampling = family("Causal", __name__)
