"""The helpers of training scripts."""

from __future__ import annotations

import io

import pytest
import torch

from bmtrain.errors import ConfigurationError
from bmtrain.utils import AverageRecorder, print_block, print_dict


def test_average_is_a_weighted_mean_of_what_was_recorded() -> None:
    recorder = AverageRecorder(alpha=0.5)
    values = [4.0, 1.0, 7.0]
    seen = []
    for value in values:
        recorder.record(value)
        seen.append(recorder.value)
    assert seen == pytest.approx([4.0, (0.5 * 4 + 1) / 1.5, (0.25 * 4 + 0.5 * 1 + 7) / 1.75])


def test_average_of_a_constant_is_that_constant() -> None:
    recorder = AverageRecorder()
    for _ in range(1000):
        recorder.record(torch.tensor(2.5))
        assert recorder.value == pytest.approx(2.5)


def test_start_value_counts_only_before_the_first_record() -> None:
    recorder = AverageRecorder(alpha=0.9, start_value=100)
    assert recorder.value == 100
    recorder.record(3)
    assert recorder.value == pytest.approx(3)


def test_no_memory_of_the_past() -> None:
    recorder = AverageRecorder(alpha=0)
    recorder.record(1)
    recorder.record(5)
    assert recorder.value == 5


@pytest.mark.parametrize("alpha", [1.0, -0.1, float("nan")])
def test_alpha_outside_its_range_is_refused(alpha: float) -> None:
    with pytest.raises(ConfigurationError, match=r"alpha: got .*, expected 0 <= alpha < 1"):
        AverageRecorder(alpha=alpha)


def test_print_block(capsys: pytest.CaptureFixture[str]) -> None:
    print_block("Model", "two\nlines [not markup]")
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert "Model" in lines[0]
    assert lines[1:3] == ["two", "lines [not markup]"]
    print_block("Title alone")
    assert "Title alone" in capsys.readouterr().out


def test_print_dict_to_a_file() -> None:
    file = io.StringIO()
    print_dict("Arguments", {"lr": 0.5, "name": "[b]x"}, file)
    lines = [line.split() for line in file.getvalue().splitlines()]
    assert "Arguments" in lines[0]
    assert lines[1:3] == [["lr", "0.5"], ["name", "[b]x"]]
