"""The spine: what one call of a block goes through by default, forward and backward."""

import dataclasses
import pathlib
import sys

import torch
from tests.ranks.runner import on_ranks

import bmtrain as bmt
from bmtrain.runtime import world

SOURCE = str(pathlib.Path(bmt.__file__).parent) + "/"
# Functions, files and depth of calls: what a reader of one call has to follow, lowered with each
# change that makes it less.
MOST_FORWARD, MOST_BACKWARD = (79, 10, 12), (95, 10, 9)


@dataclasses.dataclass
class Trace:
    """The functions of the package that are called on this thread."""

    functions: set[tuple[str, str]] = dataclasses.field(default_factory=set)
    deepest: int = 0
    _depth: int = 0

    def __call__(self, frame, event, arg):
        code = frame.f_code
        if not code.co_filename.startswith(SOURCE):
            return
        if event == "call":
            self._depth += 1
            self.deepest = max(self.deepest, self._depth)
            self.functions.add((code.co_filename.removeprefix(SOURCE), code.co_qualname))
        elif event == "return":
            self._depth -= 1

    def __enter__(self):
        sys.setprofile(self)
        return self

    def __exit__(self, *error):
        sys.setprofile(None)

    @property
    def files(self):
        return {file for file, _ in self.functions}

    def is_within(self, most):
        found = len(self.functions), len(self.files), self.deepest
        return all(one <= other for one, other in zip(found, most, strict=True))


class FeedForward(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 32), torch.nn.Linear(32, 8)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


@on_ranks(2)
def test_a_call_of_a_block_can_be_followed():
    """With everything that two ranks do: gathers, reductions, comparisons, gradients."""
    world.current("a test").draws.same_rows = False  # as by default
    block, x = bmt.Block(FeedForward()), torch.ones(2, 8)
    for _ in range(3):  # the first calls make what later ones find
        block(x).sum().backward()
    with Trace() as forward:
        out = block(x)
    with Trace() as backward:
        out.sum().backward()
    assert {"block/block.py", "shard/unshard.py", "distributed/transport.py"} <= forward.files
    assert {"shard/unshard.py", "shard/gradient.py"} <= backward.files
    for trace, most in ((forward, MOST_FORWARD), (backward, MOST_BACKWARD)):
        found = len(trace.functions), len(trace.files), trace.deepest
        assert trace.is_within(most), f"{found} functions, files, depth; at most {most}"
