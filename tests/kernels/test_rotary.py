"""Rotary positions: kernel against twin, twin against a rotation of complex numbers."""

import itertools

import pytest
import torch
from torch.testing import assert_close

from model_center.kernels.rotary import rotate, rotate_by_triton

TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3}


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("per_row", [False, True])
def test_kernel_equals_twin(per_row, interleaved):
    """Two channels are a complex number, which is multiplied by one of length 1. Channels beyond the
    pairs stay as they are.
    """
    generator = torch.Generator().manual_seed(0)
    for (dim, pairs), dtype in itertools.product(((16, 8), (24, 12), (20, 3)), TOLERANCE):
        # as linear layers leave them: heads beside each other at each position
        given = [
            torch.randn(2, 3, heads, dim, generator=generator).to(dtype).transpose(1, 2)
            for heads in (3, 2)
        ]
        angles = torch.randn(2, 3, pairs, generator=generator)
        tables = angles if per_row else angles[0]
        every = (*given, tables.cos(), tables.sin(), interleaved)
        kernel, twin = rotate_by_triton(*every), rotate(*every)
        turn = torch.polar(torch.ones(tables.shape), tables)
        turn = turn[:, None] if per_row else turn
        for x, found, expected in zip(given, kernel, twin, strict=True):
            assert found.dtype == expected.dtype == dtype and found.is_contiguous()
            tolerance = TOLERANCE[dtype]
            assert_close(found, expected, rtol=tolerance, atol=tolerance)
            whole = x[..., : 2 * pairs].float()
            layout = (pairs, 2) if interleaved else (2, pairs)
            one, other = whole.unflatten(-1, layout).unbind(-1 if interleaved else -2)
            product = torch.view_as_real(torch.complex(one, other) * turn)
            product = product if interleaved else product.mT
            turned = torch.cat([product.flatten(-2), x[..., 2 * pairs :].float()], -1)
            assert_close(expected.float(), turned, rtol=tolerance, atol=tolerance)
            assert torch.equal(found[..., 2 * pairs :], x[..., 2 * pairs :])


def test_nothing():
    query, key, table = torch.ones(0, 6, 5, 16), torch.ones(0, 2, 5, 16), torch.ones(5, 8)
    found = rotate_by_triton(query, key, table, table, False)
    assert [x.shape for x in found] == [query.shape, key.shape]
