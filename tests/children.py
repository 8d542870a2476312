"""Processes of this interpreter that find the sources of this repository."""

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]


def environment(**more):
    """Of such a process: with the sources, and one thread, as ranks have it."""
    own = {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    return {**os.environ, **own, **more}


def ran(*arguments, cwd=None, timeout=300, **more):
    """How a process with these arguments, and `more` variables, has ended, and what it has printed."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
