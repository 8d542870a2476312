"""The GPT-2 example with --tp and --pp: what it learns does not depend on how processes share the
layers.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import re
import runpy
import shutil
import subprocess
import sys
from typing import Any

import pytest
from tests.modules import importable
from tests.ranks.runner import run_ranks
from tests.waiting import wait_for

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "gpt2"
SIZES = [
    "--layers",
    "2",
    "--dim",
    "32",
    "--heads",
    "4",
    "--vocab-size",
    "512",
    "--seq-len",
    "32",
    "--batch-size",
    "4",
]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]


def train(folder: pathlib.Path, run: str, *arguments: str, ranks: int = 2) -> list[dict[str, Any]]:
    """The metrics of a run of six steps, with checkpoints after three and six."""
    run_ranks(example, ranks, flags(folder, run, *arguments), join=False, timeout=120)
    return [
        json.loads(line)
        for line in (folder / run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]


def flags(folder: pathlib.Path, run: str, *more: str) -> list[str]:
    """Those of a tiny run; later ones override earlier ones."""
    return [
        "--data",
        str(folder / "text"),
        "--cache-dir",
        str(folder / "cache"),
        "--save-dir",
        str(folder / run),
        *SIZES,
        "--steps",
        "6",
        "--warmup",
        "2",
        "--save-every",
        "3",
        "--val-every",
        "3",
        "--val-samples",
        "5",
        "--sample-tokens",
        "3",
        *more,
    ]


def example(arguments: list[str]) -> None:
    """On a rank: the program, as if torchrun had started it on a machine without GPUs."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    sys.argv = [str(EXAMPLE / "train.py"), *arguments]
    with importable(EXAMPLE):
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as end:
            assert not end.code, f"exit status {end.code}"


def environment() -> dict[str, str]:
    """Of programs on the CPU."""
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }


def launch(*arguments: str) -> str:
    """What a program prints on two processes."""
    done = subprocess.run(
        [*TORCHRUN, *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Some text, cut into documents."""
    out = tmp_path_factory.mktemp("gpt2")
    (out / "text").mkdir()
    lines = pathlib.Path(argparse.__file__).read_text(encoding="utf-8").splitlines()
    for start in range(0, 1500, 50):
        (out / "text" / f"{start}.txt").write_text(
            "\n".join(lines[start : start + 50]), encoding="utf-8"
        )
    return out


def close(got: list[dict[str, Any]], want: list[dict[str, Any]]) -> None:
    """The same records, but for times and memory."""
    kept = ("step", "loss", "grad_norm", "validation_loss", "lr")
    pairs = [
        [{name: record[name] for name in kept if name in record} for record in records]
        for records in (got, want)
    ]
    assert pairs[0] == [pytest.approx(record, rel=2e-5) for record in pairs[1]]


def samples(folder: pathlib.Path) -> list[int]:
    """The steps after which the model has written."""
    text = (folder / "samples.txt").read_text(encoding="utf-8")
    return [int(step) for step in re.findall(r"^=== after step (\d+)$", text, re.MULTILINE)]


def test_shared_layers_learn_the_same(folder: pathlib.Path) -> None:
    """Loss, gradient norm and validation loss of --tp 2 are those of --tp 1, from the start and
    from its checkpoint.
    """
    shown = ["--sample-every", "2", "--curves", "tensorboard", "--peak-tflops", "0.01"]
    whole = train(folder, "whole", *shown)
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
    close(train(folder, "split", "--tp", "2"), whole)
    shutil.copytree(folder / "whole", folder / "resumed")
    shutil.rmtree(folder / "resumed" / "step-00000006")
    close(train(folder, "resumed", "--tp", "2", "--recompute", "--zero-level", "2"), whole)
    assert samples(folder / "resumed") == [2, 6]  # that of step 4 came after the checkpoint


def test_stages_learn_the_same(folder: pathlib.Path) -> None:
    """So do loss, gradient norm and validation loss with --pp 2, from the start and from a
    checkpoint of another --pp.
    """
    whole = train(folder, "unstaged")
    close(train(folder, "staged", "--pp", "2", "--micro-batches", "4"), whole)
    shutil.copytree(folder / "staged", folder / "unstaged-again")
    shutil.rmtree(folder / "unstaged-again" / "step-00000006")
    close(train(folder, "unstaged-again", "--tp", "2"), whole)


def test_sizes_that_cannot_be_shared(folder: pathlib.Path) -> None:
    """Each is named before anything starts."""
    bad = {
        "--tp 3": "--heads 4 is not divisible by --tp 3",
        "--pp 3": "--pp 3 is more than --layers 2",
        "--pp 2 --micro-batches 3": "--micro-batches 3 does not divide --pp 2 x --batch-size 4",
        "--tp 2 --pp 2": r"error: --tp 2 --pp 2: the world of 2 ranks.*expected a world size "
        "divisible by 4",
    }
    for words, complaint in bad.items():
        with pytest.raises(AssertionError, match="exit status 2") as failure:
            train(folder, "bad", *words.split())
        assert re.search(complaint, str(failure.value.__cause__)), words


def test_ranks_do_not_outlive_torchrun(folder: pathlib.Path) -> None:
    """When torchrun is killed, which tells its ranks nothing, they save and end; the next run goes
    on from there.
    """
    out = folder / "orphaned"
    arguments = [
        str(EXAMPLE / "train.py"),
        *flags(folder, "orphaned", "--tp", "2", "--steps", "100000"),
    ]
    with (folder / "said").open("w+") as said:
        launcher = subprocess.Popen(
            [*TORCHRUN, *arguments], env=environment(), stdout=said, stderr=subprocess.STDOUT
        )
        try:
            wait_for((out / "metrics.jsonl").exists, "the first step")
        finally:
            launcher.kill()
            launcher.wait()
        wait_for(
            lambda: (
                "run the same command to go on" in (folder / "said").read_text(encoding="utf-8")
            ),
            "the last words",
        )
    found = re.search(r"stopped after step (\d+)", (folder / "said").read_text(encoding="utf-8"))
    assert found is not None
    step = int(found[1])
    assert f"this run had finished before: {step} steps" in launch(
        *arguments, "--steps", str(step), "--warmup", "0"
    )


def program(path: str) -> None:
    """On a rank, as if torchrun had started it."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    runpy.run_path(path, run_name="__main__")


@pytest.mark.parametrize("number", [0, 1])
def test_the_programs_of_the_documentation(
    number: int, tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """docs/site/en/reference/parallel.md shows a tensor-parallel and a pipelined program, and they learn."""
    programs = re.findall(
        r"```python\n(.*?)```",
        (ROOT / "docs" / "site" / "en" / "reference" / "parallel.md").read_text(encoding="utf-8"),
        flags=re.DOTALL,
    )
    assert len(programs) == 2
    (tmp_path / "program.py").write_text(programs[number], encoding="utf-8")
    run_ranks(program, 2, str(tmp_path / "program.py"), join=False, timeout=120)
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", capfd.readouterr().out)]
    assert len(losses) == 30
    assert losses[0] > 5.0  # bytes known nothing of: log 256 is 5.5
    assert losses[-1] < 0.8 * losses[0]
