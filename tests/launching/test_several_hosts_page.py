"""docs/site/en/guides/several-hosts.md: its commands, its program, and what it says is said."""

import re
import shlex

import pytest
from tests.launching.commands import check, check_program
from tests.launching.test_launched import ROOT

from bmtrain.errors import ConfigurationError
from bmtrain.runtime.launchers import FOREIGN, meeting_place, read_launch

TEXT = (ROOT / "docs" / "site" / "en" / "guides" / "several-hosts.md").read_text("utf-8")
BLOCKS = re.findall(r"^```([^\n]*)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
SHELL = [re.sub(r"\\\n\s*", " ", text).strip() for kind, text in BLOCKS if kind == "shell"]
ROWS = re.findall(r"^\| `([A-Z_]+=\d.*)` \| (.*) \|$", TEXT, re.MULTILINE)


def test_commands_are_taken():
    """By their launcher and the program, or they name a file of examples/launch; every file is
    named.
    """
    for command in SHELL:
        assert "\n" not in command
        words = shlex.split(command)
        files = [word for word in words if word.startswith("examples/launch/")]
        assert all((ROOT / name).is_file() for name in files)
        if words[2:4] == ["bmtrain", "plan"]:  # read by its parser in tests/docs
            continue
        if not files:
            check(words)
        elif words[0] == "python":
            assert words[2].isdigit()
            check_program(words[3:])
    named = " ".join(SHELL)
    for path in (ROOT / "examples" / "launch").iterdir():
        assert path.suffix == ".sh" or path.name in named or path.is_dir()


def test_what_is_said_is_said():
    """Every variable of another launcher that counts stands on the page."""
    assert len(ROWS) == 8
    for variables, words in ROWS:
        environment = dict(one.split("=") for one in variables.split())
        with pytest.raises(ConfigurationError, match=re.escape(words)):
            meeting_place(read_launch(environment), environment)
    less_known = {"PMIX_RANK", "SLURM_NPROCS", "PET_NPROC_PER_NODE"}
    assert not [name for name in FOREIGN if name not in TEXT and name not in less_known]
