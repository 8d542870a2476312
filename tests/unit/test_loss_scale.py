"""The rule by which the loss scale moves."""

from __future__ import annotations

import math
from typing import Any

import pytest

from bmtrain.errors import ConfigurationError
from bmtrain.optim.loss_scale import LossScale


def test_shrinks_and_grows_within_bounds() -> None:
    """Divided at each overflow, multiplied after enough good steps in a row, never out of its bounds."""
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
    "wrong",
    [{"value": 0}, {"value": math.inf}, {"value": math.nan}, {"value": 1, "factor": 1}, {"value": 1, "growth_steps": 0},
     {"value": 1, "minimum": 0}, {"value": 1, "minimum": 4, "maximum": 2}],
)  # fmt: skip
def test_wrong_settings(wrong: dict[str, Any]) -> None:
    """Say what was expected."""
    with pytest.raises(ConfigurationError, match="expected"):
        LossScale(**wrong)
