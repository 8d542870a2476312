"""The page on memory: its commands run, and its table is what the program wrote (its code runs with that
of all pages, in tests/docs).
"""

from __future__ import annotations

import pathlib
import re
import shlex

import pytest

from bmtrain.__main__ import main

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs/site/en/guides/memory.md").read_text(encoding="utf-8")


@pytest.mark.long
def test_commands_run(capsys: pytest.CaptureFixture[str]) -> None:
    """They end well and say something."""
    for line in "".join(re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)).splitlines():
        words = shlex.split(line)
        assert words[:3] == ["python", "-m", "bmtrain"]
        assert main(words[3:]) == 0
        assert capsys.readouterr().out


def test_the_table_is_that_of_the_program() -> None:
    """Between the marks."""
    found = re.search(r"<!-- forecast:start -->\n(.*?)<!-- forecast:end -->", PAGE, re.DOTALL)
    written = (ROOT / "benchmarks/results/forecast.md").read_text(encoding="utf-8")
    assert found is not None and found[1].strip() == written.strip()
