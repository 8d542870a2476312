"""The spine: how many files one call of a block goes through, forward and backward."""

from __future__ import annotations

import pathlib
import sys
import types

import torch
from tests.ranks.runner import run_ranks

import bmtrain as bmt

MOST = 12
SOURCE = str(pathlib.Path(bmt.__file__).parent) + "/"


class Trace:
    """The files of the package whose functions are called on this thread."""

    def __init__(self) -> None:
        self.files: dict[str, None] = {}

    def __call__(self, frame: types.FrameType, event: str, arg: object) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(SOURCE):
            self.files[name.removeprefix(SOURCE)] = None

    def __enter__(self) -> list[str]:
        sys.setprofile(self)
        self.found: list[str] = []
        return self.found

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)
        self.found += self.files


def files_of_a_call(zero_level: int) -> tuple[list[str], list[str]]:
    linear = torch.nn.Linear(8, 8)
    block = bmt.Block(linear, use_checkpoint=False, zero_level=zero_level)
    x = torch.ones(2, 8)
    for _ in range(2):  # the first calls make what later ones find
        block(x).sum().backward()
    with Trace() as forward:
        out = block(x)
    with Trace() as backward:
        out.sum().backward()
    return forward, backward


def test_a_call_of_a_block_can_be_followed() -> None:
    """At most 12 files forward and 12 backward, with everything that two ranks do: gathers,
    reductions, comparisons, gradients.
    """
    for zero_level in (2, 3):
        for forward, backward in run_ranks(files_of_a_call, 2, zero_level):
            assert {"block/block.py", "shard/unshard.py", "distributed/transport.py"} <= {*forward}
            assert {"shard/backward.py", "shard/gradient.py"} <= {*backward}
            assert len(forward) <= MOST, forward
            assert len(backward) <= MOST, backward
