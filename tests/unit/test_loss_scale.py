"""Settings of the loss scale; how it moves is in tests/ranks/test_optim.py and test_overflow.py."""

import math

import pytest

from bmtrain.errors import ConfigurationError
from bmtrain.optim.loss_scale import LossScale


def test_the_first_value_is_within_the_bounds():
    assert LossScale(1e9, maximum=1024.0).value == 1024
    assert LossScale(0.5, minimum=2.0).value == 2


@pytest.mark.parametrize("factor", [4, 0.25, 1])
def test_a_factor_below_one(factor):
    """As BMTrain: that of a quarter is that of four; a factor of one keeps the scale, and then it is
    not what makes steps overflow.
    """
    scale, other = LossScale(64, factor=factor, growth_steps=2), 4.0 if factor != 1 else 1.0
    expected, good = 64.0, 0
    for is_finite in (True, True, False, True, False, False, True, True, True):
        scale.judge(is_finite)
        good = good + 1 if is_finite else 0
        expected = expected if is_finite else max(expected / other, 1.0)
        if good == 2:
            expected, good = expected * other, 0
        assert scale.value == expected
    scale.judge(False)
    scale.judge(False)
    assert scale.num_in_a_row == (2 if factor == 1 else 0) and scale.factor == other


WRONG = [
    *({"value": value} for value in (0, math.inf, math.nan)),
    {"value": 1, "factor": 0},
    {"value": 1, "factor": math.inf},
    {"value": 1, "growth_steps": 0},
    {"value": 1, "minimum": 0},
    {"value": 1, "minimum": 4, "maximum": 2},
]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_wrong_settings(wrong):
    """Say what was expected."""
    with pytest.raises(ConfigurationError, match="expected"):
        LossScale(**wrong)
