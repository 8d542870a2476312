"""Texts with a gap that the model fills: T5's way, with a sentinel token for the gap."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import ClassVar

import torch

from model_center.errors import ConfigError
from model_center.generation.config import GenerationConfig
from model_center.generation.text import TextGenerator


class SentinelTextGenerator(TextGenerator):
    """What is in the gap of each text, which is at its end if the text has no first sentinel.

    The decoder begins with the first sentinel; the second one, or the tokenizer's end token, ends
    its text; no other sentinel is generated. Sentinels are known by their names in the vocabulary.

    Source: Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
    Transformer" (2020).
    """

    # The names of sentinels, with their numbers as a group.
    NAMES: ClassVar[str] = r"<extra_id_(\d+)>"

    @functools.cached_property
    def sentinels(self) -> list[int]:
        """The ids of all sentinels by their number.

        Raises:
            ConfigError: for a vocabulary with fewer than two.
        """
        numbers = {}
        for name, token in self.tokenizer.get_vocab().items():
            found = re.fullmatch(self.NAMES, name)
            if found:
                numbers[int(found[1])] = token
        if not {0, 1} <= numbers.keys():
            raise ConfigError(
                "the tokenizer has no sentinels 0 and 1, whose names match "
                f"{self.NAMES}: give texts to TextGenerator."
            )
        return [numbers[number] for number in sorted(numbers)]

    def encode(self, text: str) -> list[int]:
        """The text's tokens, among them the first sentinel, and the end token."""
        return [*self._with_gap(text), self.tokenizer.eos_token_id]

    def inputs(self, mask: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """The decoder's start: padding, and the first sentinel."""
        return {
            "decoder_input_ids": torch.tensor(
                [[self.tokenizer.pad_token_id, self.sentinels[0]]]
            ).repeat(len(mask), 1)
        }

    def with_defaults(self, config: GenerationConfig) -> GenerationConfig:
        """As in TextGenerator, with the ends and forbidden tokens named above."""
        first, end, *others = self.sentinels
        config = super().with_defaults(config)
        ends, forbidden = (end, *config.eos_ids), (first, *others, *config.forbidden_tokens)
        return dataclasses.replace(config, eos_token_id=ends, forbidden_tokens=forbidden)

    def _with_gap(self, text: str) -> list[int]:
        ids = list(self.tokenizer.encode(text, add_special_tokens=False))
        return ids if self.sentinels[0] in ids else [*ids, self.sentinels[0]]
