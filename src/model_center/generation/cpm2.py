"""Generation with CPM-2, in ModelCenter's manner."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from model_center.generation.classic import family
from model_center.generation.sentinels import SentinelTextGenerator


class CPM2TextGenerator(SentinelTextGenerator):
    """What is in the gap of each text.

    The encoder's text has no end token, and the decoder begins with the first sentinel.
    """

    NAMES = r"<s_(\d+)>"

    def encode(self, text: str) -> list[int]:
        """The text's tokens, among them the first sentinel."""
        return self._with_gap(text)

    def inputs(self, mask: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """The decoder's start: the first sentinel."""
        return {"decoder_input_ids": torch.tensor([[self.sentinels[0]]]).repeat(len(mask), 1)}


CPM2Generation, CPM2BeamSearch, CPM2RandomSampling = family("CPM2", __name__, CPM2TextGenerator)
