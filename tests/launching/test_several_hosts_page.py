"""docs/site/en/guides/several-hosts.md: its commands, its program, and what it says is said."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys

import pytest
from tests.launching.commands import check, check_program
from tests.launching.test_launched import ROOT, clean

from bmtrain.errors import ConfigurationError
from bmtrain.runtime.launchers import FOREIGN, meeting_place, read_launch

TEXT = (ROOT / "docs" / "site" / "en" / "guides" / "several-hosts.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```([^\n]*)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
SHELL = [re.sub(r"\\\n\s*", " ", text).strip() for kind, text in BLOCKS if kind == "shell"]
ROWS = re.findall(r"^\| `([A-Z_]+=\d.*)` \| (.*) \|$", TEXT, re.MULTILINE)


@pytest.mark.parametrize("command", SHELL)
def test_a_command_is_taken(command: str) -> None:
    """By its launcher and the program, or it names a file of examples/launch."""
    assert "\n" not in command
    words = shlex.split(command)
    files = [word for word in words if word.startswith("examples/launch/")]
    if not files:
        check(words)
        return
    assert all((ROOT / name).is_file() for name in files)
    if words[0] == "python":
        assert words[2].isdigit()
        check_program(words[3:])


def test_every_file_is_named() -> None:
    named = " ".join(SHELL)
    for path in (ROOT / "examples" / "launch").iterdir():
        assert path.suffix == ".sh" or path.name in named or path.is_dir()


def test_the_program_runs() -> None:
    (program,) = [text for kind, text in BLOCKS if kind == "python"]
    found = subprocess.run(
        [sys.executable, "-c", program], env=clean({}), check=True, text=True, capture_output=True
    )
    assert found.stdout == "0 1\n"


@pytest.mark.parametrize(("variables", "words"), ROWS)
def test_what_is_said_is_said(variables: str, words: str) -> None:
    environment = dict(one.split("=") for one in variables.split())
    with pytest.raises(ConfigurationError, match=re.escape(words)):
        meeting_place(read_launch(environment), environment)


def test_the_tables_are_whole() -> None:
    """Every variable of another launcher that counts stands on the page."""
    assert len(ROWS) == 8
    less_known = {"PMIX_RANK", "SLURM_NPROCS", "PET_NPROC_PER_NODE"}
    assert not [name for name in FOREIGN if name not in TEXT and name not in less_known]
