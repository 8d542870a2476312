"""The largest number of each row: kernel against torch, which is its definition."""

import itertools
import math

import pytest
import torch

from model_center.kernels import largest as room
from model_center.kernels.largest import DTYPES, largest, largest_by_triton


@pytest.fixture(autouse=True)
def in_parts(monkeypatch):
    """Rows are longer than a program's part, and not its multiples."""
    monkeypatch.setattr(room, "BLOCK", 32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_is_that_of_torch(dtype):
    """Of few different numbers too, of which many are equal."""
    generator = torch.Generator().manual_seed(0)
    for shape in ((1, 1), (1, 7), (3, 32), (2, 33), (3, 150)):
        drawn = torch.randn(shape, generator=generator)
        for case in (-drawn.abs(), drawn.mul(2).round(), torch.zeros(shape), 1e30 * drawn):
            x = case.to(dtype)
            found = largest_by_triton(x)
            assert found.dtype == torch.int64 and torch.equal(found, x.argmax(-1))
            assert torch.equal(largest(x), found)


@pytest.mark.parametrize("rest", [-2.0, pytest.param(-0.0, marks=pytest.mark.long)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_special(dtype, rest):
    """Zeros of both signs are equal, infinities are numbers, and the first NaN is the largest."""
    special = [0.0, -0.0, math.inf, -math.inf, math.nan, -math.nan, 1.0]
    if dtype != torch.bfloat16:  # whose smallest numbers are zeros to the interpreter
        special += [torch.finfo(dtype).tiny / 4, -torch.finfo(dtype).tiny / 8]
    pairs = list(itertools.product(special, repeat=2))
    for first in (2, 33):  # in one part, and in two
        x = torch.full((len(pairs), 34), rest)
        x[:, [31, first]] = torch.tensor(pairs)
        x = x.to(dtype)
        wrong = largest_by_triton(x) != x.argmax(-1)
        assert not wrong.any(), [pair for pair, bad in zip(pairs, wrong, strict=True) if bad]


def test_rows_may_be_anywhere():
    """In a part of a larger memory, far from each other, or across."""
    x = torch.randn(6, 90, generator=torch.Generator().manual_seed(0))
    for view in (x[::2, 5:77], x[:, :9].t(), x.expand(6, 90)[1:2], x[:, ::2]):
        assert torch.equal(largest_by_triton(view), view.argmax(-1))
    assert largest_by_triton(torch.ones(0, 5)).shape == (0,)
    with pytest.raises(IndexError):
        largest_by_triton(torch.ones(2, 0))
    assert largest(torch.tensor([[1.0, 1 + 1e-12, 0.0]], dtype=torch.float64)).tolist() == [1]
