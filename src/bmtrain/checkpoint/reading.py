"""Reading many tensors at disk speed: threads overlap large reads with copies to the device."""

from __future__ import annotations

import dataclasses
import itertools
import queue
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

from bmtrain.checkpoint.source import Header, Source
from bmtrain.shard.layout import round_up

NUM_THREADS = 4  # two saturate one disk; the others copy and convert in the meantime
CHUNK = 2**25  # bytes per read


@dataclasses.dataclass(frozen=True, eq=False)
class Read:
    """A read of elements [start, stop) of the flattened tensor `name` into `target`.

    `target` is 1-D and contiguous.
    """

    target: torch.Tensor
    name: str
    start: int
    stop: int

    def pieces(self, header: Header, limit: int) -> Iterator[Read]:
        """This read, cut at row boundaries into reads of at most `limit` bytes or one row."""
        row = _row(header)
        places = cuts(self.start, self.stop, row, limit // header.dtype.itemsize)
        for start, stop in itertools.pairwise(places):
            yield Read(self.target[start - self.start : stop - self.start], self.name, start, stop)

    def scratch_bytes(self, header: Header) -> int:
        """The size in bytes of all rows that this read touches."""
        row = _row(header)
        return (round_up(self.stop, row) - self.start // row * row) * header.dtype.itemsize


def cuts(start: int, stop: int, row: int, limit: int) -> list[int]:
    """The bounds of the pieces of [start, stop), cut at multiples of `row`.

    A piece has at most `limit` elements, or one row if a row is longer.
    """
    first, last = round_up(start, row), stop // row * row
    inner = range(first, last, max(limit // row, 1) * row)
    return sorted({start, stop, *inner, *([last] if first <= last else [])})


def read_all(reads: Iterable[Read | None], source: Source, chunk: int = CHUNK) -> None:
    """Fill the targets of all reads, converted to their dtypes, in the order of the file.

    None stands for what has been read already.

    Args:
        chunk: bytes per read; a row that is longer is read at once.

    Raises the first error of any thread; the targets' values are then undefined.
    """
    order = {name: place for place, name in enumerate(source.headers)}
    pieces = [
        piece
        for read in filter(None, reads)
        for piece in read.pieces(source.headers[read.name], chunk)
    ]
    pieces.sort(key=lambda piece: (order[piece.name], piece.start))
    if not pieces:
        return
    devices = {piece.target.device for piece in pieces if piece.target.device.type != "cpu"}
    size = max(piece.scratch_bytes(source.headers[piece.name]) for piece in pieces)
    # Pinned, so that the device copies straight from them and not through a staging buffer.
    buffers: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
    count = min(NUM_THREADS, len(pieces))
    for _ in range(count):
        buffers.put(torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=bool(devices)))

    def fill(piece: Read) -> None:
        scratch = buffers.get()
        try:
            values = source.read(piece.name, piece.start, piece.stop, scratch)
            # The raw bytes go to the device, which converts the dtype. `to` blocks: were it
            # asynchronous, the next read would overwrite the scratch while the copy still reads it.
            piece.target.view(values.shape).copy_(values.to(piece.target.device))
        finally:
            buffers.put(scratch)

    with ThreadPoolExecutor(count, thread_name_prefix="load") as pool:
        for _ in pool.map(fill, pieces):  # an error cancels what has not begun
            continue
    # The copies into the targets are still in flight on the threads' streams. Without this, the
    # caller could read a target on another stream before its values have arrived.
    for device in devices:
        torch.cuda.synchronize(device)


def _row(header: Header) -> int:
    """The number of elements in a row: the size of the last dim, or 1 if there is only one dim."""
    return max(header.shape[-1], 1) if len(header.shape) > 1 else 1
