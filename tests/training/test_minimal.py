"""The program of the README: it is examples/minimal.py, and it learns, alone and on two ranks."""

from __future__ import annotations

import os
import pathlib
import re
import runpy
import subprocess
import sys

import pytest
import torch
from tests.ranks.runner import run_ranks

ROOT = pathlib.Path(__file__).parents[2]
PROGRAM = ROOT / "examples" / "minimal.py"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
SIZES, SMALL = "SEQ, BATCH, STEPS = 128, 8, 100", "SEQ, BATCH, STEPS = 32, 4, 100"


@pytest.mark.parametrize("name", ["README.md", "README-zh.md"])
def test_the_readme_shows_the_program(name: str) -> None:
    blocks = re.findall(
        r"```python\n(.*?)```", (ROOT / name).read_text(encoding="utf-8"), flags=re.DOTALL
    )
    assert PROGRAM.read_text(encoding="utf-8") in blocks


def test_it_is_short() -> None:
    lines = PROGRAM.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 56 and len([line for line in lines if line.strip()]) <= 46


def written(folder: pathlib.Path, steps: int | None = None) -> None:
    """Write the program into a new folder, with fewer and shorter rows.

    With `steps` it ends before it would make this step, as a crash ends it.
    """
    text = PROGRAM.read_text(encoding="utf-8")
    assert text.count(SIZES) == 1
    text = text.replace(SIZES, SMALL)
    if steps is not None:
        line = "        manager.zero_grad()\n"
        assert text.count(line) == 1
        text = text.replace(line, f"        if step == {steps}:\n            sys.exit(7)\n{line}")
    folder.mkdir(exist_ok=True)
    (folder / "program.py").write_text(text, encoding="utf-8")


def losses_in(said: str) -> dict[int, float]:
    """The loss of each step that the program has printed."""
    found = re.findall(r"step (\d+): loss (\d+\.\d+)", said)
    return {int(step): float(loss) for step, loss in found}


def started(launcher: list[str], folder: pathlib.Path) -> dict[int, float]:
    """The losses of a run by the launcher."""
    done = subprocess.run(
        [sys.executable, *launcher, "program.py", str(PROGRAM)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return losses_in(done.stdout)


def on_a_rank(folder: str) -> object:
    """The program's exit status, in a process that has imported torch."""
    os.chdir(folder)
    sys.argv = ["program.py", str(PROGRAM)]
    try:
        runpy.run_path("program.py", run_name="__main__")
    except SystemExit as end:
        return end.code
    return 0


@pytest.mark.parametrize("launcher", [[], TORCHRUN], ids=["python", "torchrun"])
def test_it_learns_and_goes_on(
    launcher: list[str], tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Ended on the way and started again, it prints what it prints without the stop."""
    ranks, whole, ended = 1 + bool(launcher), tmp_path / "whole", tmp_path / "ended"
    written(whole)
    losses = started(launcher, whole)
    assert [*losses] == [*range(100)]
    assert losses[0] > 5.0  # bytes known nothing of: log 256 is 5.5
    assert losses[99] < 0.6 * losses[0]
    saved = torch.load(whole / "minimal.pt", weights_only=True)
    assert saved["token.weight"].shape == (256, 128)
    assert saved["layers.3.linear1.weight"].shape == (512, 128)
    written(ended, steps=57)
    assert run_ranks(on_a_rank, ranks, str(ended), join=False, timeout=300) == [7] * ranks
    assert [*losses_in(capfd.readouterr().out)] == [*range(57)]
    assert not (ended / "minimal.pt").exists()
    written(ended)
    assert run_ranks(on_a_rank, ranks, str(ended), join=False, timeout=300) == [0] * ranks
    later = losses_in(capfd.readouterr().out)
    assert later == {step: loss for step, loss in losses.items() if step >= 50}
    for name, value in torch.load(ended / "minimal.pt", weights_only=True).items():
        assert torch.equal(value, saved[name]), name
