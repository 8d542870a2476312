"""Settings of the loss scale; how it moves is in tests/ranks/test_optim.py and test_overflow.py."""

import math

import pytest

from bmtrain.errors import ConfigurationError
from bmtrain.optim.loss_scale import LossScale


def test_the_first_value_is_within_the_bounds():
    assert LossScale(1e9, maximum=1024.0).value == 1024
    assert LossScale(0.5, minimum=2.0).value == 2


WRONG = [
    *({"value": value} for value in (0, math.inf, math.nan)),
    {"value": 1, "factor": 1},
    {"value": 1, "growth_steps": 0},
    {"value": 1, "minimum": 0},
    {"value": 1, "minimum": 4, "maximum": 2},
]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_wrong_settings(wrong):
    """Say what was expected."""
    with pytest.raises(ConfigurationError, match="expected"):
        LossScale(**wrong)
