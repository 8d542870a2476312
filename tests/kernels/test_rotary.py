"""Rotary positions: kernel against twin, twin against a rotation of complex numbers."""

from __future__ import annotations

import pytest
import torch

from bmtrain.kernels.rotary import rotate, rotate_by_triton

TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3}


def case(
    dim: int, pairs: int, per_row: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    # as linear layers leave them: heads beside each other at each position
    query, key = (
        torch.randn(2, 5, heads, dim, generator=generator).to(dtype).transpose(1, 2)
        for heads in (6, 2)
    )
    angles = torch.randn(2, 5, pairs, generator=generator)
    angles = angles if per_row else angles[0]
    return query, key, angles.cos(), angles.sin()


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_twin_turns_pairs(interleaved: bool) -> None:
    """Two channels are a complex number, which is multiplied by one of length 1."""
    query, key, cos, sin = case(16, 8, True, torch.float32)
    turned = torch.complex(cos, sin)[:, None]
    for x, found in zip((query, key), rotate(query, key, cos, sin, interleaved), strict=True):
        one, other = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :8], x[..., 8:])
        product = torch.complex(one.contiguous(), other.contiguous()) * turned
        parts = (product.real, product.imag)
        expected = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize(("dim", "pairs"), [(16, 8), (24, 12), (20, 3)])
def test_kernel_equals_twin(
    dim: int, pairs: int, per_row: bool, interleaved: bool, dtype: torch.dtype
) -> None:
    """Channels beyond the pairs stay as they are."""
    arguments = (*case(dim, pairs, per_row, dtype), interleaved)
    for found, expected, x in zip(
        rotate_by_triton(*arguments), rotate(*arguments), arguments[:2], strict=True
    ):
        assert found.dtype == expected.dtype == dtype and found.is_contiguous()
        torch.testing.assert_close(found, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        assert torch.equal(found[..., 2 * pairs :], x[..., 2 * pairs :])


def test_nothing() -> None:
    query, key, cos, sin = case(16, 8, False, torch.float32)
    assert rotate_by_triton(query[:0], key[:0], cos, sin, False)[0].shape == (0, 6, 5, 16)
