"""What optimizer states are kept in: random bits, blocks of 8 bits, remainders."""

import math

import pytest
import torch
from tests.tensors import zero_blocks

from bmtrain.kernels.bf16 import are_neighbours, joined, remainders_of, round_stochastically, split
from bmtrain.kernels.random_bits import key_of, random_bits, seed_of

COUNT = 1 << 18
INF, NAN = math.inf, math.nan


def bits(seed, start=0, count=COUNT):
    return random_bits(seed, start, count, torch.device("cpu"))


def blocks(values, dtype):
    found = zero_blocks(values.numel(), dtype)
    found.fill(values)
    return found


def randn(size, seed=0):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def test_random_bits_belong_to_places():
    """However the places are cut, and beyond 32 bits."""
    seed = seed_of(key_of(3), 7)
    whole = bits(seed, 100, 1000)
    assert torch.equal(whole[200:500], bits(seed, 300, 300))
    assert torch.equal(bits(1, 2**32 + 5, 9), bits(1, 5, 9))
    assert bits(0, 0, 1) != 0 and max(map(key_of, range(9))) >= 2**31
    for other in (seed_of(key_of(4), 7), seed_of(key_of(3), 8)):
        assert not torch.equal(whole, bits(other, 100, 1000))


@pytest.mark.parametrize("default", [torch.float32, torch.float64, torch.bfloat16])
def test_codes_are_close(default):
    """The largest of a block is exact; others are off by half a code at most. Values that have a code
    keep it. The default dtype of the program does not matter.
    """
    for numel in (0, 1, 63, 64, 65, 1000):
        values = randn(numel) * 10.0 ** torch.arange(numel).div(64, rounding_mode="floor").sub(8)
        torch.set_default_dtype(default)
        try:
            mean, square = blocks(values, torch.int8), blocks(values.square(), torch.uint8)
            for found, exact in ((mean, values), (square, values.square())):
                got = found.values()
                largest = found.scales.repeat_interleave(64)[:numel]
                where = exact.abs() == largest
                assert got.dtype == torch.float32 and torch.equal(got[where], exact[where])
                again = blocks(got, found.codes.dtype)
                assert all(map(torch.equal, again, found))
            both = mean.values(), square.values()
        finally:
            torch.set_default_dtype(torch.float32)
        scales = mean.scales.repeat_interleave(64)[:numel]
        root = (values / scales).abs().sqrt()
        off = ((both[0] / scales).abs().sqrt() - root).abs()
        assert numel == 0 or off.max() <= 0.5001 / 127
        assert torch.equal(both[0].sign()[mean.codes != 0], values.sign()[mean.codes != 0])
        off = (both[1] / scales.square()).pow(0.25) - root
        assert numel == 0 or off[square.codes > 1].abs().max() <= 0.5001 / 255


def test_squares_do_not_become_zero():
    """Else Adam would divide by epsilon alone. What is zero stays so."""
    values = torch.full((64,), 1e-30)
    values[0], values[1] = 1.0, 0.0
    found = blocks(values, torch.uint8)
    assert found.codes[1] == 0 and found.codes[2:].min() == 1
    for dtype in (torch.uint8, torch.int8):
        assert torch.equal(blocks(torch.zeros(64), dtype).values(), torch.zeros(64))


def test_squares_fall_with_their_gradients():
    """A thousand steps of gradients that have become small beside a large one: the nearest code would
    never change.
    """
    size, beta2 = 64 * 16, 0.999
    random, nearest, exact = (torch.ones(size) for _ in range(3))
    small = torch.arange(size) % 64 > 0
    by_chance, by_distance = (blocks(x, torch.uint8) for x in (random, nearest))
    for step in range(1000):
        random, nearest = by_chance.values(), by_distance.values()
        for now in (exact, random, nearest):
            now.mul_(beta2).add_(torch.where(small, 0.0, 1.0), alpha=1 - beta2)
        by_chance.fill(random, bits(step, 0, size) & 0xFFFF)
        by_distance.fill(nearest)
    got = by_chance.values()[small].mean()
    assert got == pytest.approx(exact[small].mean().item(), rel=0.05)
    assert by_distance.values()[small].mean() > 0.99


