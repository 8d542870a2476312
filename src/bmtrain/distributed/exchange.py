"""Reduce-scatter of full gradients by peer copies: no NCCL, and no SMs except for the sum."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence

import torch

from bmtrain.distributed.peers import REDUCTIONS, Peers
from bmtrain.kernels.sum_parts import sum_parts
from bmtrain.runtime.mesh import Axis

# Bytes. Larger parts of a gradient are copied from where they are. Smaller ones are concatenated
# first: issuing a copy costs the host as long as concatenating this much costs the device.
LEAST_COPIED = 2**23


class Exchange:
    """Reduce-scatter for full gradients of one size and dtype.

    Every rank copies a part of its gradient to each peer, then sums the parts it received. `send`
    and `sum` alternate, on the reduce stream.

    Args:
        peers: the ranks.
        numel, dtype: of a full gradient.
        side_by_side: issues copies that may run concurrently.

    Raises:
        torch.OutOfMemoryError: on all ranks, if any runs out of memory.
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
            # This rank's slot in the memory of each rank.
            self._places = [
                part.view(peers.axis.size, -1)[peers.axis.index] for part in self._memory.parts
            ]

    def send(self, parts: Sequence[torch.Tensor]) -> None:
        """Copy this rank's full gradient (n * ranks,) to the ranks that sum it.

        `parts` are flat tensors whose concatenation is the gradient.
        """
        axis = self._peers.axis
        shares = cut(joined(parts), axis.size)
        self._side_by_side(
            [functools.partial(_copy, self._places[rank], shares[rank]) for rank in rotated(axis)]
        )

    def sum(self, total: torch.Tensor, accumulate: bool) -> None:
        """Sum this rank's part over all ranks into `total` (n,), as `sum_parts` does."""
        # Without it, the sum could read a peer's part before it has arrived.
        self._peers.barrier(REDUCTIONS)
        sum_parts(total, self._incoming, accumulate=accumulate)
        # Without it, a peer's next send could overwrite memory that is still being summed.
        self._peers.barrier(REDUCTIONS)


def rotated(axis: Axis) -> list[int]:
    """The indices of the axis from this rank's on, so that ranks do not all copy to one at once."""
    return [(axis.index + step) % axis.size for step in range(axis.size)]


def joined(parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The same data, with neighbouring small parts concatenated."""
    found: list[torch.Tensor] = []
    for is_small, run in itertools.groupby(parts, lambda part: part.nbytes < LEAST_COPIED):
        pieces = list(run)
        found += [torch.cat(pieces)] if is_small and len(pieces) > 1 else pieces
    return found


def cut(parts: Sequence[torch.Tensor], num_shares: int) -> list[list[torch.Tensor]]:
    """Cut the concatenation of `parts` into `num_shares` shares of equal size, without copying."""
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
    """Fill `into` with the concatenation of the pieces."""
    for place, piece in zip(into.split([piece.numel() for piece in pieces]), pieces, strict=True):
        place.copy_(piece)
