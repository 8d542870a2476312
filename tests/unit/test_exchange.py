"""How a full gradient is parted between ranks before it is copied."""

from __future__ import annotations

import pytest
import torch

from bmtrain.distributed import exchange
from bmtrain.distributed.exchange import cut, joined


def parts_of(*sizes: int) -> list[torch.Tensor]:
    """Flat tensors that count on."""
    ends = torch.tensor(sizes).cumsum(0).tolist()
    return [
        torch.arange(end - size, end, dtype=torch.float32)
        for size, end in zip(sizes, ends, strict=True)
    ]


@pytest.mark.parametrize(
    "sizes", [(12,), (1,) * 12, (5, 7), (4, 4, 4), (0, 11, 0, 1), (3, 0, 0, 9)]
)
@pytest.mark.parametrize("num_shares", [1, 2, 3, 4, 12])
def test_shares_are_equal_and_in_order(sizes: tuple[int, ...], num_shares: int) -> None:
    parts = parts_of(*sizes)
    shares = cut(parts, num_shares)
    assert [sum(piece.numel() for piece in share) for share in shares] == [
        12 // num_shares
    ] * num_shares
    assert torch.equal(
        torch.cat([piece for share in shares for piece in share]), torch.arange(12.0)
    )
    memory = {part.untyped_storage().data_ptr() for part in parts}
    assert all(
        piece.untyped_storage().data_ptr() in memory for share in shares for piece in share
    ), "something was copied"


def test_nothing_is_cut_into_nothing() -> None:
    assert cut(parts_of(0, 0), 3) == [[], [], []]


def test_small_neighbours_are_joined_and_large_parts_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "LEAST_COPIED", 16)  # four elements
    parts = parts_of(1, 2, 9, 3, 8, 4, 1, 0, 1)
    found = joined(parts)
    assert [part.numel() for part in found] == [3, 9, 3, 8, 4, 2]
    assert torch.equal(torch.cat(found), torch.arange(29.0))
    assert [any(one is other for other in parts) for one in found] == [
        False,
        True,
        True,
        True,
        True,
        False,
    ]
