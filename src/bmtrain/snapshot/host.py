"""Copies of this rank's state in host memory, made while the training goes on."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator
from typing import Any

import torch

from bmtrain.checkpoint.manifest import BLOCK
from bmtrain.errors import CheckpointError
from bmtrain.snapshot.image import Image
from bmtrain.torch_internals import versions_of

NUM_THREADS = 4  # that write blocks: two keep a disk busy while the others compute checksums


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
        """Have blocks for `size` bytes soon: a thread makes them, until the program ends.

        The interpreter waits for it: within torch it would abort the process that ends.
        """
        threading.Thread(target=self._reserve, args=(size,), name="reserve", daemon=False).start()

    def _reserve(self, size: int) -> None:
        for number in range(-(-size // BLOCK)):
            if not threading.main_thread().is_alive():
                return
            self.block(number)


def new_block(device: torch.device) -> torch.Tensor:
    """Host memory that the device copies into."""
    return torch.empty(BLOCK, dtype=torch.uint8, device="cpu", pin_memory=device.type != "cpu")


class Snapshot:
    """The blocks of an image as they were when this was made.

    A thread copies them. The values must stay as they are until then: who will write them calls
    `wait` first, on the device where there is one; else the snapshot fails.
    """

    def __init__(self, image: Image, memory: HostMemory, device: torch.device) -> None:
        self._image, self._memory, self._device = image, memory, device
        self._values = [part.values for part in image.parts]
        self._versions = versions_of(self._values)
        self._torn = False
        self._is_sealed = False
        self._sealing = threading.Lock()
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
        yield view(self._memory.block(number), self._image.length(number))

    def check(self) -> None:
        """After the last block.

        Raises:
            CheckpointError: if the values were written meanwhile.
        """
        self._seal()
        if self._torn:
            raise CheckpointError(
                "the program wrote to parameters or optimizer state while they were being "
                "copied into host memory: wait for the copy first (CheckpointManager.wait_copied), "
                "or save with background=False."
            )

    def _copy(self) -> None:
        try:
            with self._on_stream():
                for number in range(self._image.num_blocks):
                    self._image.fill(number, self._memory.block(number))
                    event = None if self._stream is None else self._stream.record_event()
                    with self._progress:
                        self._copied.append(event)
                        self._progress.notify_all()
        except BaseException as error:  # also a MemoryError: `blocks` raises it
            self._error = error
        finally:
            with self._progress:
                self._is_issued = True
                self._progress.notify_all()

    def _on_stream(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _seal(self) -> None:
        """Find out, once, whether the values were written since this was made."""
        with self._sealing:
            if not self._is_sealed:
                self._torn = versions_of(self._values) != self._versions
                self._values = []  # else a model that is dropped would stay
                self._is_sealed = True


class Live:
    """The blocks of an image as they are when they are asked for; nothing may write meanwhile."""

    def __init__(self, image: Image, device: torch.device) -> None:
        self._image = image
        self._free: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        for _ in range(min(NUM_THREADS, image.num_blocks)):
            self._free.put(new_block(device))
        self._device = device
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
            yield view(block, self._image.length(number))
        finally:
            self._free.put(block)

    def check(self) -> None:
        """The program has not gone on meanwhile."""


def view(block: torch.Tensor, length: int) -> memoryview:
    """The first bytes of a block."""
    return memoryview(block[:length].numpy().data)
