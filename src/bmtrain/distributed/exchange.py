"""Sums of full gradients by copies into each other's memory: no collective, and no processor of the
device but for the sum.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence

import torch

from bmtrain.distributed.peers import REDUCTIONS, Peers
from bmtrain.kernels.sum_parts import sum_parts
from bmtrain.runtime.mesh import Axis

# Bytes. Larger parts of a gradient are copied from where they are. Smaller ones are joined first: a
# copy costs the host as long as the device takes to join so much.
LEAST_COPIED = 2**23


class Exchange:
    """Full gradients of one size, one after the other: every rank copies to each its part, and sums
    up what came from all.

    `send` and `sum` are called in turn, on the reduce stream.

    Args:
        peers: the ranks.
        numel, dtype: of a full gradient.
        side_by_side: issues copies that may run at the same time.

    Raises:
        torch.OutOfMemoryError, OSError: on all ranks, if one has no room.
    """

    def __init__(
        self,
        peers: Peers,
        numel: int,
        dtype: torch.dtype,
        side_by_side: Callable[[Sequence[Callable[[], object]]], None],
    ) -> None:
        self._peers, self._side_by_side = peers, side_by_side
        with torch.inference_mode(False):
            own, self._memory = peers.allocate(numel, dtype)
            self._incoming = own.view(peers.axis.size, -1)  # by sender
            # For what this rank sends, with each of the ranks.
            self._places = [
                part.view(peers.axis.size, -1)[peers.axis.index] for part in self._memory.parts
            ]

    def meet(self) -> None:
        """All ranks have theirs: without it the first copy may reach memory that is not mapped yet.

        On the reduce stream.
        """
        self._peers.barrier(REDUCTIONS)

    def send(self, parts: Sequence[torch.Tensor]) -> None:
        """Copy `parts`, flat and one behind the other this rank's full gradient (n * ranks,), to
        the ranks that sum them.
        """
        axis = self._peers.axis
        shares = cut(joined(parts), axis.size)
        self._side_by_side(
            [functools.partial(_copy, self._places[rank], shares[rank]) for rank in rotated(axis)]
        )

    def sum(self, total: torch.Tensor, accumulate: bool) -> None:
        """Add this rank's part of what all ranks have sent into `total` (n,), as `sum_parts`
        does.
        """
        self._peers.barrier(REDUCTIONS)  # all has arrived
        sum_parts(total, self._incoming, accumulate=accumulate)
        self._peers.barrier(REDUCTIONS)  # all have summed: what comes next may be copied


def rotated(axis: Axis) -> list[int]:
    """All places of the axis from this rank's on: no rank's memory is used by all others at
    once.
    """
    return [(axis.index + step) % axis.size for step in range(axis.size)]


def joined(parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The same, small neighbours in one tensor."""
    found: list[torch.Tensor] = []
    for is_small, run in itertools.groupby(parts, lambda part: part.nbytes < LEAST_COPIED):
        pieces = list(run)
        found += [torch.cat(pieces)] if is_small and len(pieces) > 1 else pieces
    return found


def cut(parts: Sequence[torch.Tensor], num_shares: int) -> list[list[torch.Tensor]]:
    """What lies one behind the other, in shares of equal size."""
    size = sum(part.numel() for part in parts) // num_shares
    shares: list[list[torch.Tensor]] = [[] for _ in range(num_shares)]
    begin = 0
    for part in parts:
        done = 0
        while done < part.numel():
            share, filled = divmod(begin + done, size)
            end = min(part.numel(), done + size - filled)
            shares[share].append(part[done:end])
            done = end
        begin += done
    return shares


def _copy(into: torch.Tensor, pieces: Sequence[torch.Tensor]) -> None:
    """Fill `into` with the pieces, one behind the other."""
    for place, piece in zip(into.split([piece.numel() for piece in pieces]), pieces, strict=True):
        place.copy_(piece)
