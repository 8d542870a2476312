"""Kernel launches over many tensors: a device table maps each chunk to its tensor."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Sequence

import torch

from bmtrain.kernels import launch
from bmtrain.kernels.launch import kernel, tl
from bmtrain.torch_internals import current_stream_number

# Multiples of this allow the widest loads and stores.
ALIGNMENT = 16
# Cached tables: a training step needs a handful, and new ones only when gradients move in memory;
# one whose states stream through the device needs one or two for each load.
NUM_KEPT = 2048

Row = tuple[int, ...]  # data pointers, then the number of elements
Dtypes = tuple[torch.dtype, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Chunks:
    """The table of one launch, on the device.

    Attributes:
        rows: (tensors, columns + 2) int64: data pointers of tensors with matching elements, their
            number of elements, and the number of chunks in the rows above.
        row_of: (chunks,) int32: the row of each chunk.
        is_aligned: whether all addresses (in bytes) and numbers of elements are multiples of
            ALIGNMENT.
    """

    rows: torch.Tensor
    row_of: torch.Tensor
    is_aligned: bool

    @property
    def count(self) -> int:
        """Number of chunks."""
        return self.row_of.numel()


class Batch:
    """The tensors of one kernel call: rows of tensors with matching elements.

    Tables are sent to the device once per set of addresses, which repeat from step to step. The
    tensors must stay at their addresses for as long as this object is used.

    Args:
        rows: each with the same number of contiguous tensors, all of the same number of elements.
            Strided tensors must go through `by_path`.
    """

    def __init__(self, rows: Iterable[Sequence[torch.Tensor]]) -> None:
        self.rows = list(rows)
        self._tables: dict[tuple[int, int], list[tuple[Dtypes, Chunks]]] = {}

    def tables(self, length: int) -> list[tuple[Dtypes, Chunks]]:
        """Tables for chunks of `length` elements, one or two per combination of column dtypes."""
        device = self.rows[0][0].device if self.rows else torch.device("cpu")
        stream = current_stream_number(device)
        found = self._tables.get((length, stream))
        if found is None:
            kinds: dict[Dtypes, list[Row]] = {}
            for row in self.rows:
                addresses = (*(x.data_ptr() for x in row), row[0].numel())
                kinds.setdefault(tuple(x.dtype for x in row), []).append(addresses)
            found = self._tables[length, stream] = [
                (kind, table)
                for kind, rows in kinds.items()
                for table in _tables(tuple(rows), kind, length, device, stream)
            ]
        return found

    @functools.cached_property
    def by_path(self) -> tuple[Batch, Batch]:
        """The rows for kernels with fp32 arithmetic, and those for torch: fp64, strided or CPU."""
        fast: list[Sequence[torch.Tensor]] = []
        slow: list[Sequence[torch.Tensor]] = []
        for row in self.rows:
            takes = all(
                launch.takes(x) and x.dtype != torch.float64 and x.is_contiguous() for x in row
            )
            (fast if takes else slow).append(row)
        return Batch(fast), Batch(slow)


@functools.lru_cache(maxsize=NUM_KEPT)
def _tables(
    rows: tuple[Row, ...], dtypes: Dtypes, length: int, device: torch.device, stream: int
) -> tuple[Chunks, ...]:
    """Tables for chunks of `length` elements: one of aligned tensors and one of the rest, if any.

    Built and sent once per set of addresses, without synchronising with the device.
    """
    aligned, rest = [], []
    for *addresses, numel in rows:
        is_aligned = all(address % ALIGNMENT == 0 for address in addresses)
        body = numel // ALIGNMENT * ALIGNMENT if is_aligned else 0
        if body:
            aligned.append((*addresses, body))
        if body < numel:
            moved = [x + body * dtype.itemsize for x, dtype in zip(addresses, dtypes, strict=True)]
            rest.append((*moved, numel - body))
    return tuple(
        table_of(tuple(members), length, device, stream, is_aligned)
        for is_aligned, members in ((True, aligned), (False, rest))
        if members
    )


@functools.lru_cache(maxsize=NUM_KEPT)
def table_of(
    rows: tuple[Row, ...], length: int, device: torch.device, stream: int, is_aligned: bool
) -> Chunks:
    """The table of rows that hold whatever a kernel reads, the last of it numbers of elements.

    Cached per stream: on another stream, a kernel could read a table before it has arrived. A table
    is never written, so equal arguments can share it.
    """
    counts = tuple(-(-row[-1] // length) for row in rows)
    above = itertools.accumulate(counts, initial=0)
    table = torch.tensor(
        [[*row, before] for row, before in zip(rows, above, strict=False)],
        dtype=torch.int64,
        device="cpu",
    )
    return Chunks(_sent(table, device), _row_of(counts, device, stream), is_aligned)


@functools.lru_cache(maxsize=NUM_KEPT)
def _row_of(counts: tuple[int, ...], device: torch.device, stream: int) -> torch.Tensor:
    """The row of each chunk; megabytes for a large model.

    Cached apart from the addresses, which may change while the lengths do not.
    """
    numbers = torch.arange(len(counts), dtype=torch.int32, device="cpu")
    return _sent(numbers.repeat_interleave(torch.tensor(counts, device="cpu")), device)


def _sent(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    # The pinned copy may be dropped at once: torch's host allocator reuses it only after the
    # transfer.
    return values if device.type == "cpu" else values.pin_memory().to(device, non_blocking=True)


@kernel
def tensor_at(
    row: tl.tensor, column: tl.constexpr, DTYPE: tl.constexpr, IS_ALIGNED: tl.constexpr
) -> tl.tensor:
    """The pointer in one column of a row."""
    pointer = tl.load(row + column).to(tl.pointer_type(DTYPE))
    return tl.multiple_of(pointer, 16) if IS_ALIGNED else pointer
