"""GenerationConfig: how sequences are continued."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from bmtrain.runtime.arguments import with_nearest
from model_center.errors import ConfigError

DEFAULT_NEW_TOKENS = 100  # ModelCenter's

# What is of no use without another option: a value other than the default would do nothing in
# silence.
OF_SAMPLING = ("temperature", "top_k", "top_p", "seed")
OF_BEAMS = ("length_penalty", "early_stopping", "normalize_last")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """How sequences are continued: greedily, drawn (`do_sample`) or by beams (`num_beams`).

    Names and meaning are those of `transformers`.

    Attributes:
        max_new_tokens: most tokens to add; `default_new_tokens` if neither this nor `max_length` is
            given.
        max_length: most tokens in all, the prompt's (of the decoder) included.
        default_new_tokens: most tokens to add where no number is given; fewer where the model's
            table of positions ends.
        min_new_tokens: no end before this many new tokens.
        eos_token_id: the token, or tokens, that end a sequence; None for none.
        pad_token_id: what follows the end of a sequence; the first end token, or 0, if None.
        stop_strings: texts that end a sequence once its new tokens contain one; it needs the
            tokenizer.
        forbidden_tokens: ids that are never generated.
        repetition_penalty: scores of tokens that occurred are divided by it where positive and
            multiplied where negative (Keskar et al., "CTRL", 2019); 1 for none.
        repetition_window: only the last so many tokens count as occurred; None for all.
        penalize_prompt: whether the prompt's tokens count too.
        do_sample: draw tokens, instead of taking the likeliest.
        temperature: scores are divided by it before drawing.
        top_k: draw from the k likeliest tokens only (Fan et al., 2018); 0 for all.
        top_p: draw from the fewest tokens that have this probability together (Holtzman et al.,
            2020).
        seed: of the drawing, on each rank the same; None for torch's own random state.
        num_beams: sequences that compete for each prompt.
        length_penalty: a sequence's score is its log-probability divided by (number of new tokens)
            ** length_penalty.
        early_stopping: True to stop as soon as there are `num_beams` complete sequences; False when
            no unfinished one is better at its present length; "never" when none can get better at
            any length.
        normalize_last: whether penalties and forbidden tokens change a beam's scores before these
            become log-probabilities, as in ModelCenter, or after, as in transformers.
        num_return_sequences: results for each prompt: drawn ones, or the best beams.
        return_scores: whether to return log-probabilities.

    Raises:
        ConfigError: naming the value, what is expected, and the remedy.
    """

    max_new_tokens: int | None = None
    max_length: int | None = None
    default_new_tokens: int = DEFAULT_NEW_TOKENS
    min_new_tokens: int = 0
    eos_token_id: int | Sequence[int] | None = None
    pad_token_id: int | None = None
    stop_strings: str | Sequence[str] = ()
    forbidden_tokens: Sequence[int] = ()
    repetition_penalty: float = 1.0
    repetition_window: int | None = None
    penalize_prompt: bool = True
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    normalize_last: bool = False
    num_return_sequences: int = 1
    return_scores: bool = False

    def __post_init__(self) -> None:
        """Check every value alone, then what they say together."""
        for name in ("max_new_tokens", "max_length", "repetition_window"):
            if getattr(self, name) is not None:
                self._require_whole(name, 1)
        self._require_whole("default_new_tokens", 1)
        self._require_whole("num_beams", 1)
        self._require_whole("num_return_sequences", 1)
        self._require_whole("min_new_tokens", 0)
        self._require_whole("top_k", 0)
        for name in ("temperature", "repetition_penalty"):
            self._require(
                name,
                _is_number(getattr(self, name)) and getattr(self, name) > 0,
                "a number above 0",
            )
        self._require(
            "top_p", _is_number(self.top_p) and 0 < self.top_p <= 1, "a number above 0, at most 1"
        )
        self._require("length_penalty", _is_number(self.length_penalty), "a number")
        is_known = isinstance(self.early_stopping, bool) or self.early_stopping == "never"
        self._require("early_stopping", is_known, "True, False or 'never'")
        for name, ids in (
            ("eos_token_id", self.eos_ids),
            ("forbidden_tokens", self.forbidden_tokens),
            ("pad_token_id", [self.pad]),
        ):
            self._require(
                name, all(_is_whole(token) and token >= 0 for token in ids), "ids of tokens"
            )
        self._require(
            "stop_strings",
            all(isinstance(text, str) and text for text in self.stops),
            "texts, not empty ones",
        )
        self._check_together()

    @classmethod
    def of(cls, config: GenerationConfig | None, **options: Any) -> GenerationConfig:
        """`config`, or the default one, with `options` in place of its values.

        Raises:
            ConfigError: naming the options that do not exist, and the nearest that do.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = [with_nearest(name, known) for name in options if name not in known]
        if unknown:
            raise ConfigError(f"generation does not know the option {', '.join(unknown)}.")
        return dataclasses.replace(config or cls(), **options)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The tokens that end a sequence."""
        ids = () if self.eos_token_id is None else self.eos_token_id
        return tuple(ids) if isinstance(ids, Sequence) else (ids,)

    @property
    def pad(self) -> int:
        """The token that follows the end of a sequence."""
        if self.pad_token_id is not None:
            return self.pad_token_id
        return self.eos_ids[0] if self.eos_ids else 0

    @property
    def stops(self) -> tuple[str, ...]:
        """The texts that end a sequence."""
        stops = self.stop_strings
        return (stops,) if isinstance(stops, str) else tuple(stops)

    def num_new_tokens(self, prefix: int, longest: int | None) -> int:
        """The most tokens to add to `prefix` tokens, with positions for `longest` (None: any).

        Raises:
            ConfigError: if there is no room for them.
        """
        asked = self.max_new_tokens if self.max_length is None else self.max_length - prefix
        if asked is None:
            asked = self.default_new_tokens
            asked = asked if longest is None else min(asked, longest - prefix)
        if asked < 1:
            limit = (
                f"the model has {longest} positions"
                if self.max_length is None
                else f"max_length is {self.max_length}"
            )
            raise ConfigError(
                f"{limit}, and the prompt has {prefix} tokens: there is no room for a new "
                "one; shorten the prompt."
            )
        if longest is not None and prefix + asked > longest:
            raise ConfigError(
                f"the prompt has {prefix} tokens and {asked} may follow: the model has "
                f"{longest} positions; "
                f"ask for at most {max(longest - prefix, 0)} new tokens or shorten the prompt."
            )
        return asked

    def _check_together(self) -> None:
        if self.max_new_tokens is not None and self.max_length is not None:
            raise ConfigError("max_new_tokens and max_length are both given: give one of them.")
        if self.do_sample and self.num_beams > 1:
            raise ConfigError(
                f"do_sample with num_beams={self.num_beams}: beam search takes the best "
                "tokens; choose one."
            )
        self._require_default(OF_SAMPLING, self.do_sample, "do_sample=True")
        self._require_default(OF_BEAMS, self.num_beams > 1, "num_beams above 1")
        self._require_default(
            ("repetition_window", "penalize_prompt"),
            self.repetition_penalty != 1,
            "repetition_penalty",
        )
        if not self.do_sample and self.num_return_sequences > self.num_beams:
            raise ConfigError(
                f"num_return_sequences is {self.num_return_sequences} with "
                f"num_beams={self.num_beams}: expected at most as many as beams, or do_sample=True."
            )

    def _require_default(self, names: Sequence[str], is_used: bool, needed: str) -> None:
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        idle = [name for name in names if getattr(self, name) != defaults[name]]
        if idle and not is_used:
            raise ConfigError(
                f"{', '.join(idle)}: of no effect without {needed}; give that too, or leave it out."
            )

    def _require_whole(self, name: str, least: int) -> None:
        value = getattr(self, name)
        self._require(
            name, _is_whole(value) and value >= least, f"a whole number, at least {least}"
        )

    def _require(self, name: str, holds: bool, expected: str) -> None:
        if not holds:
            raise ConfigError(f"{name} is {getattr(self, name)!r}: expected {expected}.")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
