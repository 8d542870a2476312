"""How a full gradient is parted between ranks before it is copied."""

import pytest
import torch

from bmtrain.distributed import exchange


def parts_of(*sizes):
    """Flat tensors that count on, each in memory of its own."""
    return [part.clone() for part in torch.arange(float(sum(sizes))).split(sizes)]


@pytest.mark.parametrize(
    "sizes", [(12,), (1,) * 12, (5, 7), (4, 4, 4), (0, 11, 0, 1), (3, 0, 0, 9)]
)
def test_shares_are_equal_and_in_order(sizes):
    parts = parts_of(*sizes)
    memory = {part.untyped_storage().data_ptr() for part in parts}
    for count in (1, 2, 3, 4, 12):
        shares = exchange.cut(parts, count)
        assert [sum(map(torch.numel, share)) for share in shares] == [12 // count] * count
        pieces = [piece for share in shares for piece in share]
        assert torch.equal(torch.cat(pieces), torch.arange(12.0))
        assert {x.untyped_storage().data_ptr() for x in pieces} <= memory, "something was copied"
    assert exchange.cut(parts_of(0, 0), 3) == [[], [], []]


def test_small_neighbours_are_joined_and_large_parts_stay(monkeypatch):
    monkeypatch.setattr(exchange, "LEAST_COPIED", 16)  # four elements
    parts = parts_of(1, 2, 9, 3, 8, 4, 1, 0, 1)
    found = exchange.joined(parts)
    assert list(map(torch.numel, found)) == [3, 9, 3, 8, 4, 2]
    assert torch.equal(torch.cat(found), torch.arange(29.0))
    assert [any(one is x for x in parts) for one in found] == [False, *[True] * 4, False]
