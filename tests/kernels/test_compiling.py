"""Kernels are compiled for a GPU, without one."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

OF_GENERATION = "cached_attention joined_parts store_tokens largest_of_parts largest_of_rows rotate gated row_products"
OF_TRAINING = "adamw compact scale scale_to squares sum_parts gelu_backward transpose norm norm_backward row_sums row_gradient"


@pytest.mark.long
@pytest.mark.compiler
def test_kernels_are_compiled(tmp_path: pathlib.Path) -> None:
    """In a process without the interpreter, which this one has."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernels.compiling"]
    root = pathlib.Path(__file__).parents[2]
    done = subprocess.run(
        command, env=environment, cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = {line.split("_kernel ")[0] for line in done.stdout.splitlines()}
    assert found == {*OF_GENERATION.split(), *OF_TRAINING.split()}
