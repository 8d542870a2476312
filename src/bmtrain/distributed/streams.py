"""Streams and events of the device; on the CPU, where everything happens in program order, they do nothing."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod

import torch


class Streams(ABC):
    """A gather and a reduce stream beside the compute stream of one device. Events order work between them."""

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
        """Issue the body on the reduce stream, after all work so far issued on the compute stream."""

    @abstractmethod
    def mark_current(self) -> torch.Event | None:
        """An event after all work so far issued on the stream of the surrounding `gathering` or `reducing`."""


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


class CudaStreams(Streams):
    """High-priority side streams: a collective that waits behind compute kernels delays every rank."""

    def __init__(self, device: torch.device) -> None:
        self._gather = torch.cuda.Stream(device, priority=-1)
        self._reduce = torch.cuda.Stream(device, priority=-1)

    def mark_compute(self) -> torch.Event | None:
        return torch.cuda.current_stream().record_event()

    def compute_waits(self, event: torch.Event | None) -> None:
        if event is not None:
            torch.cuda.current_stream().wait_event(event)

    def gathering(self, after: torch.Event | None) -> contextlib.AbstractContextManager[object]:
        if after is not None:
            self._gather.wait_event(after)
        return torch.cuda.stream(self._gather)

    def reducing(self) -> contextlib.AbstractContextManager[object]:
        self._reduce.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._reduce)

    def mark_current(self) -> torch.Event | None:
        return torch.cuda.current_stream().record_event()


def make_streams(device: torch.device) -> Streams:
    """The streams of a device."""
    return NullStreams() if device.type == "cpu" else CudaStreams(device)
