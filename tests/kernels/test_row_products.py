"""Products of one row: kernel against twin, twin against torch's linear maps and norms."""

import pytest
import torch
from torch.testing import assert_close

from model_center.kernels import row_products as room
from model_center.kernels.gated import ACTIVATIONS
from model_center.kernels.row_products import RowProducts, row_products, row_products_by_triton

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3}
# columns, outputs of each weight
SIZES = [(16, (8,)), (40, (5, 3)), (70, (16, 5, 1))]
CASES = [{}, {"biases": True}, {"norm": True}, {"biases": True, "norm": True}]


def check(
    columns, sizes, dtype=torch.float32, *, biases=False, norm=False, residual=False, act=None
):
    """The kernel is the twin; in fp32 the twin is what torch makes of it."""
    generator = torch.Generator().manual_seed(0)

    def made(*shape):  # of a size whose exponentials are finite
        return (torch.randn(shape, generator=generator) / 4).to(dtype)

    given = RowProducts(
        x=made(columns),
        weights=[made(size, columns) for size in sizes],
        biases=[made(size) if biases and place != 1 else None for place, size in enumerate(sizes)],
        norm=made(columns) if norm else None,
        eps=0.1,
        residual=made(sizes[0]) if residual else None,
        act=act,
    )
    found, expected = row_products_by_triton(given), row_products(given)
    assert found.dtype == expected.dtype == dtype
    assert_close(found, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    if dtype != torch.float32:
        return
    x = given.x
    if given.norm is not None:
        x = x * torch.rsqrt(x.square().mean() + 0.1) * given.norm
    outs = [
        (weight * x).sum(1) + (0 if bias is None else bias)
        for weight, bias in zip(given.weights, given.biases, strict=True)
    ]
    if act is not None:
        outs[0] = ACTIVATIONS[act](outs[0])
        outs = [outs[0] if len(outs) == 1 else outs[0] * outs[1]]
    by_torch = torch.cat(outs) + (0 if given.residual is None else given.residual)
    assert_close(expected, by_torch, rtol=1e-5, atol=1e-5)


@pytest.fixture(autouse=True)
def in_several_steps(monkeypatch):
    """Rows are longer than a program's step, and not its multiples."""
    monkeypatch.setattr(room, "BLOCK_IN", 32)


@pytest.mark.parametrize("size", SIZES)
def test_kernel_equals_twin(size):
    for number, options in enumerate(CASES):
        for place, dtype in enumerate(TOLERANCE):
            is_one = (number + place) % 2 == 0
            check(size[0], size[1][:1] if is_one else size[1], dtype, residual=is_one, **options)


@pytest.mark.parametrize(
    "act",
    [pytest.param(act, marks=() if act == "silu" else pytest.mark.long) for act in ACTIVATIONS],
)
def test_activations_follow(act):
    """Of one product, or as a gate of the second."""
    for options in CASES:
        check(72, (10, 10), act=act, **options)
        check(72, (10,), act=act, residual=True, **options)
