"""Reading many tensors at disk speed: threads overlap large reads with copies to the device."""

from __future__ import annotations

import dataclasses
import itertools
import queue
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import torch

from bmtrain.checkpoint.source import Source
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


def read_all(reads: Iterable[Read | None], source: Source, chunk: int = CHUNK) -> None:
    """Fill the targets of all reads, converted to their dtypes, in the order of the file.

    None stands for what has been read already.

    Args:
        chunk: bytes per read; a row that is longer is read at once.

    Raises the first error of any thread; the targets' values are then undefined.
    """
    pieces: list[Read] = []
    size = 0  # bytes of all rows that a piece touches
    for read in reads:
        if read is None or read.start == read.stop:
            continue
        header = source.headers[read.name]
        # A source that turns a matrix reads whole rows: pieces end where a row does.
        row = header.shape[-1] if len(header.shape) > 1 else 1
        step = max(chunk // header.dtype.itemsize // row, 1) * row
        inner = range((read.start // step + 1) * step, read.stop, step)
        for start, stop in itertools.pairwise([read.start, *inner, read.stop]):
            target = read.target[start - read.start : stop - read.start]
            pieces.append(Read(target, read.name, start, stop))
            touched = round_up(stop, row) - start // row * row
            size = max(size, touched * header.dtype.itemsize)
    if not pieces:
        return
    order = {name: place for place, name in enumerate(source.headers)}
    pieces.sort(key=lambda piece: (order[piece.name], piece.start))
    devices = {piece.target.device for piece in pieces if piece.target.device.type != "cpu"}
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
