"""Checksums that show writes past torch into gathered parameters."""

import pytest
import torch

from bmtrain.block import block


@pytest.mark.parametrize("most", [1, 6, 2**22])
def test_sums_of_rows_in_parts_are_those_of_the_whole(most, monkeypatch):
    monkeypatch.setattr(block, "_MOST_SUMMED", most)
    for shape in ((), (7,), (5, 3), (2, 3, 4), (0, 3), (3, 0)):
        for dtype, numbers in ((torch.bfloat16, torch.int16), (torch.float32, torch.int32)):
            values = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
            (found,) = block._sums([values])
            assert torch.equal(found, values.view(numbers).sum(-1).flatten())
