"""What is said to be missing for torch.compile on a GPU."""

import contextlib
import importlib.util
import sys

import pytest
import torch

from bmtrain.runtime import process, world


def test_what_is_missing_is_named(monkeypatch):
    """Nothing where all is there."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert process.missing_for_gpu() == "the package triton"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert process.missing_for_gpu((sys.executable,)) is None
    assert process.missing_for_gpu(("/nowhere/cc",)) == "a C compiler (/nowhere/cc)"


@pytest.mark.parametrize(
    ("wanted", "kind", "found", "answer"),
    [
        (None, "cpu", True, False),
        (True, "cpu", False, True),
        (None, "cuda", True, True),
        (None, "cuda", False, False),
        (False, "cuda", True, False),
        (True, "cuda", False, True),
    ],
)
def test_blocks_compile_where_they_can(monkeypatch, wanted, kind, found, answer):
    """Only what nobody has decided depends on the tools, and is told of them."""
    missing = None if found else "a C compiler (cc)"
    monkeypatch.setattr(process, "missing_for_gpu", lambda compilers: missing)
    words = r"uncompiled: torch.compile needs a C compiler \(cc\)"
    is_told = wanted is None and kind == "cuda" and not found
    with pytest.warns(UserWarning, match=words) if is_told else contextlib.nullcontext():
        assert world._compiles(wanted, torch.device(kind)) is answer


def test_the_environment_names_the_compiler(monkeypatch):
    asked = []
    monkeypatch.setattr(process, "missing_for_gpu", asked.append)
    monkeypatch.setenv("CC", "my-cc")
    world._compiles(None, torch.device("cuda"))
    monkeypatch.delenv("CC")
    world._compiles(None, torch.device("cuda"))
    assert asked == [("my-cc",), process.C_COMPILERS]
