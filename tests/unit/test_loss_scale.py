"""The rule by which the loss scale moves."""

import math

import pytest
import torch

from bmtrain.distributed.agreement import HostCopy
from bmtrain.errors import ConfigurationError
from bmtrain.optim.loss_scale import LossScale


def test_shrinks_and_grows_within_bounds():
    """Divided at each overflow, multiplied after enough good steps in a row, never out of its bounds."""
    scale = LossScale(16, factor=4, growth_steps=2, minimum=2, maximum=32)
    seen = []
    for event in "gsggsgggggg":
        (scale.grow if event == "g" else scale.shrink)()
        seen.append(scale.value)
    assert seen == [16, 4, 4, 16, 4, 4, 16, 16, 32, 32, 32]
    for _ in range(2):
        scale.shrink()
    assert scale.value == 2
    with pytest.warns(UserWarning, match="smallest loss scale 2"):
        scale.shrink()
    assert scale.value == 2
    assert LossScale(1e9, maximum=1024.0).value == 1024
    scale, counts = LossScale(2), []
    with pytest.warns(UserWarning, match="smallest loss scale 1"):
        for is_finite in (False, False, False, True, False):
            scale.judge(is_finite)
            counts.append((scale.num_skipped, scale.num_in_a_row))
    assert counts == [(1, 0), (2, 1), (3, 2), (3, 0), (4, 1)]
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


@pytest.mark.parametrize(
    ("number", "value", "good_steps"), [(1e300, 8, 2), (math.inf, 4, 0), (math.nan, 4, 0)]
)
def test_a_verdict_is_awaited_once_and_by_whoever_asks(number, value, good_steps):
    """The step is taken back before the scale moves, and only if it was bad. What is loaded comes after
    the verdict.
    """
    for ask in (LossScale.wait, lambda scale: scale.value, LossScale.state_dict):
        scale, seen = LossScale(8, growth_steps=3), list[int]()

        def look(scale=scale, seen=seen):
            seen.append(scale.good_steps)

        arriving = HostCopy([torch.tensor(number, dtype=torch.float64)])
        scale.judge(True)
        scale.awaited = arriving, look
        assert not seen and scale.good_steps == 1
        ask(scale)
        ask(scale)
        assert seen == ([] if math.isfinite(number) else [1])
        assert scale.state_dict() == {"value": value, "good_steps": good_steps}
        is_bad = not math.isfinite(number)
        assert (scale.num_skipped, scale.num_in_a_row) == (is_bad, 0)
        scale.awaited = arriving, lambda: None
        scale.load_state_dict({"value": 32.0, "good_steps": 5})
        assert scale.state_dict() == {"value": 32, "good_steps": 5}


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
