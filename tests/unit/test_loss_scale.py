"""The rule by which the loss scale moves."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from bmtrain.errors import ConfigurationError
from bmtrain.optim.loss_scale import LossScale
from bmtrain.optim.verdict import Verdict


def test_shrinks_and_grows_within_bounds() -> None:
    """Divided at each overflow, multiplied after enough good steps in a row, never out of its
    bounds.
    """
    scale = LossScale(16, factor=4, growth_steps=2, minimum=2, maximum=32)
    seen = []
    for event in "gsggggggg":
        if event == "s":
            scale.shrink()
        else:
            scale.grow()
        seen.append(scale.value)
    assert seen == [16, 4, 4, 16, 16, 32, 32, 32, 32]
    scale.shrink()
    scale.shrink()
    assert scale.value == 2
    with pytest.warns(UserWarning, match="smallest loss scale 2"):
        scale.shrink()
    assert scale.value == 2


def test_an_overflow_starts_the_count_anew() -> None:
    """Good steps before it do not count."""
    scale = LossScale(8, growth_steps=3)
    for event in (scale.grow, scale.grow, scale.shrink, scale.grow, scale.grow):
        event()
    assert scale.value == 4
    scale.grow()
    assert scale.value == 8


def test_state_goes_on() -> None:
    """Value and the count of good steps."""
    scale, other = LossScale(8, growth_steps=3), LossScale(1, growth_steps=3)
    scale.grow()
    scale.grow()
    other.load_state_dict(scale.state_dict())
    other.grow()
    assert other.value == 16


def test_the_first_value_is_brought_into_bounds() -> None:
    """A scale above the maximum starts there."""
    assert LossScale(1e9, maximum=1024.0).value == 1024
    assert LossScale(0.5, minimum=2.0).value == 2


@pytest.mark.parametrize(
    ("number", "value", "good_steps"), [(1e300, 8, 2), (math.inf, 4, 0), (math.nan, 4, 0)]
)
def test_a_verdict_is_awaited_once_and_by_whoever_asks(
    number: float, value: float, good_steps: int
) -> None:
    """The step is taken back before the scale moves, and only if it was bad."""
    for ask in (LossScale.settle, lambda scale: scale.value, LossScale.state_dict):
        scale = LossScale(8, growth_steps=3)
        seen: list[int] = []

        def look(scale: LossScale = scale, seen: list[int] = seen) -> None:
            seen.append(scale.good_steps)

        scale.judge(True)
        scale.judge_later(Verdict(torch.tensor(number, dtype=torch.float64)), look)
        assert not seen and scale.good_steps == 1
        ask(scale)
        ask(scale)
        assert seen == ([] if math.isfinite(number) else [1])
        assert scale.state_dict() == {"value": value, "good_steps": good_steps}


def test_what_is_loaded_comes_after_the_verdict() -> None:
    """It is not judged by a step before it."""
    scale = LossScale(8)
    scale.judge_later(Verdict(torch.tensor(math.inf)), lambda: None)
    scale.load_state_dict({"value": 32.0, "good_steps": 5})
    assert scale.state_dict() == {"value": 32, "good_steps": 5}


@pytest.mark.parametrize(
    "wrong",
    [
        {"value": 0},
        {"value": math.inf},
        {"value": math.nan},
        {"value": 1, "factor": 1},
        {"value": 1, "growth_steps": 0},
        {"value": 1, "minimum": 0},
        {"value": 1, "minimum": 4, "maximum": 2},
    ],
)
def test_wrong_settings(wrong: dict[str, Any]) -> None:
    """Say what was expected."""
    with pytest.raises(ConfigurationError, match="expected"):
        LossScale(**wrong)
