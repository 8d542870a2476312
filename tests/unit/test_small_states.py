"""What optimizer states are kept in: random bits, blocks of 8 bits, remainders; the update itself."""

from __future__ import annotations

import math

import pytest
import torch
from tests.tensors import zeros_on

from bmtrain.kernels.adam import AdamSettings
from bmtrain.kernels.adam_compact import CompactTensors, compact_update
from bmtrain.kernels.bf16 import are_neighbours, joined, remainders_of, round_stochastically, split
from bmtrain.kernels.blockwise import Blocks
from bmtrain.kernels.random_bits import key_of, random_bits, seed_of

CPU = torch.device("cpu")
COUNT = 1 << 18


def bits(seed: int, start: int = 0, count: int = COUNT) -> torch.Tensor:
    return random_bits(seed, start, count, CPU)


def blocks(values: torch.Tensor, dtype: torch.dtype) -> Blocks:
    found = Blocks.zeros(values.numel(), dtype, zeros_on(CPU))
    found.fill(values)
    return found


def test_random_bits_belong_to_places() -> None:
    """However the places are cut, and beyond 32 bits."""
    whole = bits(seed_of(key_of(3), 7), 100, 1000)
    assert torch.equal(whole[200:500], bits(seed_of(key_of(3), 7), 300, 300))
    assert torch.equal(bits(1, 2**32 + 5, 9), bits(1, 5, 9))
    assert not torch.equal(whole, bits(seed_of(key_of(4), 7), 100, 1000))
    assert not torch.equal(whole, bits(seed_of(key_of(3), 8), 100, 1000))


@pytest.mark.parametrize("shift", [0, 16])
def test_random_bits_are_even(shift: int) -> None:
    """Means of 16 bits, of neighbours' and of steps' products: within five standard errors."""
    found = [((bits(seed_of(key_of(0), step)) >> shift) & 0xFFFF).double() for step in (1, 2)]
    first, second = (x / 65536 - 0.5 for x in found)
    error = 5 / math.sqrt(12) / math.sqrt(COUNT)
    assert abs(first.mean()) < error
    for products in (first * second, first[1:] * first[:-1], first[64:] * first[:-64]):
        assert abs(products.mean()) < 5 / 12 / math.sqrt(COUNT)
    counts = torch.bincount((found[0] / 256).long(), minlength=256)
    assert (counts - COUNT / 256).square().sum() / (COUNT / 256) < 255 + 6 * math.sqrt(2 * 255)


@pytest.mark.parametrize("numel", [0, 1, 63, 64, 65, 1000])
def test_codes_are_close(numel: int) -> None:
    """The largest of a block is exact; others are off by half a code at most. Values that have a
    code keep it.
    """
    values = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    values *= 10.0 ** torch.arange(numel).div(64, rounding_mode="floor").sub(8)
    mean, square = blocks(values, torch.int8), blocks(values.square(), torch.uint8)
    for found, exact in ((mean, values), (square, values.square())):
        got = found.values()
        largest = found.scales.repeat_interleave(64)[:numel]
        assert torch.equal(got[exact.abs() == largest], exact[exact.abs() == largest])
        again = blocks(got, found.codes.dtype)
        assert torch.equal(again.codes, found.codes) and torch.equal(again.scales, found.scales)
    scales = mean.scales.repeat_interleave(64)[:numel]
    off = ((mean.values() / scales).abs().sqrt() - (values / scales).abs().sqrt()).abs()
    assert numel == 0 or off.max() <= 0.5001 / 127
    assert torch.equal(mean.values().sign()[mean.codes != 0], values.sign()[mean.codes != 0])
    off = (square.values() / scales.square()).pow(0.25) - (values / scales).abs().sqrt()
    assert numel == 0 or (off[square.codes > 1].abs().max() <= 0.5001 / 255)


def test_squares_do_not_become_zero() -> None:
    """Else Adam would divide by epsilon alone. What is zero stays so."""
    values = torch.full((64,), 1e-30)
    values[0], values[1] = 1.0, 0.0
    found = blocks(values, torch.uint8)
    assert found.codes[1] == 0 and found.codes[2:].min() == 1
    assert not blocks(torch.zeros(64), torch.uint8).values().any()
    assert not blocks(torch.zeros(64), torch.int8).values().isnan().any()


