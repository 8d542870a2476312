"""What a program that depends on this distribution gets: types, commands, one base of all errors."""

import importlib
import inspect
import os
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from bmtrain.errors import BMTrainError
from bmtrain.version import __version__

ROOT = Path(__file__).parents[2]
PROJECT = (ROOT / "pyproject.toml").read_text("utf-8")
TYPED = '''
"""A program with a type at every place."""

import torch

import bmtrain as bmt
from bmtrain.errors import BMTrainError, CheckpointError
from model_center.model import Llama


class Body(torch.nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(dim, dim) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def train(folder: str, steps: int) -> float:
    bmt.init_distributed(seed=0)
    model: torch.nn.Module = bmt.BMTrainModelWrapper(Body(8))
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=1e-3)
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(optimizer)
    loss = torch.zeros(())
    with bmt.CheckpointManager(folder) as checkpoints:
        for _ in range(steps):
            loss = model(torch.ones(2, 8, device=bmt.device())).square().mean()
            manager.zero_grad()
            manager.backward(loss)
            manager.step()
        try:
            checkpoints.save(steps, model, manager)
        except CheckpointError as error:
            known: BMTrainError = error
            bmt.print_rank(known)
    return bmt.sum_loss(loss).item()


llama: type[Llama] = Llama
WRONG: str = bmt.rank()
'''


def test_all_errors_have_one_base():
    """Those of both packages; each is an error of Python's of its kind too."""
    for module in map(importlib.import_module, ("bmtrain.errors", "model_center.errors")):
        found = [x for _, x in inspect.getmembers(module, inspect.isclass)]
        errors = [x for x in found if issubclass(x, Exception) and x is not BMTrainError]
        assert len(errors) > 7
        for error in errors:
            others = [x for x in error.__mro__ if x.__module__ == "builtins"]
            assert issubclass(error, BMTrainError) and others[0] is not Exception, error


def test_commands_and_version():
    """Both commands can be called; the version is one that installers order above 1.x."""
    scripts = PROJECT.partition("[project.scripts]")[2].partition("\n[")[0]
    found = re.findall(r'^(\w+) = "([\w.]+):(\w+)"$', scripts, re.M)
    assert [name for name, _, _ in found] == ["bmtrain", "model_center"]
    for _, module, function in found:
        assert callable(getattr(importlib.import_module(module), function))
    assert re.fullmatch(r"[2-9]\.\d+\.\d+(\.dev\d+)?", __version__)


@pytest.mark.long
def test_a_program_of_its_own_is_checked_by_both_checkers(tmp_path):
    """In an environment that finds the packages as installed ones, by their py.typed: strictly by
    mypy and by pyright. Both find the one mistake in the last line, and no other.
    """
    venv.create(tmp_path / "env", with_pip=False)
    paths = {sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"], str(ROOT / "src")}
    (site,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    (site / "packages.pth").write_text("\n".join(paths), "utf-8")
    program = tmp_path / "program.py"
    program.write_text(TYPED.lstrip(), "utf-8")
    (tmp_path / "pyrightconfig.json").write_text('{"typeCheckingMode": "strict"}', "utf-8")
    python = str(tmp_path / "env" / "bin" / "python")
    environment = {
        name: x for name, x in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")
    }
    last = len(TYPED.lstrip().splitlines())
    for command in (
        ["mypy", "--strict", "--python-executable", python, "--cache-dir", str(tmp_path / "cache")],
        ["basedpyright", "--pythonpath", python, "--level", "error"],
    ):
        done = subprocess.run(
            [sys.executable, "-m", *command, "program.py"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        errors = [
            line for line in done.stdout.splitlines() if " error" in line and "program.py" in line
        ]
        assert len(errors) == 1 and f"program.py:{last}:" in errors[0], done.stdout + done.stderr
