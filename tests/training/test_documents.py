"""READMEs and pages: programs that print once, a README that is read."""

from __future__ import annotations

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
NAMES = [str(path.relative_to(ROOT)) for path in PAGES]


@pytest.mark.parametrize("name", ["README.md", "README-zh.md"])
def test_the_readme_is_short(name: str) -> None:
    """What is longer belongs into docs/."""
    text = (ROOT / name).read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 200


@pytest.mark.parametrize("name", NAMES)
def test_programs_print_once(name: str) -> None:
    """Not once a rank: a program of a run prints by `bmt.print_rank`."""
    text = (ROOT / name).read_text(encoding="utf-8")
    for program in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
        if "init_distributed(" in program:
            assert not re.search(r"(?<![\w.])print\(", program), f"{name}: {program}"


def test_a_program_that_prints_on_every_rank_is_found() -> None:
    assert re.search(r"(?<![\w.])print\(", "    print(1)")
    assert not re.search(r"(?<![\w.])print\(", "bmt.print_rank(1); my_print(2); log.print(3)")