def test_squares_fall_with_their_gradients() -> None:
    """A thousand steps of gradients that have become small beside a large one: the nearest code
    would never change.
    """
    size, beta2 = 64 * 64, 0.999
    found = blocks(torch.ones(size), torch.uint8)
    exact = torch.ones(size)
    small = torch.arange(size) % 64 > 0
    for step in range(1000):
        for now in (exact, values := found.values()):
            now.mul_(beta2).add_(torch.where(small, 0.0, 1.0), alpha=1 - beta2)
        found.fill(values, bits(step, 0, size) & 0xFFFF)
    got = found.values()[small].mean()
    assert got == pytest.approx(exact[small].mean().item(), rel=0.05)
    nearest = blocks(torch.ones(size), torch.uint8)
    for _ in range(1000):
        values = nearest.values().mul_(beta2).add_(torch.where(small, 0.0, 1.0), alpha=1 - beta2)
        nearest.fill(values)
    assert nearest.values()[small].mean() > 0.99  # what the test above guards against


def awkward() -> torch.Tensor:
    """fp32 numbers: of every exponent, halfway between two bf16 numbers, zeros, infinities."""
    generator = torch.Generator().manual_seed(0)
    any_bits = torch.randint(-(2**31), 2**31, (100_000,), generator=generator).to(torch.int32)
    halves = (any_bits >> 16 << 16) + 0x8000
    found = torch.cat([any_bits, halves, halves - 1]).view(torch.float32)
    found = torch.cat([found, torch.tensor([0.0, -0.0, math.inf, -math.inf, 3.4028235e38])])
    return found[~found.isnan()]


def test_remainders_are_exact() -> None:
    """Every fp32 number comes back bit by bit, from a weight that is nearest to it."""
    masters = awkward()
    weight = torch.empty(masters.shape, dtype=torch.bfloat16)
    remainder = torch.empty(masters.shape, dtype=torch.int16)
    split(masters, weight, remainder)
    assert torch.equal(joined(weight, remainder).view(torch.int32), masters.view(torch.int32))
    finite = masters.bfloat16().isfinite()
    off = (weight.double() - masters.double()).abs()[finite]
    assert torch.equal(off, (masters.bfloat16().double() - masters.double()).abs()[finite])
    assert torch.equal(remainders_of(masters, weight), remainder)
    assert are_neighbours(masters, weight)
    rounded = masters.bfloat16()
    assert are_neighbours(masters[finite], rounded[finite])
    again = joined(rounded, remainders_of(masters, rounded))[finite]
    # one last place off where the nearest even number is below
    assert (again.view(torch.int32) - masters[finite].view(torch.int32)).abs().max() <= 1
    assert (again != masters[finite]).float().mean() < 0.2


def test_weights_of_elsewhere_are_exact() -> None:
    """A weight that is not next to its master has no remainder, and is noticed."""
    masters = torch.tensor([1.0, 1.0 + 2**-9, math.nan, -2.0])
    for weight, is_near in (
        ([1.0, 1.0, math.nan, -2.0], True),
        ([1.0, 1.0 + 2**-6, math.nan, -2.0], False),
        ([1.0, 1.0, 0.0, -2.0], False),
        ([1.0, 1.0, math.nan, 2.0], False),
    ):
        given = torch.tensor(weight).bfloat16()
        assert are_neighbours(masters, given) is is_near, weight
    far = torch.tensor([3.0, 3.0, 3.0, 2.0]).bfloat16()
    assert torch.equal(joined(far, remainders_of(masters, far)), far.float())


def test_remainders_of_other_weights_make_no_nan() -> None:
    weight = torch.tensor([0.0, -0.0], dtype=torch.bfloat16)
    found = joined(weight, torch.tensor([-5, -5], dtype=torch.int16))
    assert torch.equal(found, torch.zeros(2))


