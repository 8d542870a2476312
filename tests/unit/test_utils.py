"""The helpers of training scripts."""

import io

import pytest
import torch

from bmtrain.errors import ConfigurationError
from bmtrain.utils import AverageRecorder, print_block, print_dict


def test_average_is_a_weighted_mean_of_what_was_recorded():
    """A start value counts only before the first record."""
    recorder, seen = AverageRecorder(alpha=0.5, start_value=100), [100.0]
    assert recorder.value == 100
    for value in (4.0, 1.0, 7.0):
        recorder.record(value)
        seen.append(recorder.value)
    assert seen[1:] == pytest.approx([4.0, (0.5 * 4 + 1) / 1.5, (0.25 * 4 + 0.5 * 1 + 7) / 1.75])
    recorder = AverageRecorder()
    for _ in range(1000):
        recorder.record(torch.tensor(2.5))
        assert recorder.value == pytest.approx(2.5)
    recorder = AverageRecorder(alpha=0)
    recorder.record(1)
    recorder.record(5)
    assert recorder.value == 5


@pytest.mark.parametrize("alpha", [1.0, -0.1, float("nan")])
def test_alpha_outside_its_range_is_refused(alpha):
    with pytest.raises(ConfigurationError, match=r"alpha: got .*, expected 0 <= alpha < 1"):
        AverageRecorder(alpha=alpha)


def test_printing(capsys):
    print_block("Model", "two\nlines [not markup]")
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert "Model" in lines[0] and lines[1:3] == ["two", "lines [not markup]"]
    print_block("Title alone")
    assert "Title alone" in capsys.readouterr().out
    file = io.StringIO()
    print_dict("Arguments", {"lr": 0.5, "name": "[b]x"}, file)
    words = [line.split() for line in file.getvalue().splitlines()]
    assert "Arguments" in words[0] and words[1:3] == [["lr", "0.5"], ["name", "[b]x"]]
