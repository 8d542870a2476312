"""Products of one row: kernel against twin, twin against torch's linear maps and norms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from bmtrain.kernels import row_products as room
from bmtrain.kernels.gated import ACTIVATIONS
from bmtrain.kernels.row_products import RowProducts, row_products, row_products_by_triton

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3}
# columns, outputs of each weight
SIZES = [(16, (8,)), (40, (5, 3)), (72, (9, 4, 6)), (130, (16, 16, 1))]
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "biased": {"biases": True},
    "normed": {"norm": True},
    "all": {"biases": True, "norm": True},
}


def case(
    columns: int,
    sizes: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    *,
    biases: bool = False,
    norm: bool = False,
    residual: bool = False,
    act: str | None = None,
) -> RowProducts:
    generator = torch.Generator().manual_seed(0)

    def made(*shape: int) -> torch.Tensor:  # of a size whose exponentials are finite
        return (torch.randn(shape, generator=generator) / 4).to(dtype)

    return RowProducts(
        x=made(columns),
        weights=[made(size, columns) for size in sizes],
        biases=[made(size) if biases and place != 1 else None for place, size in enumerate(sizes)],
        norm=made(columns) if norm else None,
        eps=0.1,
        residual=made(sizes[0]) if residual else None,
        act=act,
    )


def assert_equals_twin(given: RowProducts) -> None:
    found, expected = row_products_by_triton(given), row_products(given)
    tolerance = TOLERANCE[given.x.dtype]
    assert found.dtype == expected.dtype == given.x.dtype
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.fixture(autouse=True)
def in_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are longer than a program's step, and not its multiples."""
    monkeypatch.setattr(room, "BLOCK_IN", 32)


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
@pytest.mark.parametrize("size", SIZES)
def test_the_twin_is_linear(size: tuple[int, tuple[int, ...]], options: dict[str, Any]) -> None:
    given = case(*size, **options)
    x = given.x
    if given.norm is not None:
        x = x * torch.rsqrt(x.square().mean() + 0.1) * given.norm
    found = row_products(given).split(list(size[1]))
    for one, weight, bias in zip(found, given.weights, given.biases, strict=True):
        expected = (weight * x).sum(1) + (0 if bias is None else bias)
        torch.testing.assert_close(one, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_the_twin_is_a_feed_forward_network(act: str) -> None:
    given = case(40, (12, 12), biases=True, act=act)
    gate, up = (
        F.linear(given.x, weight, bias)
        for weight, bias in zip(given.weights, given.biases, strict=True)
    )
    torch.testing.assert_close(row_products(given), ACTIVATIONS[act](gate) * up)
    given = case(40, (12,), biases=True, act=act)
    expected = ACTIVATIONS[act](F.linear(given.x, given.weights[0], given.biases[0]))
    torch.testing.assert_close(row_products(given), expected)
    given = case(40, (12,), residual=True)
    assert given.residual is not None
    torch.testing.assert_close(row_products(given), given.weights[0] @ given.x + given.residual)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
@pytest.mark.parametrize("size", SIZES)
def test_kernel_equals_twin(
    size: tuple[int, tuple[int, ...]], options: dict[str, Any], dtype: torch.dtype
) -> None:
    assert_equals_twin(case(*size, dtype, **options))
    assert_equals_twin(case(size[0], size[1][:1], dtype, residual=True, **options))


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_activations_follow(act: str, options: dict[str, Any]) -> None:
    """Of one product, or as a gate of the second."""
    assert_equals_twin(case(72, (10, 10), act=act, **options))
    assert_equals_twin(case(72, (10,), act=act, residual=True, **options))
