"""This rank's part of a checkpoint as the bytes of one file, and copies of them in host memory."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import itertools
import queue
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from bmtrain.checkpoint.shards import BLOCK, DTYPES, Piece, TensorFacts, num_blocks
from bmtrain.errors import CheckpointError
from bmtrain.shard.cut import Cut
from bmtrain.shard.layout import round_up
from bmtrain.torch_internals import versions_of

NUM_THREADS = 4  # that write blocks: two keep a disk busy while the others compute checksums
_ALIGNMENT = 64  # bytes: of the first element of each tensor in the file


@dataclasses.dataclass(frozen=True)
class Part:
    """What this rank writes of one tensor.

    Attributes:
        section, name: of the tensor in the manifest.
        values: 1-D; the training's own memory, or a copy.
        cut: how the tensor is cut into slices, of which `values` is this rank's; None for all of a
            tensor, of shape `shape`.
    """

    section: str
    name: str
    values: torch.Tensor
    cut: Cut | None = None
    shape: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if str(self.values.dtype).removeprefix("torch.") not in DTYPES:
            raise CheckpointError(
                f"{self.name!r} has dtype {self.values.dtype}: checkpoints hold "
                f"{', '.join(DTYPES)}."
            )


class Image:
    """The file that holds the parts of this rank, one after another.

    Attributes:
        parts: with their values.
        size: bytes.
        num_blocks: of BLOCK bytes; the last one may have fewer.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts
        sizes = [round_up(part.values.nbytes, _ALIGNMENT) for part in parts]
        self._offsets = list(itertools.accumulate(sizes, initial=0))
        self.size = self._offsets[-1]
        self.num_blocks = num_blocks(self.size)
        self._bytes = [part.values.detach().reshape(-1).view(torch.uint8) for part in parts]

    def fill(self, number: int, block: torch.Tensor) -> None:
        """Copy the bytes of block `number` into `block`, uint8 (BLOCK,) on the CPU.

        From a GPU on the current stream; the host does not wait if `block` is page-locked.
        """
        begin, end = number * BLOCK, min(self.size, (number + 1) * BLOCK)
        filled = 0
        first = bisect.bisect_right(self._offsets, begin) - 1
        last = bisect.bisect_left(self._offsets, end)  # the first part behind the block
        for offset, values in zip(self._offsets[first:last], self._bytes[first:last], strict=True):
            held = values[max(begin - offset, 0) : end - offset]  # may be empty
            place = max(offset - begin, 0)
            block[filled:place].zero_()
            filled = place + held.numel()
            block[place:filled].copy_(held, non_blocking=True)
        block[filled : end - begin].zero_()

    def view(self, number: int, block: torch.Tensor) -> memoryview:
        """The bytes in a block that `fill` has filled."""
        return memoryview(block[: min(BLOCK, self.size - number * BLOCK)].numpy().data)

    def tensors(self, file: str) -> dict[str, dict[str, TensorFacts]]:
        """What the manifest says of the parts in this file, by section and name."""
        found: dict[str, dict[str, TensorFacts]] = {}
        for part, offset in zip(self.parts, self._offsets, strict=False):
            numel, shape, start = part.values.numel(), part.shape, 0
            dim, index, count = -1, 0, 1
            if part.cut is not None:
                shape, start, dim = tuple(part.cut.whole_shape), part.cut.piece.start, 0
                if part.cut.split is not None:
                    split = part.cut.split
                    dim, index, count = split.dim, split.index, split.count
            pieces = (Piece(file, offset, start, start + numel, index),) if numel else ()
            facts = TensorFacts(shape, part.values.dtype, dim, count, pieces)
            found.setdefault(part.section, {})[part.name] = facts
        return found


def new_block(device: torch.device) -> torch.Tensor:
    """Host memory that the device copies into."""
    return torch.empty(BLOCK, dtype=torch.uint8, device="cpu", pin_memory=device.type != "cpu")