def test_stochastic_rounding() -> None:
    """Up with the probability of the distance; bf16 numbers stay; NaN and infinity too."""
    weight = torch.empty(COUNT, dtype=torch.bfloat16)
    value = 1.0 + 0.3 * 2.0**-7
    round_stochastically(torch.full((COUNT,), value), weight, bits(1) & 0xFFFF)
    assert set(weight.tolist()) == {1.0, 1.0 + 2.0**-7}
    assert weight.double().mean() == pytest.approx(value, abs=5 * 2.0**-8 / math.sqrt(COUNT))
    round_stochastically(torch.full((COUNT,), -value), weight, bits(2) & 0xFFFF)
    assert weight.double().mean() == pytest.approx(-value, abs=5 * 2.0**-8 / math.sqrt(COUNT))
    exact = torch.randn(COUNT, generator=torch.Generator().manual_seed(0)).bfloat16()
    round_stochastically(exact.float(), weight, bits(3) & 0xFFFF)
    assert torch.equal(weight, exact)
    odd = torch.tensor([math.nan, math.inf, -math.inf, 0.0])
    odd = torch.cat([odd, torch.tensor([-1], dtype=torch.int32).view(torch.float32)])
    round_stochastically(odd, weight[:5], torch.full((5,), 0xFFFF))
    assert weight[[0, 4]].isnan().all() and weight[1:4].tolist() == [math.inf, -math.inf, 0.0]


def settings(step: int, lr: float) -> AdamSettings:
    return AdamSettings(
        lr=lr, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, step=step, scale=4.0
    )


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("kind", ["exact", "fp32", "split", "none"])
def test_update_is_torchs(kind: str, quantised: bool) -> None:
    """Fifty steps beside torch.optim.AdamW in fp32: masters are equal where nothing is rounded,
    else close to what the rounding makes of them.
    """
    size = 64 * 50 + 7
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(size, generator=generator).bfloat16()
    param = torch.nn.Parameter(start.float())
    reference = torch.optim.AdamW([param], lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)
    weight = start.float() if kind == "exact" else start.clone()
    masters = {"exact": weight, "fp32": start.float(), "none": None}
    master = masters[kind] if kind in masters else torch.zeros(size, dtype=torch.int16)
    mean, square = (
        Blocks.zeros(size, dtype, zeros_on(CPU)) if quantised else torch.zeros(size)
        for dtype in (torch.int8, torch.uint8)
    )
    direction = torch.randn(size, generator=generator)
    for step in range(1, 51):
        param.grad = direction + torch.randn(size, generator=generator)
        reference.step()
        t = CompactTensors(weight, param.grad * 4.0, master, mean, square, 0, 0)
        compact_update([t], settings(step, 1e-3))
    want = param.detach()
    if kind == "split":
        assert master is not None
        found = joined(weight, master)
    else:
        found = weight.float() if kind in ("exact", "none") else master  # type: ignore[assignment]
    moved = (want - start.float()).abs().mean()
    assert moved > 0.02
    if kind == "none":  # by last places of bf16, here and there; on average not
        assert (found - want).abs().max() < 0.2
        assert abs((found - want).mean()) < 5 * 2.0**-8 / math.sqrt(size)
    elif quantised:
        assert (found - want).abs().mean() < 0.05 * moved
    else:
        torch.testing.assert_close(found, want, rtol=1e-6, atol=1e-6)


def test_small_updates_are_not_lost() -> None:
    """Each is a twentieth of half a last place: rounded to the nearest, weights would stay."""
    size = 4096
    for kind in ("split", "none"):
        weight = torch.ones(size, dtype=torch.bfloat16)
        master = torch.zeros(size, dtype=torch.int16) if kind == "split" else None
        t = CompactTensors(
            weight, torch.ones(size), master, torch.zeros(size), torch.zeros(size), 0, 0
        )
        for step in range(1, 101):
            compact_update(
                [t],
                AdamSettings(lr=1e-4, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.0, step=step),
            )
        found = weight if master is None else joined(weight, master)
        assert found.double().mean() == pytest.approx(0.99, abs=3e-4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_the_default_dtype_is_no_matter(dtype: torch.dtype) -> None:
    """Of the program, which makes a model in it perhaps."""
    values = torch.randn(300, generator=torch.Generator().manual_seed(0))
    found = []
    for default in (torch.float32, dtype):
        torch.set_default_dtype(default)
        try:
            found.append(blocks(values, torch.int8).values())
            found.append(blocks(values.abs(), torch.uint8).values())
        finally:
            torch.set_default_dtype(torch.float32)
    for usual, other in zip(found[:2], found[2:], strict=True):
        assert other.dtype == torch.float32
        assert torch.equal(usual, other)
