"""The page on memory: its code runs, its commands too, and its table is what the program wrote."""

from __future__ import annotations

import pathlib
import re
import shlex

import pytest

from bmtrain.__main__ import main

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs/site/en/guides/memory.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = [
    line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()
]


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_programs_run(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    """As they stand."""
    exec(compile(PROGRAMS[number], "memory.md", "exec"), {})
    assert capsys.readouterr().out.startswith("True ")


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_run(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """They end well and say something."""
    words = shlex.split(command)
    assert words[:3] == ["python", "-m", "bmtrain"]
    assert main(words[3:]) == 0
    assert capsys.readouterr().out


def test_the_table_is_that_of_the_program() -> None:
    """Between the marks."""
    found = re.search(r"<!-- forecast:start -->\n(.*?)<!-- forecast:end -->", PAGE, re.DOTALL)
    assert found is not None
    written = (ROOT / "benchmarks/results/forecast.md").read_text(encoding="utf-8")
    assert found[1].strip() == written.strip()
