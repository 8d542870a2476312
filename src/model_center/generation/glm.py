"""Generation with GLM, in ModelCenter's manner."""

from __future__ import annotations

import dataclasses

from model_center.generation.classic import family
from model_center.generation.config import GenerationConfig
from model_center.generation.text import TextGenerator


class GLMTextGenerator(TextGenerator):
    """What is at the [MASK] of each text, or at its end without one; it ends at [E].

    Source: Du et al., "GLM: General Language Model Pretraining with Autoregressive Blank Infilling"
    (2022).
    """

    def encode(self, text: str) -> list[int]:
        """[CLS] and the text's tokens, among them a [MASK]; the model adds a span's start."""
        ids = list(self.tokenizer.encode(text, add_special_tokens=False))
        gap = [] if self.tokenizer.mask_token_id in ids else [self.tokenizer.mask_token_id]
        return [self.tokenizer.cls_token_id, *ids, *gap]

    def with_defaults(self, config: GenerationConfig) -> GenerationConfig:
        """As in TextGenerator; special tokens other than the end's are forbidden."""
        config = super().with_defaults(config)
        others = {
            *self.tokenizer.all_special_ids,
            *range(self.tokenizer.first_special_id, self.model.config.vocab_size),
        }
        return dataclasses.replace(
            config, forbidden_tokens=(*config.forbidden_tokens, *(others - set(config.eos_ids)))
        )


GLMGeneration, GLMBeamSearch, GLMRandomSampling = family("GLM", __name__, GLMTextGenerator)
