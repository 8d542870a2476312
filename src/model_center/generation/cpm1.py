"""Generation with CPM-1, in ModelCenter's manner."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from model_center.generation.classic import family
from model_center.generation.text import TextGenerator

FIRST_TOKEN = 1  # that every text of CPM-1 begins with


class CPM1TextGenerator(TextGenerator):
    """Continuation of texts, which CPM-1 sees whole, as the context."""

    def encode(self, text: str) -> list[int]:
        """The text's tokens after the one that begins a text."""
        return [FIRST_TOKEN, *super().encode(text)]

    def inputs(self, mask: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """The prompts are the context."""
        return {"context": mask}


CPM1Generation, CPM1BeamSearch, CPM1RandomSampling = family("CPM1", __name__, CPM1TextGenerator)
