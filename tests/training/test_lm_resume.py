"""A run that was killed, or asked to stop, goes on as if it had not: on as many ranks bit by bit,
on others in the same data.
"""

from __future__ import annotations

import itertools
import os
import pathlib
import signal
import subprocess
import sys

import pytest
import torch
from tests.ranks.runner import run_ranks
from tests.training.lm_programs import (
    DATA,
    PROGRAMS,
    ROOT,
    TINY,
    learning,
    losses,
    main,
    same_learning,
    tiny,
    train,
)
from tests.waiting import wait_for

import bmtrain as bmt
from bmtrain.checkpoint.shards import ShardedCheckpoint
from bmtrain.optim import OptimManager
from model_center.errors import ResumeError
from model_center.training import resuming
from model_center.training.metrics_file import read_metrics

ARGUMENTS = (
    f"{TINY} --lr-decay-style cosine --dataset_name BoolQ --batch-size 16 --epochs 2 "
    "--save-iters 3 --max-encoder-length 48"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A tiny model, and a run of 14 steps that nobody disturbed: 7 steps a pass, checkpoints after
    3, 6, 9, 12 and 14.
    """
    out = tmp_path_factory.mktemp("resume")
    train("finetune_bert", *arguments(out, "whole"))
    assert len(losses(out / "whole")) == 14
    return out


def arguments(folder: pathlib.Path, run: str) -> list[object]:
    """Those of each run."""
    model = tiny("bert", folder)
    return ["--model-config", model, "--base-path", DATA, ARGUMENTS, "--save", folder / run]


def weights(folder: pathlib.Path) -> dict[str, torch.Tensor]:
    """The classifier's, at the end of a run."""
    return ShardedCheckpoint(folder / "step-00000014").all()


def same_run(folder: pathlib.Path, other: pathlib.Path) -> None:
    """The same losses, results and weights, to the last bit."""
    same_learning(folder, other)
    for name, want in weights(other).items():
        assert torch.equal(weights(folder)[name], want), name


def until_step(last: int, name: str, argv: list[str], number: int) -> None:
    """On a rank: the program, which gets a signal on rank 1 in step `last`."""
    step, count = OptimManager.step, itertools.count(1)

    def and_signal(self: OptimManager) -> None:
        step(self)
        if next(count) == last and bmt.rank() == 1:
            os.kill(os.getpid(), number)

    OptimManager.step = and_signal  # type: ignore[method-assign]
    main(name, argv)


@pytest.mark.parametrize(
    ("last", "number"),
    [(5, signal.SIGTERM), (7, signal.SIGINT)],
    ids=["in a pass", "between passes"],
)
def test_a_stopped_run_goes_on(folder: pathlib.Path, last: int, number: int) -> None:
    """One rank gets the signal, all stop after that step with a checkpoint, and --resume gives the
    run that was not stopped.
    """
    run = f"stopped-{last}"
    argv = [part for argument in arguments(folder, run) for part in str(argument).split()]
    run_ranks(until_step, 2, last, "finetune_bert", argv, number, join=False)
    assert len(losses(folder / run)) == last
    assert not (folder / run / "model").exists()
    train("finetune_bert", *arguments(folder, run), "--resume")
    same_run(folder / run, folder / "whole")


def test_a_killed_run_goes_on(folder: pathlib.Path) -> None:
    """A rank dies without a word; what was recorded after the last checkpoint is taken back and
    done again.
    """
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    argv = [part for argument in arguments(folder, "killed") for part in str(argument).split()]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [*torchrun, str(PROGRAMS / "finetune_bert.py"), *argv]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as launcher:
        wait_for_step(folder / "killed", 8)
        ranks = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(launcher.pid)],
            capture_output=True,
            text=True,
            check=True,
        )
        os.kill(int(ranks.stdout.split()[-1]), signal.SIGKILL)
        assert launcher.wait(60) != 0
    done = len(losses(folder / "killed"))
    assert 8 <= done < 14, "it was to be killed in the middle"
    train("finetune_bert", *arguments(folder, "killed"), "--resume")
    same_run(folder / "killed", folder / "whole")


def wait_for_step(run: pathlib.Path, step: int) -> None:
    """AssertionError when the run has not come there after a minute."""
    path = run / "metrics.jsonl"
    wait_for(
        lambda: any(record["step"] >= step for record in read_metrics(path)),
        f"step {step}",
        pause=0.002,
    )


def test_it_goes_on_with_other_ranks(folder: pathlib.Path) -> None:
    """From two ranks to one in the middle of a pass: steps are half as large, and each row is still
    read once a pass.
    """
    copy_until(folder, "alone", 3)
    train("finetune_bert", *arguments(folder, "alone"), "--resume", ranks=1)
    records = read_metrics(folder / "alone" / "metrics.jsonl")
    whole = read_metrics(folder / "whole" / "metrics.jsonl")
    assert [learning(record) for record in records[:3]] == [
        learning(record) for record in whole[:3]
    ]
    # 96 of 200 rows were read by three steps of 32; 104 are left, in 7 steps of 16 rows, and then
    # 13 of the second pass.
    assert [record["step"] for record in records if "accuracy" in record] == [10, 23]
    lr = [record["lr"] for record in records[3:] if "loss" in record]
    assert all(before > after > 0 for before, after in itertools.pairwise(lr)), (
        "the cosine goes on to the new end"
    )
    assert lr[-1] < 2e-4


def copy_until(folder: pathlib.Path, run: str, step: int) -> None:
    """A run that was stopped after `step`: made by stopping it."""
    argv = [part for argument in arguments(folder, run) for part in str(argument).split()]
    run_ranks(until_step, 2, step, "finetune_bert", argv, signal.SIGTERM, join=False)


def test_a_finished_run(folder: pathlib.Path) -> None:
    """Without --resume it is not touched; with it there is nothing to do; of another model it is
    refused, on every rank.
    """
    before = (folder / "whole" / "metrics.jsonl").read_text()
    with pytest.raises(ResumeError, match=r"step-00000014 is there: go on from it by --resume"):
        train("finetune_bert", *arguments(folder, "whole"))
    with pytest.raises(
        ResumeError, match=r"belongs to another run: seed was 1234 and is 7\. Remedy: give the same"
    ):
        train("finetune_bert", *arguments(folder, "whole"), "--resume --seed 7")
    train("finetune_bert", *arguments(folder, "whole"), "--resume")
    assert (folder / "whole" / "metrics.jsonl").read_text() == before


def test_another_model_is_said_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """The digests of names and shapes tell a reader nothing."""
    before = {"seed": 1, "weights": "ab22ba8a"}
    monkeypatch.setattr(resuming, "read_facts", lambda _: {"made_with": before})
    with pytest.raises(ResumeError, match=r"run: weights have other names or shapes \(another"):
        resuming.check_same_run(pathlib.Path("step-1"), {"seed": 1, "weights": "31597d91"})
    with pytest.raises(ResumeError, match="run: weights was ab22ba8a and is None"):
        resuming.check_same_run(pathlib.Path("step-1"), {"seed": 1})
    resuming.check_same_run(pathlib.Path("step-1"), before)


def test_more_epochs(folder: pathlib.Path) -> None:
    """A finished run goes on when it is given more of them; nothing that it recorded is lost."""
    copy_until(folder, "longer", 14)
    train("finetune_bert", *arguments(folder, "longer"), "--resume --epochs 3")
    assert len(losses(folder / "longer")) == 21
    records = [
        record["step"]
        for record in read_metrics(folder / "longer" / "metrics.jsonl")
        if "accuracy" in record
    ]
    assert records == [7, 14, 21]
