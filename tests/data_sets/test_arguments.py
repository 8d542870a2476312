"""The flags: ModelCenter's names and defaults, a meaning for each, and clear words for what does
not fit.
"""

import argparse
import sys
from pathlib import Path

import pytest

import model_center
from model_center.arguments import add_model_config_args, add_training_args, make_parser, parse_args
from model_center.training.optimization import in_steps

# As documented there.
NAMES = "model_config base_path dataset_name load save save_name lr_decay_iters local_rank"
DEFAULTS = dict.fromkeys(NAMES.split()) | {
    "save_iters": 1000,
    "inspect_iters": 1000,
    "train_iters": 1000000,
    "epochs": 1,
    "batch_size": 32,
    "clip_grad": 1.0,
    "lr": 1e-4,
    "weight_decay": 1e-2,
    "seed": 1234,
    "max_length": 512,
    "max_encoder_length": 512,
    "max_decoder_length": 256,
    "start_step": 0,
    "loss_scale": 65536,
    "warmup_iters": 0.01,
    "lr_decay_style": "noam",
}
OWN = {"dtype": "bf16", "gradient_accumulation": 1, "optimizer": "adam", "use_checkpoint": True}


def parse(*arguments, required=()):
    return parse_args(make_parser(), arguments, required)


def test_the_defaults(monkeypatch):
    """And what the command line says in their place."""
    monkeypatch.setattr(sys, "argv", ["train.py"])
    values, expected = vars(model_center.get_args()), {**DEFAULTS, **OWN, "zero_level": 3}
    assert {name: values[name] for name in expected} == expected
    words = "train.py --model-config bert-base-cased --lr 1e-5"
    monkeypatch.setattr(sys, "argv", words.split())
    args = model_center.get_args()
    assert (args.model_config, args.lr) == ("bert-base-cased", 1e-5)


def test_spellings():
    """Shell scripts of old write --dataset; older launchers pass an underscore, newer ones a
    hyphen, without an effect. Both groups fit another parser, as programs of old put them together.
    """
    for flag in ("--dataset_name", "--dataset-name", "--dataset"):
        assert parse(flag, "BoolQ").dataset_name == "BoolQ"
    for flag in ("--local_rank", "--local-rank"):
        assert parse(f"{flag}=3").local_rank == 3
    parser = add_training_args(add_model_config_args(argparse.ArgumentParser()))
    args = parser.parse_args(["--epochs", "3", "--no-use-checkpoint"])
    assert (args.epochs, args.use_checkpoint) == (3, False)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("--batch-size 0", "argument --batch-size: '0' is not a whole number from 1 on"),
        ("--batch-size many", "argument --batch-size: 'many' is not a whole number from 1 on"),
        ("--epochs 1.5", "argument --epochs: '1.5' is not a whole number from 1 on"),
        ("--lr -1", "argument --lr: '-1' is not a number from 0 on"),
        ("--lr nan", "argument --lr: 'nan' is not a number from 0 on"),
        ("--warmup-iters inf", "argument --warmup-iters: 'inf' is not a number from 0 on"),
        ("--dtype int8", "argument --dtype: invalid choice: 'int8'"),
        ("--lr-decay-style cosin", "argument --lr-decay-style: invalid choice: 'cosin'"),
        ("--zero-level 1", "argument --zero-level: invalid choice: 1"),
        ("--resume", "--resume reads the checkpoints in --save: give that folder too"),
        (
            "--start-step 5 --train-iters 5",
            "--start-step 5 leaves nothing to do before --train-iters 5",
        ),
        ("--tensorboard", "--tensorboard needs a place for its files: give --log-dir or --save"),
        ("--batch 3", "unrecognized arguments: --batch 3"),
    ],
)
def test_what_does_not_fit(arguments, complaint, capsys):
    with pytest.raises(SystemExit) as left:
        parse(*arguments.split())
    assert left.value.code == 2
    assert complaint in capsys.readouterr().err


def test_what_a_program_needs(capsys):
    with pytest.raises(SystemExit):
        parse("--base-path", "data", required=("--model-config", "--base-path", "--dataset-name"))
    assert "this program needs --model-config, --dataset-name" in capsys.readouterr().err


def test_help_names_every_flag(capsys):
    with pytest.raises(SystemExit):
        parse("--help")
    text = capsys.readouterr().out
    assert all(f"--{name.replace('_', '-')}" in text for name in DEFAULTS if name != "local_rank")


def test_warm_up():
    """Below 1 a share of all steps, from 1 on a number of steps."""
    given = [(0.01, 1000), (0.01, 40), (0.5, 3), (0, 50), (1, 50), (200.0, 50)]
    assert [in_steps(*one) for one in given] == [10, 0, 2, 0, 1, 200]


def test_the_guide_names_every_flag():
    """The reference page of model_center has a table of them."""
    page = Path(__file__).parents[2] / "docs/site/en/reference/model_center.md"
    text = page.read_text("utf-8")
    flags = [
        action.option_strings[0]
        for action in make_parser()._actions
        if action.dest not in ("help", "local_rank")
    ]
    assert not [flag for flag in flags if f"`{flag}" not in text]
