"""Streams and events of the device; on the CPU, where everything happens in program order, they do
nothing.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch


class Streams(ABC):
    """A gather and a reduce stream beside the compute stream of one device.

    Events order work between them.
    """

    @abstractmethod
    def mark_compute(self) -> torch.Event | None:
        """An event after all work so far issued on the compute stream."""

    @abstractmethod
    def compute_waits(self, event: torch.Event | None) -> None:
        """Later work on the compute stream starts after `event`."""

    @abstractmethod
    def gathering(self, after: torch.Event | None) -> contextlib.AbstractContextManager[object]:
        """Issue the body on the gather stream, after `after`."""

    @abstractmethod
    def reducing(self) -> contextlib.AbstractContextManager[object]:
        """Issue the body on the reduce stream, after all work so far issued on the compute
        stream.
        """

    @abstractmethod
    def mark_current(self) -> torch.Event | None:
        """An event after all work so far issued on the stream of the surrounding `gathering` or
        `reducing`.
        """

    @abstractmethod
    def side_by_side(self, jobs: Sequence[Callable[[], object]]) -> None:
        """Issue jobs that may run at the same time: after all work so far on the surrounding
        stream, before all later work.
        """

    @abstractmethod
    def fork(self) -> None:
        """Later work on the side streams starts after all work so far issued on the compute
        stream.
        """

    @abstractmethod
    def join(self) -> None:
        """Later work on the compute stream starts after all work so far issued on the side
        streams.
        """

    @abstractmethod
    def renew(self) -> None:
        """What came before all events so far is done, or was only captured: nobody waits for those
        events any more.
        """


class NullStreams(Streams):
    """The CPU: program order is the only order."""

    def mark_compute(self) -> torch.Event | None:
        return None

    def compute_waits(self, event: torch.Event | None) -> None:
        return None

    def gathering(self, after: torch.Event | None) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def reducing(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def mark_current(self) -> torch.Event | None:
        return None

    def side_by_side(self, jobs: Sequence[Callable[[], object]]) -> None:
        for job in jobs:
            job()

    def fork(self) -> None:
        return None

    def join(self) -> None:
        return None

    def renew(self) -> None:
        return None


class Mark(torch.cuda.Event):
    """An event of one age of the streams: a capture of a CUDA graph cannot wait for events from
    outside of it, nor they for its.
    """

    age: int


class CudaStreams(Streams):
    """High-priority side streams: a collective that waits behind compute kernels delays every
    rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._gather = torch.cuda.Stream(device, priority=-1)
        self._reduce = torch.cuda.Stream(device, priority=-1)
        self._device = device
        # Each direction has its own. A stream does one thing after the other: on shared ones the
        # copies of a reduction would wait for those of a gather, and links that carry both ways at
        # once would carry one.
        self._sides: defaultdict[torch.cuda.Stream, list[torch.cuda.Stream]] = defaultdict(list)
        self._age = 0

    def mark_compute(self) -> torch.Event | None:
        return self.mark_current()

    def compute_waits(self, event: torch.Event | None) -> None:
        if isinstance(event, Mark) and event.age == self._age:
            torch.cuda.current_stream().wait_event(event)

    def gathering(self, after: torch.Event | None) -> contextlib.AbstractContextManager[object]:
        if isinstance(after, Mark) and after.age == self._age:
            self._gather.wait_event(after)
        return torch.cuda.stream(self._gather)

    def reducing(self) -> contextlib.AbstractContextManager[object]:
        self._reduce.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._reduce)

    def mark_current(self) -> torch.Event | None:
        mark = Mark()
        mark.age = self._age
        torch.cuda.current_stream().record_event(mark)
        return mark

    def fork(self) -> None:
        compute = torch.cuda.current_stream()
        for side in (self._gather, self._reduce):
            side.wait_stream(compute)

    def join(self) -> None:
        compute = torch.cuda.current_stream()
        for side in (self._gather, self._reduce):
            compute.wait_stream(side)

    def renew(self) -> None:
        self._age += 1

    def side_by_side(self, jobs: Sequence[Callable[[], object]]) -> None:
        surrounding = torch.cuda.current_stream()
        sides = self._sides[surrounding]
        while len(sides) < len(jobs) - 1:
            sides.append(torch.cuda.Stream(self._device, priority=-1))
        before = surrounding.record_event()
        used = sides[: max(len(jobs) - 1, 0)]
        for job, side in zip(jobs[1:], used, strict=True):
            side.wait_event(before)
            with torch.cuda.stream(side):
                job()
        for job in jobs[:1]:
            job()
        for side in used:
            surrounding.wait_stream(side)


def make_streams(device: torch.device) -> Streams:
    """The streams of a device."""
    return NullStreams() if device.type == "cpu" else CudaStreams(device)
