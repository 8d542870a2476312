"""ModelCenter's generation classes for T5, mT5 and Flan-T5, which fill the gap in a text."""

from __future__ import annotations

from model_center.generation.classic import BeamSearchTexts, Generation, RandomSamplingTexts
from model_center.generation.sentinels import SentinelTextGenerator


class T5Generation(Generation):
    """What is in the gap of each text, see SentinelTextGenerator."""

    WRITER = SentinelTextGenerator


class T5BeamSearch(BeamSearchTexts, T5Generation):
    """By beam search."""


class T5RandomSampling(RandomSamplingTexts, T5Generation):
    """By drawing tokens."""
