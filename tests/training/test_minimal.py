"""The program of the README: it is examples/minimal.py, and it learns, alone and on two ranks."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest
import torch

ROOT = pathlib.Path(__file__).parents[2]
PROGRAM = ROOT / "examples" / "minimal.py"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]


@pytest.mark.parametrize("name", ["README.md", "README-zh.md"])
def test_the_readme_shows_the_program(name: str) -> None:
    blocks = re.findall(
        r"```python\n(.*?)```", (ROOT / name).read_text(encoding="utf-8"), flags=re.DOTALL
    )
    assert PROGRAM.read_text(encoding="utf-8") in blocks


def test_it_is_short() -> None:
    lines = PROGRAM.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 56 and len([line for line in lines if line.strip()]) <= 46


def run(launcher: list[str], folder: pathlib.Path, steps: int | None = None) -> dict[int, float]:
    """The loss of each step that the program prints.

    With `steps` the run is ended before it would make this step, as a crash ends it.
    """
    text = PROGRAM.read_text(encoding="utf-8")
    if steps is not None:
        line = "        manager.zero_grad()\n"
        assert text.count(line) == 1
        text = text.replace(line, f"        if step == {steps}:\n            sys.exit(7)\n{line}")
    (folder / "program.py").write_text(text, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, "program.py", str(PROGRAM)]
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode == 0) == (steps is None), done.stderr
    found = re.findall(r"step (\d+): loss (\d+\.\d+)", done.stdout)
    return {int(step): float(loss) for step, loss in found}


@pytest.mark.parametrize("launcher", [[], TORCHRUN], ids=["python", "torchrun"])
def test_it_learns_and_goes_on(launcher: list[str], tmp_path: pathlib.Path) -> None:
    """Ended on the way and started again, it prints what it prints without the stop."""
    (tmp_path / "whole").mkdir()
    losses = run(launcher, tmp_path / "whole")
    assert [*losses] == [*range(100)]
    assert losses[0] > 5.0  # bytes known nothing of: log 256 is 5.5
    assert losses[99] < 0.6 * losses[0]
    saved = torch.load(tmp_path / "whole" / "minimal.pt", weights_only=True)
    assert saved["token.weight"].shape == (256, 128)
    assert saved["layers.3.linear1.weight"].shape == (512, 128)
    (tmp_path / "ended").mkdir()
    assert [*run(launcher, tmp_path / "ended", steps=57)] == [*range(57)]
    assert not (tmp_path / "ended" / "minimal.pt").exists()
    later = run(launcher, tmp_path / "ended")
    assert later == {step: loss for step, loss in losses.items() if step >= 50}
    for name, value in torch.load(tmp_path / "ended" / "minimal.pt", weights_only=True).items():
        assert torch.equal(value, saved[name]), name
