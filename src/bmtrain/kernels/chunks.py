"""Many tensors in one launch: a table on the device tells every program which chunk of which tensor
is its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Iterable, Sequence

import torch

# Multiples of it allow the widest loads and stores.
ALIGNMENT = 16
# Tables kept: a training step has a handful, and new ones only where gradients move in memory.
NUM_KEPT = 64

Row = tuple[int, ...]  # addresses, and the number of elements
Dtypes = tuple[torch.dtype, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Chunks:
    """The table of one launch, on the device.

    rows: (tensors, columns + 2) int64: the addresses of tensors that belong together, their number
    of elements, and the number
        of chunks in the rows above.
    row_of: (chunks,) int32: the row that each chunk belongs to.
    is_aligned: whether all addresses (in bytes) and numbers of elements are multiples of ALIGNMENT.
    """

    rows: torch.Tensor
    row_of: torch.Tensor
    is_aligned: bool

    @property
    def count(self) -> int:
        """The number of chunks."""
        return self.row_of.numel()


class Batch:
    """What one call of a kernel works on: rows of tensors that belong together and stay in place as
    long as this object lives.

    What the device must know of rows is sent once for the same addresses, which a training step
    meets again and again.

    Args:
        rows: equally many contiguous tensors each, all with equally many elements.
    """

    def __init__(self, rows: Iterable[Sequence[torch.Tensor]]) -> None:
        self.rows = list(rows)
        self._tables: dict[tuple[int, int], list[tuple[Dtypes, Chunks]]] = {}

    def tables(self, length: int) -> list[tuple[Dtypes, Chunks]]:
        """The tables of rows worked on `length` elements at a time, with the dtypes of their
        columns.
        """
        stream = _current_stream(self.rows[0][0].device) if self.rows else 0
        if (length, stream) not in self._tables:
            kinds: dict[Dtypes, list[Sequence[torch.Tensor]]] = {}
            for row in self.rows:
                kinds.setdefault(tuple(x.dtype for x in row), []).append(row)
            found = [
                (kind, table)
                for kind, rows in kinds.items()
                for table in chunks_of(list(zip(*rows, strict=True)), length)
            ]
            self._tables[length, stream] = found
        return self._tables[length, stream]

    @functools.cached_property
    def by_path(self) -> tuple[Batch, Batch]:
        """The rows that kernels in fp32 arithmetic take, and those left to torch: fp64, strided or
        on the CPU.
        """
        fast: list[Sequence[torch.Tensor]] = []
        slow: list[Sequence[torch.Tensor]] = []
        for row in self.rows:
            takes = all(
                x.device.type != "cpu" and x.dtype != torch.float64 and x.is_contiguous()
                for x in row
            )
            (fast if takes else slow).append(row)
        return Batch(fast), Batch(slow)


def chunks_of(columns: Sequence[Sequence[torch.Tensor]], length: int) -> tuple[Chunks, ...]:
    """Tables of tensors that are worked on `length` elements at a time: of what is aligned, and of
    the rest; none if empty.

    They are made and sent to the device once for the same addresses, without waiting for the
    device.

    Args:
        columns: lists of equally many contiguous tensors, each list of one dtype; those at the same
            place of all lists have equally many elements.
    """
    rows = tuple(
        zip(
            *([x.data_ptr() for x in column] for column in columns),
            (x.numel() for x in columns[0]),
            strict=True,
        )
    )
    if not rows:
        return ()
    device = columns[0][0].device
    stream = _current_stream(device)
    return _tables(
        rows, tuple(column[0].element_size() for column in columns), length, device, stream
    )


@functools.lru_cache(maxsize=NUM_KEPT)
def _tables(
    rows: tuple[Row, ...], widths: tuple[int, ...], length: int, device: torch.device, stream: int
) -> tuple[Chunks, ...]:
    """A table holds numbers and is never written, so whoever asks for the same numbers on the same
    stream may have it.
    """
    aligned, rest = [], []
    for *addresses, numel in rows:
        is_aligned = all(address % ALIGNMENT == 0 for address in addresses)
        body = numel // ALIGNMENT * ALIGNMENT if is_aligned else 0
        if body:
            aligned.append((*addresses, body))
        if body < numel:
            rest.append(
                (
                    *(
                        address + body * width
                        for address, width in zip(addresses, widths, strict=True)
                    ),
                    numel - body,
                )
            )
    kinds = ((True, aligned), (False, rest))
    return tuple(
        _table(members, length, device, stream, is_aligned)
        for is_aligned, members in kinds
        if members
    )


def _table(
    rows: Sequence[Row], length: int, device: torch.device, stream: int, is_aligned: bool
) -> Chunks:
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
    """The row of each chunk, megabytes for a large model: apart from the addresses, which may
    change while the lengths do not.
    """
    numbers = torch.arange(len(counts), dtype=torch.int32, device="cpu")
    return _sent(numbers.repeat_interleave(torch.tensor(counts, device="cpu")), device)


def _current_stream(device: torch.device) -> int:
    return 0 if device.type == "cpu" else int(torch.cuda.current_stream(device).cuda_stream)


def _sent(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    return values if device.type == "cpu" else values.pin_memory().to(device, non_blocking=True)


def launching_on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device, which need not be that of the tensors."""
    return contextlib.nullcontext() if device.type == "cpu" else torch.cuda.device(device)
