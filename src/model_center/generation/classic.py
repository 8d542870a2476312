"""What ModelCenter's generation classes, `X(model, tokenizer).generate(texts)`, share.

`max_length` counts new tokens; beam search with LLaMA and T5 makes one more. No text ends before
its first token, only generated tokens count as repeated, and special tokens are written out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from model_center.generation.config import DEFAULT_NEW_TOKENS
from model_center.generation.text import TextGenerator
from model_center.model.base import BaseModel


class Generation:
    """A model, put into evaluation mode, and its tokenizer."""

    # What turns texts into texts.
    WRITER: ClassVar[type[TextGenerator]] = TextGenerator

    def __init__(self, model: BaseModel, tokenizer: Any) -> None:
        model.eval()
        self.model, self.tokenizer = model, tokenizer
        self.writer = self.WRITER(model, tokenizer, min_new_tokens=1)

    def _written(self, texts: Sequence[str], **options: Any) -> list[str]:
        return [self.tokenizer.decode(row) for row in self.writer.tokens(texts, **options)]


class BeamSearchTexts(Generation):
    """Generation by beam search."""

    # Tokens beyond `max_length` that a text may have.
    MORE_TOKENS: ClassVar[int] = 0

    def generate(
        self,
        text_list: Sequence[str],
        beam_size: int = 3,
        max_length: int = DEFAULT_NEW_TOKENS,
        repetition_penalty: float = 1.0,
        repetition_window: int | None = None,
    ) -> list[str]:
        """What follows each text.

        Args:
            text_list: the prompts.
            beam_size: number of beams; scores are log-probabilities divided by length.
            max_length: most new tokens, with LLaMA and T5 one less than that, as in ModelCenter;
                100 is the default of GenerationConfig, which ends with the model's positions.
            repetition_penalty, repetition_window: as in GenerationConfig, for generated tokens.
        """
        repetition = _repetition(repetition_penalty, repetition_window)
        return self._written(
            text_list,
            num_beams=beam_size,
            normalize_last=beam_size > 1,
            **_limit(max_length, self.MORE_TOKENS),
            **repetition,
        )


class RandomSamplingTexts(Generation):
    """Generation by drawing tokens."""

    def generate(
        self,
        text_list: Sequence[str],
        max_length: int = DEFAULT_NEW_TOKENS,
        top_k: int = 0,
        top_p: float = 0.9,
        temperature: float = 0.9,
        repetition_penalty: float = 1.0,
        repetition_window: int | None = None,
    ) -> list[str]:
        """What follows each text.

        Args:
            text_list: the prompts.
            max_length: most new tokens; 100 as in beam search.
            top_k, top_p, temperature: as in GenerationConfig; a `top_p` of 0 is no limit.
            repetition_penalty, repetition_window: as in GenerationConfig, for generated tokens.
        """
        repetition = _repetition(repetition_penalty, repetition_window)
        return self._written(
            text_list,
            do_sample=True,
            **_limit(max_length),
            top_k=top_k,
            top_p=top_p or 1.0,
            temperature=temperature,
            **repetition,
        )


def family(
    name: str, module: str, writer: type[TextGenerator] = TextGenerator, more_tokens: int = 0
) -> tuple[type[Generation], type[BeamSearchTexts], type[RandomSamplingTexts]]:
    """A family of models' `<name>Generation`, and its beam search and drawing, for their module."""
    facts = {"WRITER": writer, "__module__": module, "__doc__": f"{name}: see {writer.__name__}."}
    base = type(f"{name}Generation", (Generation,), facts)
    beams = type(f"{name}BeamSearch", (BeamSearchTexts, base), facts | {"MORE_TOKENS": more_tokens})
    return base, beams, type(f"{name}RandomSampling", (RandomSamplingTexts, base), facts)


def _limit(max_length: int, more_tokens: int = 0) -> dict[str, int]:
    """Options of GenerationConfig; ModelCenter's signatures do not tell 100 from the default."""
    most = max_length + more_tokens if max_length > 0 else max_length
    return {"default_new_tokens" if max_length == DEFAULT_NEW_TOKENS else "max_new_tokens": most}


def _repetition(penalty: float, window: int | None) -> dict[str, Any]:
    """Options of GenerationConfig, which wants no window without a penalty."""
    if penalty == 1:
        return {}
    return {"repetition_penalty": penalty, "repetition_window": window, "penalize_prompt": False}
