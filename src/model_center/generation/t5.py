"""ModelCenter's generation classes for T5, mT5 and Flan-T5, which fill the gap in a text."""

from __future__ import annotations

from model_center.generation.classic import family
from model_center.generation.sentinels import SentinelTextGenerator

T5Generation, T5BeamSearch, T5RandomSampling = family(
    "T5", __name__, SentinelTextGenerator, more_tokens=1
)
