"""The flags: ModelCenter's names and defaults, a meaning for each, and clear words for what does
not fit.
"""

from __future__ import annotations

import pathlib
import sys
from typing import Any

import pytest

import model_center
from model_center.arguments import add_model_config_args, add_training_args, make_parser, parse_args
from model_center.training.optimization import in_steps

# As documented there.
DEFAULTS: dict[str, Any] = {
    "model_config": None,
    "base_path": None,
    "dataset_name": None,
    "load": None,
    "save": None,
    "save_name": None,
    "save_iters": 1000,
    "inspect_iters": 1000,
    "batch_size": 32,
    "clip_grad": 1.0,
    "train_iters": 1000000,
    "max_length": 512,
    "max_encoder_length": 512,
    "max_decoder_length": 256,
    "start_step": 0,
    "seed": 1234,
    "epochs": 1,
    "lr": 1e-4,
    "weight_decay": 1e-2,
    "loss_scale": 65536,
    "warmup_iters": 0.01,
    "lr_decay_iters": None,
    "lr_decay_style": "noam",
    "local_rank": None,
}


def parse(*arguments: str, required: tuple[str, ...] = ()) -> Any:
    return parse_args(make_parser(), arguments, required)


def test_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py"])
    values = vars(model_center.get_args())
    assert {name: values[name] for name in DEFAULTS} == DEFAULTS
    own = {
        "dtype": "bf16",
        "gradient_accumulation": 1,
        "optimizer": "adam",
        "use_checkpoint": True,
        "zero_level": 3,
    }
    assert {name: values[name] for name in own} == own


def test_the_command_line_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sys, "argv", ["train.py", "--model-config", "bert-base-cased", "--lr", "1e-5"]
    )
    args = model_center.get_args()
    assert (args.model_config, args.lr) == ("bert-base-cased", 1e-5)


@pytest.mark.parametrize("flag", ["--dataset_name", "--dataset-name", "--dataset"])
def test_spellings_of_the_data_set(flag: str) -> None:
    """Shell scripts of old write --dataset."""
    assert parse(flag, "BoolQ").dataset_name == "BoolQ"


@pytest.mark.parametrize("flag", ["--local_rank", "--local-rank"])
def test_what_launchers_pass(flag: str) -> None:
    """Older ones write it with an underscore, newer ones with a hyphen; it has no effect."""
    assert parse(f"{flag}=3").local_rank == 3


def test_both_groups_fit_another_parser() -> None:
    """As programs of old put them together."""
    parser = make_parser.__globals__["argparse"].ArgumentParser()
    args = add_training_args(add_model_config_args(parser)).parse_args(
        ["--epochs", "3", "--no-use-checkpoint"]
    )
    assert (args.epochs, args.use_checkpoint) == (3, False)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--batch-size", "0"], "argument --batch-size: '0' is not a whole number from 1 on"),
        (["--batch-size", "many"], "argument --batch-size: 'many' is not a whole number from 1 on"),
        (["--epochs", "1.5"], "argument --epochs: '1.5' is not a whole number from 1 on"),
        (["--lr", "-1"], "argument --lr: '-1' is not a number from 0 on"),
        (["--lr", "nan"], "argument --lr: 'nan' is not a number from 0 on"),
        (["--warmup-iters", "inf"], "argument --warmup-iters: 'inf' is not a number from 0 on"),
        (["--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
        (["--lr-decay-style", "cosin"], "argument --lr-decay-style: invalid choice: 'cosin'"),
        (["--zero-level", "1"], "argument --zero-level: invalid choice: 1"),
        (["--resume"], "--resume goes on from the checkpoints in --save: give that folder too"),
        (
            ["--start-step", "5", "--train-iters", "5"],
            "--start-step 5 leaves nothing to do before --train-iters 5",
        ),
        (["--tensorboard"], "--tensorboard needs a place for its files: give --log-dir or --save"),
        (["--batch", "3"], "unrecognized arguments: --batch 3"),
    ],
)
def test_what_does_not_fit(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        parse(*arguments)
    assert left.value.code == 2
    assert complaint in capsys.readouterr().err


def test_what_a_program_needs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--base-path", "data", required=("--model-config", "--base-path", "--dataset-name"))
    assert "this program needs --model-config, --dataset-name" in capsys.readouterr().err


def test_help_names_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--help")
    text = capsys.readouterr().out
    assert all(f"--{name.replace('_', '-')}" in text for name in DEFAULTS if name != "local_rank")


@pytest.mark.parametrize(
    ("given", "total", "steps"),
    [(0.01, 1000, 10), (0.01, 40, 0), (0.5, 3, 2), (0, 50, 0), (1, 50, 1), (200.0, 50, 200)],
)
def test_warm_up(given: float, total: int, steps: int) -> None:
    """Below 1 a share of all steps, from 1 on a number of steps."""
    assert in_steps(given, total) == steps


def test_the_guide_names_every_flag() -> None:
    """The reference page of model_center has a table of them."""
    page = pathlib.Path(__file__).parents[2] / "docs/site/en/reference/model_center.md"
    text = page.read_text(encoding="utf-8")
    flags = [
        action.option_strings[0]
        for action in make_parser()._actions
        if action.dest not in ("help", "local_rank")
    ]
    assert not [flag for flag in flags if f"`{flag}" not in text]
