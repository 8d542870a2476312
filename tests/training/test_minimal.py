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


def test_it_has_forty_lines() -> None:
    lines = [line for line in PROGRAM.read_text(encoding="utf-8").splitlines() if line.strip()]
    assert len(lines) <= 40


@pytest.mark.parametrize("launcher", [[], TORCHRUN], ids=["python", "torchrun"])
def test_it_learns(launcher: list[str], tmp_path: pathlib.Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, str(PROGRAM)]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", done.stdout)]
    assert len(losses) == 100
    assert losses[0] > 5.0  # bytes known nothing of: log 256 is 5.5
    assert losses[-1] < 0.6 * losses[0]
    saved = torch.load(tmp_path / "minimal.pt", weights_only=True)
    assert saved["token.weight"].shape == (256, 128)
    assert saved["layers.3.linear1.weight"].shape == (512, 128)