def test_remainders_are_exact():
    """Every fp32 number comes back bit by bit, from a weight that is nearest to it: of every exponent,
    halfway between two bf16 numbers, zeros, infinities.
    """
    generator = torch.Generator().manual_seed(0)
    any_bits = torch.randint(-(2**31), 2**31, (100_000,), generator=generator).to(torch.int32)
    halves = (any_bits >> 16 << 16) + 0x8000
    masters = torch.cat([any_bits, halves, halves - 1]).view(torch.float32)
    masters = torch.cat([masters, torch.tensor([0.0, -0.0, INF, -INF, 3.4028235e38])])
    masters = masters[~masters.isnan()]
    weight, remainder = masters.bfloat16(), torch.zeros(masters.shape, dtype=torch.int16)
    split(masters, weight, remainder)
    assert torch.equal(joined(weight, remainder).view(torch.int32), masters.view(torch.int32))
    rounded = masters.bfloat16()
    finite = rounded.isfinite()
    off, least = ((x.double() - masters.double()).abs()[finite] for x in (weight, rounded))
    assert torch.equal(off, least)
    assert torch.equal(remainders_of(masters, weight), remainder)
    assert are_neighbours(masters, weight) and are_neighbours(masters[finite], rounded[finite])
    again = joined(rounded, remainders_of(masters, rounded))[finite]
    # one last place off where the nearest even number is below
    assert (again.view(torch.int32) - masters[finite].view(torch.int32)).abs().max() <= 1
    assert (again != masters[finite]).float().mean() < 0.2


def test_weights_of_elsewhere_are_exact():
    """A weight that is not next to its master has no remainder, and is noticed. Remainders of other
    weights make no NaN.
    """
    masters = torch.tensor([1.0, 1.0 + 2**-9, NAN, -2.0])
    for weight, is_near in (
        ([1.0, 1.0, NAN, -2.0], True),
        ([1.0, 1.0 + 2**-6, NAN, -2.0], False),
        ([1.0, 1.0, 0.0, -2.0], False),
        ([1.0, 1.0, NAN, 2.0], False),
    ):
        assert are_neighbours(masters, torch.tensor(weight).bfloat16()) is is_near, weight
    far = torch.tensor([3.0, 3.0, 3.0, 2.0]).bfloat16()
    assert torch.equal(joined(far, remainders_of(masters, far)), far.float())
    zeros = torch.tensor([0.0, -0.0]).bfloat16()
    assert torch.equal(joined(zeros, torch.tensor([-5, -5]).short()), torch.zeros(2))


def test_stochastic_rounding():
    """Up with the probability of the distance; bf16 numbers stay; NaN and infinity too."""
    weight = torch.empty(COUNT, dtype=torch.bfloat16)
    for value in (1.0 + 0.3 * 2.0**-7, -1.0 - 0.3 * 2.0**-7):
        round_stochastically(torch.full((COUNT,), value), weight, bits(1) & 0xFFFF)
        assert set(weight.abs().tolist()) == {1.0, 1.0 + 2.0**-7}
        assert weight.double().mean() == pytest.approx(value, abs=5 * 2.0**-8 / math.sqrt(COUNT))
    exact = randn(COUNT).bfloat16()
    round_stochastically(exact.float(), weight, bits(3) & 0xFFFF)
    assert torch.equal(weight, exact)
    of_all_bits = torch.tensor([-1], dtype=torch.int32).view(torch.float32)
    odd = torch.cat([torch.tensor([NAN, INF, -INF, 0.0]), of_all_bits])
    round_stochastically(odd, weight[:5], torch.full((5,), 0xFFFF))
    assert weight[[0, 4]].isnan().all() and weight[1:4].tolist() == [INF, -INF, 0.0]