class HostMemory:
    """Blocks of host memory, page-locked for a GPU, kept from one snapshot to the next.

    Page-locking is slow, 2 GB/s, and a copy into other memory too: `reserve` does it beforehand.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._blocks: list[torch.Tensor] = []
        self._lock = threading.Lock()

    def block(self, number: int) -> torch.Tensor:
        """Block `number`, uint8 (BLOCK,)."""
        with self._lock:
            while number >= len(self._blocks):
                self._blocks.append(new_block(self._device))
            return self._blocks[number]

    def reserve(self, size: int) -> None:
        """Have blocks for `size` bytes soon: a thread makes them, until the program ends."""

        def make() -> None:
            for number in range(num_blocks(size)):
                if threading.main_thread().is_alive():
                    self.block(number)

        # The interpreter waits for it: within torch it would abort the process that ends.
        threading.Thread(target=make, name="reserve", daemon=False).start()


class Snapshot:
    """The blocks of an image as they were when this was made.

    A thread copies them. The values must stay as they are until then: who will write them calls
    `wait` first, on the device where there is one; else the snapshot fails.
    """

    def __init__(self, image: Image, memory: HostMemory, device: torch.device) -> None:
        self._image, self._memory, self._device = image, memory, device
        self._values = [part.values for part in image.parts]
        self._versions = versions_of(self._values)
        self._is_torn: bool | None = None  # whether they were written meanwhile, once that is known
        self._copied: list[Any] = []  # by block: the event after its copy
        self._error: BaseException | None = None
        self._progress = threading.Condition()
        self._is_issued = False
        self._stream = None if device.type == "cpu" else torch.cuda.Stream(device)
        if self._stream is not None:
            # The values are those after all that the program has asked for so far.
            self._stream.wait_stream(torch.cuda.current_stream(device))
        # The interpreter waits for it: within torch it would abort the process that ends.
        threading.Thread(target=self._copy, name="snapshot", daemon=False).start()

    def wait(self) -> None:
        """Wait until a write to the values can no longer reach the snapshot.

        On a GPU the device waits, and the host until the copies are issued.
        """
        with self._progress:
            self._progress.wait_for(lambda: self._is_issued)
        self._seal()
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    @contextlib.contextmanager
    def block(self, number: int) -> Iterator[memoryview]:
        """The bytes of block `number`, once they are copied."""
        with self._progress:
            self._progress.wait_for(lambda: len(self._copied) > number or self._is_issued)
        if self._error is not None:
            raise self._error
        if self._copied[number] is not None:
            self._copied[number].synchronize()
        yield self._image.view(number, self._memory.block(number))

    def check(self) -> None:
        """After the last block.

        Raises:
            CheckpointError: if the values were written meanwhile.
        """
        if self._seal():
            raise CheckpointError(
                "the program wrote to parameters or optimizer state while they were being "
                "copied into host memory: wait for the copy first (CheckpointManager.wait_copied), "
                "or save with background=False."
            )

    def _copy(self) -> None:
        stream = self._stream
        try:
            with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
                for number in range(self._image.num_blocks):
                    self._image.fill(number, self._memory.block(number))
                    event = None if stream is None else stream.record_event()
                    with self._progress:
                        self._copied.append(event)
                        self._progress.notify_all()
        except BaseException as error:  # also a MemoryError: `block` raises it
            self._error = error
        finally:
            with self._progress:
                self._is_issued = True
                self._progress.notify_all()

    def _seal(self) -> bool:
        """Whether the values were written since this was made, found out once."""
        with self._progress:
            if self._is_torn is None:
                self._is_torn = versions_of(self._values) != self._versions
                self._values = []  # else a model that is dropped would stay
            return self._is_torn


class Live:
    """The blocks of an image as they are when they are asked for; nothing may write meanwhile."""

    def __init__(self, image: Image, device: torch.device) -> None:
        self._image, self._device = image, device
        self._free: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        for _ in range(min(NUM_THREADS, image.num_blocks)):
            self._free.put(new_block(device))
        if device.type != "cpu":
            torch.cuda.synchronize(device)  # the copies run on streams of their own

    @contextlib.contextmanager
    def block(self, number: int) -> Iterator[memoryview]:
        """The bytes of block `number`; at most NUM_THREADS at a time."""
        block = self._free.get()
        try:
            self._image.fill(number, block)
            if self._device.type != "cpu":
                torch.cuda.current_stream(self._device).synchronize()
            yield self._image.view(number, block)
        finally:
            self._free.put(block)
