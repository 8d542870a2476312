"""Kernel launches over many tensors: a device table maps each chunk to its tensor."""

from __future__ import annotations

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

Row = tuple[int, ...]  # what a kernel reads, data pointers first; the last the number of elements
# On the device: (rows, columns + 1) int64, the rows and the number of chunks in those above; and
# (chunks,) int32, the row of each chunk.
Table = tuple[torch.Tensor, torch.Tensor]
Kind = tuple[torch.dtype, bool]  # whether addresses in bytes and numbers are multiples of ALIGNMENT


def by_path(tensors: Iterable[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Those for kernels with fp32 arithmetic, and those for torch: fp64, strided or on the CPU."""
    fast: list[torch.Tensor] = []
    slow: list[torch.Tensor] = []
    for x in tensors:
        takes = launch.takes(x) and x.dtype != torch.float64 and x.is_contiguous()
        (fast if takes else slow).append(x)
    return fast, slow


def tables_of(tensors: Sequence[torch.Tensor], length: int) -> list[tuple[Kind, Table]]:
    """Tables for chunks of `length` elements of contiguous tensors of one device, by their kind."""
    kinds: dict[Kind, list[Row]] = {}
    for x in tensors:
        address, numel = x.data_ptr(), x.numel()
        body = 0 if address % ALIGNMENT else numel // ALIGNMENT * ALIGNMENT
        if body:
            kinds.setdefault((x.dtype, True), []).append((address, body))
        if body < numel:
            rest = address + body * x.itemsize, numel - body
            kinds.setdefault((x.dtype, False), []).append(rest)
    device = tensors[0].device if tensors else torch.device("cpu")
    stream = current_stream_number(device)
    return [(kind, table_of(tuple(rows), length, device, stream)) for kind, rows in kinds.items()]


@functools.lru_cache(maxsize=NUM_KEPT)
def table_of(rows: tuple[Row, ...], length: int, device: torch.device, stream: int) -> Table:
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
    return _sent(table, device), _row_of(counts, device, stream)


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
