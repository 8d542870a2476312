"""The GPT-2 example, with --tp and --pp too: what it learns does not depend on how processes share
the layers, nor on a stop.
"""

import argparse
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from tests.children import environment
from tests.modules import importable
from tests.ranks.runner import run_ranks
from tests.waiting import wait_for

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "gpt2"
SIZES = "--layers 2 --dim 32 --heads 4 --vocab-size 512 --seq-len 32 --batch-size 4"
STEPS = "--steps 6 --warmup 2 --save-every 3 --val-every 3 --val-samples 5 --sample-tokens 3"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]


def train(folder, run, more="", ranks=2):
    """The metrics of a run of six steps, with checkpoints after three and six."""
    run_ranks(example, ranks, flags(folder, run, more), join=False, timeout=120)
    lines = (folder / run / "metrics.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines]


def flags(folder, run, more=""):
    """Those of a tiny run; later ones override earlier ones."""
    places = f"--data {folder}/text --cache-dir {folder}/cache --save-dir {folder}/{run}"
    return f"{places} {SIZES} {STEPS} {more}".split()


def example(arguments):
    """On a rank: the program, as if torchrun had started it on a machine without GPUs."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    sys.argv = [str(EXAMPLE / "train.py"), *arguments]
    with importable(EXAMPLE):
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as end:
            assert not end.code, f"exit status {end.code}"


def called(arguments):
    """On a rank: the program's `main`, and what it tells a callable of each step."""
    found = []
    warnings.filterwarnings("ignore", module="(tokenizers|matplotlib)")
    with importable(EXAMPLE):
        import train

        assert train.main(arguments, found.append) == 0
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Some text, cut into documents."""
    out = tmp_path_factory.mktemp("gpt2")
    (out / "text").mkdir()
    lines = Path(argparse.__file__).read_text("utf-8").splitlines()
    for start in range(0, 1500, 50):
        text = "\n".join(lines[start : start + 50])
        (out / "text" / f"{start}.txt").write_text(text, "utf-8")
    return out


def close(got, want):
    """The same records, but for times and memory."""
    kept = ("step", "loss", "grad_norm", "validation_loss", "lr")
    pairs = [
        [{name: record[name] for name in kept if name in record} for record in records]
        for records in (got, want)
    ]
    assert pairs[0] == [pytest.approx(record, rel=2e-5) for record in pairs[1]]


def samples(folder):
    """The steps after which the model has written."""
    text = (folder / "samples.txt").read_text("utf-8")
    return [int(step) for step in re.findall(r"^=== after step (\d+)$", text, re.MULTILINE)]


@pytest.fixture(scope="module")
def whole(folder):
    """The records of a run on two ranks that nobody stopped."""
    return train(folder, "whole", "--sample-every 2 --curves tensorboard --peak-tflops 0.01")


def resumed(folder, run, more, of="whole", ranks=2):
    """The records of a run that goes on from the third step of another."""
    shutil.copytree(folder / of, folder / run)
    shutil.rmtree(folder / run / "step-00000006")
    return train(folder, run, more, ranks)


def test_a_run_and_its_end_from_a_checkpoint(folder, whole):
    """Loss, gradient norm and validation loss from the checkpoint of --tp 1 on with --tp 2 are
    those of --tp 1.
    """
    assert len(whole) == 8 and whole[-2]["loss"] < whole[0]["loss"]
    assert samples(folder / "whole") == [2, 4, 6]
    files = [path.name for path in (folder / "whole").iterdir()]
    assert {"curves.png", "metrics.fields.json"} < {*files}
    assert [name for name in files if name.startswith("events.")]
    # two layers of width 32, 512 tokens of vocabulary, 32 tokens a row; two processes
    cost = 6 * (2 * 12 * 32**2 + 512 * 32) + 6 * 2 * 32 * 32
    for record in whole:
        if "loss" in record:
            expected = record["tokens_per_second"] * cost / 2 / 0.01e12
            assert record["mfu"] == pytest.approx(expected)
            assert record["seconds"] == pytest.approx(2 * 4 * 32 / record["tokens_per_second"])
    more = "--sample-every 2 --tp 2 --recompute --zero-level 2"
    close(resumed(folder, "resumed", more), whole)
    assert samples(folder / "resumed") == [2, 4, 6]  # that of step 4 is taken back, and made again
    (found,) = run_ranks(called, 1, flags(folder, "called"), join=False)
    assert [one["step"] for one in found if "loss" in one] == [1, 2, 3, 4, 5, 6]
    assert [one["step"] for one in found if "validation_loss" in one] == [3, 6]


@pytest.mark.long
def test_shared_layers_and_stages_learn_the_same(folder, whole):
    """With --tp 2 and with --pp 2, from the start and from a checkpoint of another --pp."""
    close(train(folder, "split", "--tp 2"), whole)
    unstaged = train(folder, "unstaged")
    close(train(folder, "staged", "--pp 2 --micro-batches 4"), unstaged)
    close(resumed(folder, "unstaged-again", "--tp 2", of="staged"), unstaged)


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("--tp 3", "--heads 4 is not divisible by --tp 3"),
        ("--pp 3", "--pp 3 is more than --layers 2"),
        ("--pp 2 --micro-batches 3", "--micro-batches 3 does not divide --pp 2 x --batch-size 4"),
        (
            "--tp 2 --pp 2",
            r"error: --tp 2 --pp 2: the world of 2 ranks.*expected a world size divisible by 4",
        ),
    ],
)
def test_sizes_that_cannot_be_shared(words, complaint, folder):
    """Each is named before anything starts."""
    with pytest.raises(AssertionError, match="exit status 2") as failure:
        train(folder, "bad", words)
    assert re.search(complaint, str(failure.value.__cause__))


@pytest.mark.long
def test_ranks_do_not_outlive_torchrun(folder):
    """When torchrun is killed, which tells its ranks nothing, they save and end; the next run goes
    on from there.
    """
    out, said = folder / "orphaned", folder / "said"
    command = [*TORCHRUN, str(EXAMPLE / "train.py")]
    command += flags(folder, "orphaned", "--tp 2 --steps 100000")
    own = environment(CUDA_VISIBLE_DEVICES="")
    with said.open("w+") as told:
        launcher = subprocess.Popen(command, env=own, stdout=told, stderr=subprocess.STDOUT)
        try:
            wait_for((out / "metrics.jsonl").exists, "the first step")
        finally:
            launcher.kill()
            launcher.wait()
        last = "run the same command to resume"
        wait_for(lambda: last in said.read_text("utf-8"), "the last words")
    found = re.search(r"stopped after step (\d+)", said.read_text("utf-8"))
    assert found is not None
    command += ["--steps", found[1], "--warmup", "0"]
    how: Any = {"capture_output": True, "text": True, "timeout": 120}
    done = subprocess.run(command, env=own, check=False, **how)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"this run had finished before: {found[1]} steps" in done.stdout


def program(path):
    """On a rank, as if torchrun had started it."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    runpy.run_path(path, run_name="__main__")


@pytest.mark.long
@pytest.mark.parametrize("number", [0, 1])
def test_the_programs_of_the_documentation(number, tmp_path, capfd):
    """docs/site/en/reference/parallel.md shows a tensor-parallel and a pipelined program, and they
    learn.
    """
    page = ROOT / "docs" / "site" / "en" / "reference" / "parallel.md"
    text = page.read_text("utf-8")
    programs = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(programs) == 2
    (tmp_path / "program.py").write_text(programs[number], "utf-8")
    run_ranks(program, 2, str(tmp_path / "program.py"), join=False, timeout=120)
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", capfd.readouterr().out)]
    assert len(losses) == 30
    assert losses[0] > 5.0  # bytes known nothing of: log 256 is 5.5
    assert losses[-1] < 0.8 * losses[0]
