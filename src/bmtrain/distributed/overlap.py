"""Tensor-parallel matrix products that overlap communication with computation.

Every rank holds rows of its own, a matrix (rows, n); together they form a matrix (ranks * rows, n),
in rank order. Communication is split into chunks: chunk c of a gather or a reduction holds the c-th
part of every rank's rows.

Memory is allocated on the compute stream and used on a side stream. If it were freed in between,
the allocator could hand it to a compute kernel while the side stream still uses it. Gathering and
Scattering therefore hold it until the compute stream has waited for that work.
"""

from __future__ import annotations

import dataclasses

import torch

from bmtrain.distributed.transport import Streams, gather_shards, reduce_shards
from bmtrain.runtime.world import World

# Multiplications. A GPU with less to compute for a chunk waits for the host, which issues the
# communication and the products of each chunk.
LEAST_WORK = 2**37


@dataclasses.dataclass(frozen=True)
class Gathering:
    """An all-gather of rows in flight.

    Attributes:
        own: this rank's rows (rows, n), available at once.
        chunks: each (ranks, rows of a chunk, n), readable after its event in `arrived`.
        arrived: one event per chunk.
        whole: all rows in rank order (ranks, rows, n), readable after the last event; None if not
            requested.
    """

    own: torch.Tensor
    chunks: list[torch.Tensor]
    arrived: list[torch.Event | None]
    whole: torch.Tensor | None


@dataclasses.dataclass(frozen=True)
class Scattering:
    """A reduce-scatter of rows in flight.

    Attributes:
        total: this rank's rows of the sum (rows, m), readable after `arrived`.
        partial: this rank's summands; held because the reduction reads them.
        arrived: the event after the last chunk.
    """

    total: torch.Tensor
    partial: torch.Tensor
    arrived: torch.Event | None


class Overlap:
    """Communication overlapped with matrix products on the tensor-parallel axis.

    One per run, reached by `world.service(Overlap)`.
    """

    def __init__(self, world: World) -> None:
        self.axis = world.mesh.tp
        self._streams = Streams(world.device)

    def num_chunks(self, rows: int, matrix: torch.Tensor, wanted: int) -> int:
        """At most `wanted`; fewer if the product of `rows` of each rank and the matrix is too short
        for so many.
        """
        work = self.axis.size * rows * matrix.numel()
        return min(wanted, max(work // LEAST_WORK, 1))

    def gather(self, own: torch.Tensor, num_chunks: int, *, whole: bool = False) -> Gathering:
        """Start gathering every rank's `own` (rows, n), in at most `num_chunks` equal chunks."""
        size, (rows, width) = self.axis.size, own.shape
        own = own.contiguous()
        count = num_equal_chunks(rows, num_chunks)
        everything = own.new_empty((size, rows, width)) if whole else None
        chunks = [own.new_empty((size, rows // count, width)) for _ in range(count)]
        if everything is not None and count == 1:
            chunks = [everything]
        arrived = []
        # Without this wait, the gather could send `own` before it is computed, or write to reused
        # memory that compute kernels still read.
        with self._streams.gathering(self._streams.mark_compute()):
            for part, chunk, place in zip(
                own.chunk(count), chunks, _slices(rows, count), strict=True
            ):
                gather_shards([chunk.view(-1)], [part.reshape(-1)], self.axis)
                if everything is not None and count > 1:
                    # copied rank by rank, both sides are contiguous, which the fast copy requires
                    for rank in range(size):
                        everything[rank, place].copy_(chunk[rank])
                arrived.append(self._streams.mark_current())
        return Gathering(own, chunks, arrived, everything)

    def multiply_gathered(
        self, rows: Gathering, matrix: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """All ranks' rows times `matrix` (n, m), plus `bias` (m,): (ranks * rows, m).

        Starts with this rank's rows; each other chunk is multiplied as soon as it arrives.
        """
        count = rows.own.shape[0]
        product = rows.own.new_empty((self.axis.size, count, matrix.shape[1]))
        _multiply(rows.own, matrix, bias, product[self.axis.index])
        for chunk, arrived, place in zip(
            rows.chunks, rows.arrived, _slices(count, len(rows.chunks)), strict=True
        ):
            # Without this wait, the product could read rows that have not arrived yet.
            self._streams.compute_waits(arrived)
            for rank in range(self.axis.size):
                if rank != self.axis.index:
                    _multiply(chunk[rank], matrix, bias, product[rank, place])
        return product.flatten(0, 1)

    def gathered(self, rows: Gathering) -> torch.Tensor:
        """All ranks' rows (ranks * rows, n), of a gather with `whole=True`."""
        # Without this wait, the reader could find rows that have not arrived yet.
        self._streams.compute_waits(rows.arrived[-1])
        if rows.whole is None:
            raise RuntimeError("rows were gathered in chunks only")
        return rows.whole.flatten(0, 1)

    def multiply_scatter(
        self, x: torch.Tensor, matrix: torch.Tensor, num_chunks: int
    ) -> Scattering:
        """Start reduce-scattering `x @ matrix`, for x (ranks * rows, n) and matrix (n, m).

        Each chunk is reduced while the next is multiplied; the last is still in flight on return.
        """
        size, rows = self.axis.size, x.shape[0] // self.axis.size
        count = num_equal_chunks(rows, num_chunks)
        by_rank = x.reshape(size, rows, x.shape[1])
        partial = x.new_empty((count, size, rows // count, matrix.shape[1]))
        total = x.new_empty((rows, matrix.shape[1]))
        arrived = None
        for chunk, place in zip(partial, _slices(rows, count), strict=True):
            for rank in range(size):
                _multiply(by_rank[rank, place], matrix, None, chunk[rank])
            with self._streams.reducing():
                reduce_shards([total[place].view(-1)], [chunk.view(-1)], self.axis)
                arrived = self._streams.mark_current()
        return Scattering(total, partial, arrived)

    def scattered(self, sums: Scattering) -> torch.Tensor:
        """This rank's rows of the sum (rows, m)."""
        # Without this wait, the reader could find a partial sum, and the allocator could hand out
        # the summands while the reduction still reads them.
        self._streams.compute_waits(sums.arrived)
        return sums.total


def num_equal_chunks(rows: int, wanted: int) -> int:
    """The largest number of equal chunks of `rows` that is at most `wanted`; at least 1."""
    return next((count for count in range(min(wanted, rows), 1, -1) if rows % count == 0), 1)


def _slices(rows: int, count: int) -> list[slice]:
    step = rows // count
    return [slice(start * step, (start + 1) * step) for start in range(count)]


def _multiply(
    x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    if bias is None:
        torch.mm(x, matrix, out=out)
    else:
        torch.addmm(bias, x, matrix, out=out)
