"""Device work that a program does again and again on the same memory: a CUDA graph after the first
time.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch

from bmtrain.runtime.log import warn
from bmtrain.torch_internals import end_allocation

Work = Callable[[], torch.Tensor]
#: Per thread: watchdog threads of libraries query events during a capture, which would invalidate
#: it in the global mode.
_MODE = "thread_local"


class Recorder(ABC):
    """Records device work, without doing it, to do it again without Python."""

    @abstractmethod
    def aside(self) -> contextlib.AbstractContextManager[object]:
        """Run the body where it would be recorded, ordered with the work before and after it."""

    @abstractmethod
    def record(self, work: Callable[[], object]) -> Callable[[], None]:
        """The replay of what `work` issues.

        Raises what `work` raises, and RuntimeError for what cannot be recorded.
        """


class ReplayedWork:
    """Work that is the same at each call: kernels that read and write the same memory.

    The first call does it, the second records and replays it, all later ones replay. What cannot be
    recorded is done as it is, after one warning.

    Args:
        recorder: None to do it as it is each time.
    """

    def __init__(self, recorder: Recorder | None) -> None:
        self._recorder = recorder
        self._is_warm = False
        self._replay: Callable[[], None] | None = None
        self._result: torch.Tensor | None = None

    @property
    def can_record(self) -> bool:
        """Whether there is a recorder, and nothing that it could not record."""
        return self._recorder is not None

    @property
    def is_recorded(self) -> bool:
        """Whether calls replay."""
        return self._replay is not None

    def __call__(self, work: Work) -> torch.Tensor:
        """Do the work, the same each time; returns its result, which the next call overwrites."""
        recorder = self._recorder
        if recorder is not None and not self._is_warm:
            # libraries allocate and kernels are compiled at their first use: not in a recording
            self._is_warm = True
            with recorder.aside():
                return work()
        if recorder is not None and self._replay is None:
            self._record(recorder, work)
        if self._replay is None or self._result is None:
            return work()
        self._replay()
        return self._result

    def forget(self) -> None:
        """Give the memory of the recording back; the next calls begin anew."""
        self._is_warm, self._replay, self._result = False, None, None

    def _record(self, recorder: Recorder, work: Work) -> None:
        def noted() -> None:
            self._result = work()

        try:
            self._replay = recorder.record(noted)
        except RuntimeError as error:
            self._recorder = self._result = None
            warn(f"work is not recorded as a CUDA graph, and is done as it is each time: {error}")


class CudaRecorder(Recorder):
    """Graphs of one GPU, each with memory of its own, which is freed with the replay."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, _stream(device)

    def aside(self) -> contextlib.AbstractContextManager[None]:
        return _aside(self._stream)

    def record(self, work: Callable[[], object]) -> Callable[[], None]:
        graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        with _aside(self._stream), _without_collector():
            try:
                _capture(graph, pool, work)
            except BaseException:
                self._abandon(graph, pool)
                raise
        replay: Callable[[], None] = graph.replay
        return replay

    def _abandon(self, graph: torch.cuda.CUDAGraph, pool: Any) -> None:
        """End a capture that failed."""
        if _fails(graph.capture_end):
            _fails(lambda: end_allocation(self._device.index, pool))
            # The device's generator stays registered to the lost capture until another one ends:
            # without this, the next random number would be an error.
            rest = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
            _capture(*rest, lambda: torch.zeros(1, device=self._device))


def _capture(graph: torch.cuda.CUDAGraph, pool: Any, work: Callable[[], object]) -> None:
    graph.capture_begin(pool=pool, capture_error_mode=_MODE)
    work()
    graph.capture_end()


@contextlib.contextmanager
def _aside(stream: torch.cuda.Stream) -> Iterator[None]:
    """Run the body on `stream`, ordered with the work of the current one before and after it."""
    before = torch.cuda.current_stream(stream.device)
    # Without the wait the body could read arguments before earlier work has written them.
    stream.wait_stream(before)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        # Later work reads what the body wrote and may reuse its memory: without the wait it would
        # race with the capture stream.
        before.wait_stream(stream)


def _fails(step: Callable[[], object]) -> bool:
    """Whether a step towards the end of a broken capture raises, as it then may."""
    try:
        step()
    except RuntimeError:
        return True
    return False


def recorder_for(device: torch.device) -> Recorder | None:
    """The recorder of a device; None for the CPU, which has no launches to save."""
    return None if device.type == "cpu" else CudaRecorder(device)


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One for all recordings: libraries keep memory for every stream that they have seen."""
    return torch.cuda.Stream(device)


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """Python's collector could destroy another graph, which is not allowed during a recording."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
