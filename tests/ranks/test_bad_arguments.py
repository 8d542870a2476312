"""Arguments that no program can mean: refused by name, value and what was expected."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from tests.ranks.runner import run_ranks

import bmtrain as bmt
import model_center.errors
from bmtrain.errors import ArgumentError, ConfigurationError
from bmtrain.optim import AdamOffloadOptimizer, AdamOptimizer, OptimManager
from bmtrain.runtime.arguments import (
    AMOUNT,
    BOUND,
    COUNT,
    FLAG,
    NUMBER,
    PART,
    POSITIVE,
    SHARE,
    SIZE,
    WHOLE,
    Rule,
)
from model_center.errors import ConfigError
from model_center.layer import Attention, Embedding, Encoder, FeedForward, LayerNorm, Linear
from model_center.model import GPT2Config, T5Config

SMALL: dict[str, Any] = {"dim_model": 8, "dim_ff": 8, "num_heads": 2, "dim_head": 4}
VALUES = (-math.inf, -1, -0.5, 0, 0.5, 1, 2.5, 3, math.inf)
ALLOWED: dict[str, tuple[Rule, tuple[float, ...]]] = {
    "number": (NUMBER, (-1, -0.5, 0, 0.5, 1, 2.5, 3)),
    "amount": (AMOUNT, (0, 0.5, 1, 2.5, 3)),
    "positive": (POSITIVE, (0.5, 1, 2.5, 3)),
    "bound": (BOUND, (0.5, 1, 2.5, 3, math.inf)),
    "share": (SHARE, (0, 0.5, 1)),
    "part": (PART, (0, 0.5)),
    "size": (SIZE, (1, 3)),
    "count": (COUNT, (0, 1, 3)),
    "whole": (WHOLE, (-1, 0, 1, 3)),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_rules(name: str) -> None:
    """Numbers of Python, numpy and one-element tensors; NaN, texts, None, lists never."""
    rule, allowed = ALLOWED[name]
    assert tuple(value for value in VALUES if rule.holds(value)) == allowed
    for wrong in (math.nan, "1", None, [1], b"1", 1j, True, torch.ones(2), np.float32("nan")):
        assert not rule.holds(wrong), wrong
    assert rule.holds(np.int64(1)) == (1 in allowed)
    assert rule.holds(np.float32(0.5)) == (0.5 in allowed)


def test_flags() -> None:
    """0 and 1 are flags, as in files of old."""
    assert all(map(FLAG.holds, (True, False, 0, 1)))
    assert not any(map(FLAG.holds, (2, "yes", None, 0.5, [])))


def parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(3))]


def adam(**given: Any) -> Callable[[], object]:
    return lambda: AdamOptimizer(parameters(), **given)


def manager(**given: Any) -> Callable[[], object]:
    return lambda: OptimManager(**given)


def gpt2(**given: Any) -> Callable[[], object]:
    return lambda: GPT2Config(**{"vocab_size": 10, **given})


def clip(*given: Any) -> Callable[[], object]:
    return lambda: OptimManager().clip_grad_norm(parameters(), *given)


def cosine(*given: Any) -> Callable[[], object]:
    return lambda: bmt.lr_scheduler.Cosine(AdamOptimizer(parameters()), *given)


def entropy(**given: Any) -> Callable[[], object]:
    return lambda: bmt.loss.FusedCrossEntropy(**given)


def broadcast(root: Any) -> Callable[[], object]:
    return lambda: bmt.distributed.broadcast(torch.ones(3), root)


Case = tuple[Callable[[], object], type[Exception], str]


def engine_cases() -> Iterable[Case]:
    yield adam(lr="1e-3"), ArgumentError, "AdamOptimizer: lr is '1e-3': expected a finite number"
    yield adam(lr=math.nan), ConfigurationError, "lr is nan"
    yield adam(betas=0.9), ConfigurationError, "betas is 0.9: expected two numbers"
    yield adam(betas=(0.9, "0.99")), ArgumentError, "betas is"
    yield adam(weigth_decay=0.1), ArgumentError, "'weigth_decay' (nearest: 'weight_decay')"
    yield (
        lambda: AdamOptimizer([{"params": parameters(), "lr": "x"}]),
        ArgumentError,
        "AdamOptimizer: lr is 'x'",
    )
    yield (
        lambda: AdamOffloadOptimizer(parameters(), record_dleta=True),  # type: ignore[call-arg]
        ArgumentError,
        "AdamOffloadOptimizer does not know 'record_dleta' (nearest: 'record_delta')",
    )
    yield manager(loss_scale="8"), ArgumentError, "loss_scale is '8'"
    yield manager(loss_scale=8, loss_scale_steps=math.nan), ConfigurationError, "steps is nan"
    yield manager(grad_scale="2"), ArgumentError, "grad_scale is '2'"
    yield manager(max_skipped_steps=1.5), ConfigurationError, "max_skipped_steps is 1.5"
    yield manager(los_scale=8), ArgumentError, "OptimManager does not know 'los_scale'"
    yield clip("1.0"), ArgumentError, "max_norm is '1.0'"
    yield clip(1.0, "x"), ArgumentError, "norm_type is 'x'"
    yield clip(1.0, 2, math.nan), ConfigurationError, "eps is nan"
    yield cosine("1e-3", 1, 5), ArgumentError, "start_lr is '1e-3'"
    yield cosine(1e-3, 1, "5"), ConfigurationError, "end_iter of Cosine: got '5'"
    yield cosine(math.inf, 1, 5), ConfigurationError, "start_lr is inf"
    yield entropy(ignore_index="a"), ArgumentError, "ignore_index is 'a'"
    yield entropy(parallel="yes"), ArgumentError, "parallel is 'yes'"
    yield entropy(redution="sum"), ArgumentError, "(nearest: 'reduction')"
    yield lambda: bmt.nn.Linear("4", 4), ArgumentError, "in_features is '4'"  # type: ignore[arg-type]
    for root in (9, -1, "0", None, 0.0):
        yield broadcast(root), ConfigurationError, f"broadcast got rank {root!r}"
    yield (
        lambda: bmt.Block(torch.nn.Linear(3, 3), zerolevel=3),  # type: ignore[call-arg]
        ArgumentError,
        "Block does not know 'zerolevel' (nearest: 'zero_level')",
    )


def model_cases() -> Iterable[Case]:
    for name, value in (
        *(("dropout_p", wrong) for wrong in (-0.1, 1.5, "0.1", math.nan)),
        *(("norm_eps", wrong) for wrong in (-1, "x", math.nan)),
        *(("num_layers", wrong) for wrong in ("4", 0, -1, 2.0)),
        *(("att_init_std", wrong) for wrong in (-1, math.nan)),
        *(("emb_init_mean", wrong) for wrong in ("0", math.inf)),
        *(("tied", "yes"), ("norm_bias", 3), ("zero_level", 7)),
    ):
        yield gpt2(**{name: value}), ConfigError, f"GPT2Config: {name} is {value!r}: expected"
    unknown = model_center.errors.ArgumentError
    yield gpt2(num_layer=3), unknown, "does not know 'num_layer' (nearest: 'num_layers')"
    yield (
        lambda: T5Config(vocab_size=10, position_bias_num_buckets=0),
        ConfigError,
        "position_bias_num_buckets is 0",
    )
    wrong: Any
    for wrong in (0, -1, "4", 4.0, True):
        yield functools.partial(Linear, wrong, 4), ConfigError, f"dim_in is {wrong!r}"
        yield functools.partial(Embedding, wrong, 4), ConfigError, f"vocab_size is {wrong!r}"
        yield functools.partial(LayerNorm, wrong), ConfigError, f"dim_norm is {wrong!r}"
        yield functools.partial(FeedForward, 4, wrong), ConfigError, f"dim_ff is {wrong!r}"
    yield lambda: LayerNorm(4, eps=-1), ConfigError, "LayerNorm: eps is -1"
    yield lambda: Attention(8, 2, 4, dropout_p=-1), ConfigError, "dropout_p is -1"
    yield lambda: Encoder(num_layers=1, **SMALL, dropout_p=2), ConfigError, "dropout_p is 2"
    yield (
        lambda: Encoder(num_layers=1, **SMALL, num_head=2),
        unknown,
        "Encoder does not know 'num_head' (nearest: 'num_heads')",
    )


def refused(kind: str) -> list[str]:
    """The cases that are not as expected."""
    found = []
    for make, error, words in engine_cases() if kind == "engine" else model_cases():
        try:
            found.append(f"{words}: accepted, {make()}")
        except Exception as raised:
            if not isinstance(raised, error) or words not in str(raised):
                found.append(f"{words}: {type(raised).__name__}: {raised}")
    return found


@pytest.mark.parametrize("kind", ["engine", "models"])
def test_bad_arguments(kind: str) -> None:
    """On every rank, by an error of the project's that is a TypeError where Python's would be."""
    assert run_ranks(refused, 2, kind) == [[], []]
    assert issubclass(ArgumentError, TypeError) and issubclass(ArgumentError, ValueError)
    assert issubclass(model_center.errors.ArgumentError, TypeError)


def test_signatures_stay() -> None:
    """For `help`, editors and tools."""
    assert list(inspect.signature(OptimManager).parameters)[:2] == [
        "loss_scale",
        "loss_scale_factor",
    ]
    assert "weight_decay" in inspect.signature(AdamOptimizer).parameters
