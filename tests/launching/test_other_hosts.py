"""A run goes on at another number of hosts, by the same command."""

from __future__ import annotations

import json
import pathlib
import shutil
from typing import Any

import pytest
from tests.launching.test_launched import ROOT, agent, launch
from tests.ranks.test_again import free_port
from tests.training.test_example_parallel import flags, train

GPT2 = str(ROOT / "examples" / "gpt2" / "train.py")


def records(folder: pathlib.Path) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm of each step."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    found: list[dict[str, Any]] = [json.loads(line) for line in lines]
    return {one["step"]: (one["loss"], one["grad_norm"]) for one in found if "loss" in one}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A run of six steps on two hosts of one rank each, with a checkpoint after the third."""
    folder = tmp_path_factory.mktemp("hosts")
    lines = (f"line {i}: the value of {i * i} is {i % 7}\n" for i in range(3000))
    (folder / "text").write_text("".join(lines), encoding="utf-8")
    command = [*agent(free_port(), 2, 1), GPT2, *flags(folder, "whole")]
    found = launch([(command, {})] * 2)
    assert [code for code, _ in found] == [0, 0], found
    return folder


@pytest.mark.parametrize("ranks", [1, 2])
def test_losses_are_those_of_an_unbroken_run(
    folder: pathlib.Path, ranks: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """From two hosts to one, with one rank (and twice the micro-batches) and with two."""
    whole, part = folder / "whole", folder / f"part-{ranks}"
    shutil.copytree(whole, part)
    for late in part.glob("step-*6"):
        shutil.rmtree(late)
    train(folder, part.name, "--grad-accumulation", str(2 // ranks), ranks=ranks)
    printed = capfd.readouterr().out
    assert "going on from" in printed and "step-00000003" in printed, printed
    expected, found = records(whole), records(part)
    assert found.keys() == expected.keys() and len(found) == 6
    for number in expected:
        assert found[number] == pytest.approx(expected[number], rel=1e-5), number
    if ranks == 2:
        assert found == expected
