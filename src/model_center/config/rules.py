"""What values of configurations and layers may be, by their names."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from bmtrain.runtime.arguments import AMOUNT, COUNT, FLAG, NUMBER, SHARE, SIZE, Rule, check
from model_center.errors import ConfigError

GATED = "gated_"  # before the name of an activation
RULES: dict[str, Rule] = {
    **dict.fromkeys(
        (
            *("vocab_size", "dim_model", "num_heads", "dim_head", "dim_ff"),
            *("num_layers", "num_encoder_layers", "num_decoder_layers"),
            *("dim_in", "dim_out", "dim_norm", "embedding_size"),
            *("position_bias_num_buckets", "position_bias_max_distance"),
        ),
        SIZE,
    ),
    "dropout_p": SHARE,
    "cls_head": Rule("the number of classes, or None", lambda x: x is False or COUNT.holds(x)),
    **dict.fromkeys(("eps", "norm_eps", "init_std"), AMOUNT),
    **dict.fromkeys(("init_mean", "init_var"), NUMBER),
    "zero_level": Rule("2 or 3", lambda value: value in (2, 3)),
}
ENDINGS = {"_init_std": AMOUNT, "_init_mean": NUMBER, "_init_var": NUMBER}
# How blocks are recomputed is theirs to check: it may be a word or a level.
ELSEWHERE = ("use_checkpoint",)


def check_values(owner: str, values: Mapping[str, Any]) -> None:
    """Refuse a value that its name does not allow; None is left to the owner.

    Raises:
        ConfigError: naming it, and what was expected.
    """
    rules = {name: rule for name in values if (rule := _rule_of(name)) is not None}
    given = {name: (values[name], rule) for name, rule in rules.items()}
    check(owner, ConfigError, **{n: pair for n, pair in given.items() if pair[0] is not None})


def check_fields(options: Any, leave_out: tuple[str, ...] = ()) -> None:
    """`check_values` of a dataclass, whose fields of type bool must be flags, too.

    Raises:
        ConfigError: naming the value, and what was expected.
    """
    fields = [field for field in dataclasses.fields(options) if field.name not in leave_out]
    values = {field.name: getattr(options, field.name) for field in fields}
    check_values(type(options).__name__, values)
    flags = [field.name for field in fields if field.type == "bool" and field.name not in ELSEWHERE]
    check(
        type(options).__name__,
        ConfigError,
        **{name: (values[name], FLAG) for name in flags if values[name] is not None},
    )


def _rule_of(name: str) -> Rule | None:
    if name in RULES:
        return RULES[name]
    return next((rule for ending, rule in ENDINGS.items() if name.endswith(ending)), None)
