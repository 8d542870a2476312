"""Many tensors out of a source at the speed of the disk: large reads in several threads, copies to
the device between them.
"""

from __future__ import annotations

import dataclasses
import itertools
import queue
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from bmtrain.checkpoint.sources import Header, Source
from bmtrain.shard.layout import round_up

NUM_THREADS = 4  # two are enough for one disk; the others copy and convert meanwhile
CHUNK = 2**25  # bytes that a thread reads at once


@dataclasses.dataclass(frozen=True, eq=False)
class Read:
    """Elements [start, stop) of the flattened tensor `name` of a source are the values of `target`,
    1-D and contiguous.
    """

    target: torch.Tensor
    name: str
    start: int
    stop: int

    def pieces(self, header: Header, limit: int) -> Iterator[Read]:
        """The same in reads of about `limit` bytes, between which lie whole rows."""
        row = _row(header)
        places = cuts(self.start, self.stop, row, limit // header.dtype.itemsize)
        for start, stop in itertools.pairwise(places):
            yield Read(self.target[start - self.start : stop - self.start], self.name, start, stop)

    def scratch_bytes(self, header: Header) -> int:
        """Bytes of all rows that it touches."""
        row = _row(header)
        return (round_up(self.stop, row) - self.start // row * row) * header.dtype.itemsize


def cuts(start: int, stop: int, row: int, limit: int) -> list[int]:
    """Where to cut [start, stop): at its ends and at multiples of `row`, at most `limit` (or one
    row) apart where it can be.
    """
    first, last = round_up(start, row), stop // row * row
    inner = range(first, last, max(limit // row, 1) * row)
    return sorted({start, stop, *inner, *([last] if first <= last else [])})


def read_all(reads: Iterable[Read], source: Source) -> None:
    """Fill the targets of all reads, in the order in which the source has the tensors, converting
    to their dtypes.

    Raises the first error of any of them; the targets' values are then undefined.
    """
    order = {name: place for place, name in enumerate(source.headers)}
    pieces = [piece for read in reads for piece in read.pieces(source.headers[read.name], CHUNK)]
    pieces.sort(key=lambda piece: (order[piece.name], piece.start))
    if not pieces:
        return
    devices = {piece.target.device for piece in pieces if piece.target.device.type != "cpu"}
    size = max(piece.scratch_bytes(source.headers[piece.name]) for piece in pieces)
    # Pages that stay where they are: the device copies from them without a detour.
    buffers = [
        torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=bool(devices))
        for _ in range(min(NUM_THREADS, len(pieces)))
    ]
    _share(pieces, source, buffers)
    for device in devices:  # copies that the threads have started
        torch.cuda.synchronize(device)


def _share(pieces: Sequence[Read], source: Source, buffers: Sequence[torch.Tensor]) -> None:
    """A thread for each buffer, which takes one piece after the other until none is left or one has
    failed.
    """
    todo: queue.SimpleQueue[Read | None] = queue.SimpleQueue()
    for piece in (*pieces, *(None for _ in buffers)):
        todo.put(piece)
    failed = threading.Event()
    with ThreadPoolExecutor(len(buffers), thread_name_prefix="load") as pool:
        threads = [pool.submit(_work, todo, failed, source, buffer) for buffer in buffers]
    for thread in threads:
        thread.result()


def _work(
    todo: queue.SimpleQueue[Read | None],
    failed: threading.Event,
    source: Source,
    scratch: torch.Tensor,
) -> None:
    try:
        while not failed.is_set() and (piece := todo.get()) is not None:
            values = source.read(piece.name, piece.start, piece.stop, scratch)
            # Conversion of dtype and order is the device's work. When `to` returns, the scratch is
            # free again.
            piece.target.view(values.shape).copy_(values.to(piece.target.device))
    except BaseException:
        failed.set()
        raise


def _row(header: Header) -> int:
    """Elements in a row of the tensor: of its last dim, if it has several."""
    return max(header.shape[-1], 1) if len(header.shape) > 1 else 1
