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
        self.files: set[str] = set()

    def __call__(self, frame: types.FrameType, event: str, arg: object) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(SOURCE):
            self.files.add(name.removeprefix(SOURCE))

    def __enter__(self) -> set[str]:
        sys.setprofile(self)
        return self.files

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)


def follow_a_call() -> None:
    """At most 12 files forward and 12 backward, with everything that two ranks do: gathers,
    reductions, comparisons, gradients.
    """
    for level in (2, 3):
        block = bmt.Block(torch.nn.Linear(8, 8), use_checkpoint=False, zero_level=level)
        x = torch.ones(2, 8)
        for _ in range(2):  # the first calls make what later ones find
            block(x).sum().backward()
        with Trace() as forward:
            out = block(x)
        with Trace() as backward:
            out.sum().backward()
        assert {"block/block.py", "shard/unshard.py", "distributed/transport.py"} <= forward
        assert {"shard/backward.py", "shard/gradient.py"} <= backward
        assert len(forward) <= MOST and len(backward) <= MOST, (forward, backward)


def test_a_call_of_a_block_can_be_followed() -> None:
    run_ranks(follow_a_call, 2)
