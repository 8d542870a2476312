"""Figures of a run in the hands of a callable."""

from __future__ import annotations

import pathlib
import sys
import warnings
from typing import Any

from tests.ranks.runner import run_ranks
from tests.training.test_example_data import EXAMPLE, write_text
from tests.training.test_example_parallel import flags as example_flags
from tests.training.test_lm_verbs import Net, Points, flags

import bmtrain as bmt
from model_center.training import Run, make_loader
from model_center.training.listener import Listener
from model_center.training.metrics_file import read_metrics


def heard(folder: str, raises: bool) -> tuple[list[dict[str, Any]], list[str]]:
    """What the callable gets on this rank, and the warnings."""
    model = Net()
    bmt.init_parameters(model)
    args = flags(f"--save {folder}")
    loss_sum = bmt.loss.FusedCrossEntropy(reduction="sum", ignore_index=-100)
    found: list[dict[str, Any]] = []

    def on_step(values: dict[str, Any]) -> None:
        found.append(values)
        if raises:
            raise ConnectionError("nobody there")

    loader = make_loader(Points(), args, shuffle=False)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with Run(model, loader, args, on_step=on_step) as run:
            for _ in run.epochs():
                for batches in run.steps():
                    mean = bmt.loss.TokenMean(batch["label"] for batch in batches)
                    run.update(mean(loss_sum(model(b["x"]), b["label"])) for b in batches)
            run.record(accuracy=0.5)
    return found, [str(one.message) for one in told if "told of each step" in str(one.message)]


def test_every_rank_hears_of_every_step(tmp_path: pathlib.Path) -> None:
    """The same on all ranks but for their own memory, and what the file of metrics says."""
    (first, no_words), (second, _) = run_ranks(heard, 2, str(tmp_path), False)
    assert not no_words
    written = read_metrics(tmp_path / "metrics.jsonl")
    assert len(first) == len(written) > 3 and first[-1]["accuracy"] == 0.5
    for own, other, line in zip(first, second, written, strict=True):
        assert own.keys() == other.keys() and own.items() <= line.items()
        assert {name for name in own if own[name] != other[name]} <= {
            "memory",
            "tokens_per_second",
            "seconds",
        }


def test_a_callable_that_raises_does_not_end_the_run(tmp_path: pathlib.Path) -> None:
    """Told once on each rank; the run's numbers are those of a run without."""
    runs = [run_ranks(heard, 2, str(tmp_path / name), name == "bad") for name in ("good", "bad")]
    good, bad = ([[one.get("loss") for one in found] for found, _ in run] for run in runs)
    assert good == bad
    for _, words in runs[1]:
        assert len(words) == 1 and "ConnectionError('nobody there')" in words[0]


def test_what_ends_programs_goes_through() -> None:
    """Ctrl-C in a callable is the user's."""

    def interrupted(values: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    try:
        Listener(interrupted).hear({})
    except KeyboardInterrupt:
        return
    raise AssertionError("the interrupt was lost")


def the_example(folder: str) -> list[dict[str, Any]]:
    sys.path.insert(0, str(EXAMPLE))
    import train

    write_text(pathlib.Path(folder, "text"))
    found: list[dict[str, Any]] = []
    warnings.filterwarnings("ignore", module="(tokenizers|matplotlib)")
    assert train.main(example_flags(pathlib.Path(folder), "run"), found.append) == 0
    return found


def test_the_example_can_be_called(tmp_path: pathlib.Path) -> None:
    (found,) = run_ranks(the_example, 1, str(tmp_path), join=False)
    assert [one["step"] for one in found if "loss" in one] == [1, 2, 3, 4, 5, 6]
    assert [one["step"] for one in found if "validation_loss" in one] == [3, 6]
