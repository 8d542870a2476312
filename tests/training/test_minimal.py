"""The program of the README is examples/first.py; examples/minimal.py learns, alone and on ranks."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.children import environment
from tests.ranks.runner import run_ranks

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "examples" / "minimal.py"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
SIZES, SMALL = "SEQ, BATCH, STEPS = 128, 8, 100", "SEQ, BATCH, STEPS = 32, 4, 100"


def test_the_readmes_keep_their_form():
    """They show the program, in at most 25 lines; they are short and have no relative links, which a
    package index cannot follow.
    """
    text = (ROOT / "examples" / "first.py").read_text("utf-8")
    assert len(text.splitlines()) <= 25
    for name in ("README.md", "README-zh.md"):
        readme = (ROOT / name).read_text("utf-8")
        assert text in re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
        lines = readme.splitlines()
        assert len(lines) <= 150 and max(map(len, lines)) <= 100
        assert not re.findall(r"\]\((?!https://)", readme)


def test_the_program_of_the_readme_learns(tmp_path, capfd):
    """On two ranks it prints what the README says; the first and the last loss."""
    (tmp_path / "program.py").write_text((ROOT / "examples" / "first.py").read_text("utf-8"))
    assert run_ranks(on_a_rank, 2, str(tmp_path), join=False, timeout=300) == [0, 0]
    losses = losses_in(capfd.readouterr().out)
    shown = losses_in((ROOT / "README.md").read_text("utf-8"))
    assert [*shown] == [10, 50] and len(losses) == 5
    assert all(abs(losses[step] - loss) < 0.01 for step, loss in shown.items())


def written(folder, steps=None):
    """Write the program into a new folder, with fewer and shorter rows.

    With `steps` it ends before it would make this step, as a crash ends it.
    """
    text = PROGRAM.read_text("utf-8")
    assert text.count(SIZES) == 1
    text = text.replace(SIZES, SMALL)
    if steps is not None:
        line = "        manager.zero_grad()\n"
        assert text.count(line) == 1
        text = text.replace(line, f"        if step == {steps}:\n            sys.exit(7)\n{line}")
    folder.mkdir(exist_ok=True)
    (folder / "program.py").write_text(text, "utf-8")


def losses_in(said):
    """The loss of each step that the program has printed."""
    found = re.findall(r"step (\d+): loss (\d+\.\d+)", said)
    return {int(step): float(loss) for step, loss in found}


def on_a_rank(folder):
    """The program's exit status, in a process that has imported torch."""
    os.chdir(folder)
    sys.argv = ["program.py", str(PROGRAM)]
    try:
        runpy.run_path("program.py", run_name="__main__")
    except SystemExit as end:
        return end.code
    return 0


@pytest.mark.long
def test_it_learns_and_goes_on(tmp_path, capfd):
    """Started by torchrun; ended on the way and started again, it prints what it prints without
    the stop.
    """
    whole, ended = tmp_path / "whole", tmp_path / "ended"
    written(whole)
    command = [sys.executable, *TORCHRUN, "program.py", str(PROGRAM)]
    subprocess.run(command, cwd=whole, env=environment(), timeout=300, check=True)
    losses = losses_in(capfd.readouterr().out)
    assert [*losses] == [*range(100)]
    assert losses[0] > 5.0  # bytes known nothing of: log 256 is 5.5
    assert losses[99] < 0.6 * losses[0]
    saved = torch.load(whole / "minimal.pt", weights_only=True)
    assert saved["token.weight"].shape == (256, 128)
    assert saved["layers.3.linear1.weight"].shape == (512, 128)
    later = {}
    for steps, code in ((57, 7), (None, 0)):
        assert not (ended / "minimal.pt").exists()
        written(ended, steps=steps)
        assert run_ranks(on_a_rank, 2, str(ended), join=False, timeout=300) == [code] * 2
        later = losses_in(capfd.readouterr().out)
        assert steps is None or [*later] == [*range(57)]
    assert later == {step: loss for step, loss in losses.items() if step >= 50}
    for name, value in torch.load(ended / "minimal.pt", weights_only=True).items():
        assert torch.equal(value, saved[name]), name
