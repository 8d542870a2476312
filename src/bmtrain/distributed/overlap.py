"""Products of the rows of all tensor-parallel ranks, with the rows travelling while other rows are
multiplied.

Every rank has rows of its own, a matrix (rows, n). Those of all ranks together are a matrix (ranks
* rows, n), in rank order. Communication is cut into chunks: chunk c of a gather or a reduction
holds the c-th part of the rows of every rank. Memory is allocated on the compute stream and must
not return there while a side stream works on it: the two records here hold it until the compute
stream has waited for that work.
"""

from __future__ import annotations

import dataclasses

import torch

from bmtrain.distributed.transport import gather_shards, make_streams, reduce_shards
from bmtrain.runtime.world import World


@dataclasses.dataclass(frozen=True)
class Gathering:
    """Rows of all ranks on their way to this one.

    own: this rank's rows (rows, n), which need not travel. chunks: each (ranks, rows of a chunk,
    n), readable after the event of `arrived` at the same place. whole: all rows in rank order
    (ranks, rows, n), readable after the last event; None if not asked for.
    """

    own: torch.Tensor
    chunks: list[torch.Tensor]
    arrived: list[torch.Event | None]
    whole: torch.Tensor | None


@dataclasses.dataclass(frozen=True)
class Scattering:
    """Sums of rows on their way: `total` (rows, n) is readable after `arrived`; `partial` is what
    they are made of.
    """

    total: torch.Tensor
    partial: torch.Tensor
    arrived: torch.Event | None


class Overlap:
    """Communication beside multiplication on the tensor-parallel axis.

    One per run, reached by `world.service(Overlap)`.
    """

    def __init__(self, world: World) -> None:
        self.axis = world.mesh.tp
        self._streams = make_streams(world.device)

    def gather(self, own: torch.Tensor, num_chunks: int, *, whole: bool = False) -> Gathering:
        """Start gathering every rank's `own` (rows, n) in `num_chunks` parts, as far as they divide
        the rows.
        """
        size, (rows, width) = self.axis.size, own.shape
        own = own.contiguous()
        count = num_equal_chunks(rows, num_chunks)
        everything = own.new_empty((size, rows, width)) if whole else None
        chunks = [own.new_empty((size, rows // count, width)) for _ in range(count)]
        if everything is not None and count == 1:
            chunks = [everything]
        arrived = []
        # What compute kernels wrote to `own`, or read from memory that is used anew here, comes
        # first.
        with self._streams.gathering(self._streams.mark_compute()):
            for part, chunk, place in zip(
                own.chunk(count), chunks, _slices(rows, count), strict=True
            ):
                gather_shards(chunk.view(-1), part.reshape(-1), self.axis)
                if everything is not None and count > 1:
                    # one by one they are contiguous, which the fast copy needs
                    for rank in range(size):
                        everything[rank, place].copy_(chunk[rank])
                arrived.append(self._streams.mark_current())
        return Gathering(own, chunks, arrived, everything)

    def multiply_gathered(
        self, rows: Gathering, matrix: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """All ranks' rows times `matrix` (n, m), plus `bias` (m,): (ranks * rows, m).

        Own rows first, the others as they come.
        """
        count = rows.own.shape[0]
        product = rows.own.new_empty((self.axis.size, count, matrix.shape[1]))
        _multiply(rows.own, matrix, bias, product[self.axis.index])
        for chunk, arrived, place in zip(
            rows.chunks, rows.arrived, _slices(count, len(rows.chunks)), strict=True
        ):
            self._streams.compute_waits(arrived)
            for rank in range(self.axis.size):
                if rank != self.axis.index:
                    _multiply(chunk[rank], matrix, bias, product[rank, place])
        return product.flatten(0, 1)

    def gathered(self, rows: Gathering) -> torch.Tensor:
        """All ranks' rows (ranks * rows, n), of a gathering that was asked for the whole."""
        self._streams.compute_waits(rows.arrived[-1])
        if rows.whole is None:
            raise RuntimeError("rows were gathered in chunks only")
        return rows.whole.flatten(0, 1)

    def multiply_scatter(
        self, x: torch.Tensor, matrix: torch.Tensor, num_chunks: int
    ) -> Scattering:
        """Start summing `x @ matrix` over ranks, for x (ranks * rows, n) and matrix (n, m): each
        rank gets its own rows.

        One chunk is summed while the next is multiplied; the sum of the last is still under way on
        return.
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
                reduce_shards(total[place].view(-1), chunk.view(-1), self.axis)
                arrived = self._streams.mark_current()
        return Scattering(total, partial, arrived)

    def scattered(self, sums: Scattering) -> torch.Tensor:
        """This rank's rows of the sum (rows, m)."""
        self._streams.compute_waits(sums.arrived)
        return sums.total


def num_equal_chunks(rows: int, wanted: int) -> int:
    """The largest number of equal chunks of `rows` that is at most `wanted`; 1 where there is
    none.
    """
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
