"""ModelCenter's generation classes for LLaMA."""

from __future__ import annotations

from model_center.generation.classic import family

LlamaGeneration, LlamaBeamSearch, LlamaRandomSampling = family("Llama", __name__, more_tokens=1)
