"""What waits for what on the streams of a device: stand-ins for them keep count, so that no GPU is
needed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch

from bmtrain.distributed.transport import CudaStreams

Tasks = frozenset[str]


class Device:
    """Streams in which each task knows all tasks that come before it for certain."""

    def __init__(self) -> None:
        self.compute = self.current = Stream()
        self.before: dict[str, Tasks] = {}

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        outer, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = outer

    def task(self, name: str) -> Callable[[], None]:
        def issue() -> None:
            self.before[name] = self.current.past
            self.current.past |= {name}

        return issue


class Stream:
    """One stream: its past is all that comes before what is put there next."""

    def __init__(self, *_: object, priority: int = 0) -> None:
        self.past: Tasks = frozenset()

    def record_event(self) -> Tasks:
        return self.past

    def wait_event(self, event: Tasks) -> None:
        self.past |= event

    def wait_stream(self, other: Stream) -> None:
        self.past |= other.past


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", made.stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: made.current)
    return made


def copies(device: Device, name: str, count: int) -> list[Callable[[], None]]:
    return [device.task(f"{name} {number}") for number in range(count)]


def test_gathers_and_reductions_do_not_wait_for_each_other(device: Device) -> None:
    """Nor do the copies of one of them; each direction in itself is in order."""
    streams = CudaStreams(torch.device("cuda", 0))
    for turn in range(2):
        with streams.gathering(None):
            streams.side_by_side(copies(device, f"gather {turn}:", 3))
            device.task(f"gather {turn} done")()
        with streams.reducing():
            streams.side_by_side(copies(device, f"reduce {turn}:", 3))
            device.task(f"reduce {turn} done")()
    for own, other in (("gather", "reduce"), ("reduce", "gather")):
        for turn in range(2):
            for number in range(3):
                before = device.before[f"{own} {turn}: {number}"]
                assert not [name for name in before if name.startswith((other, f"{own} {turn}"))]
                assert turn == 0 or f"{own} 0 done" in before
            after = device.before[f"{own} {turn} done"]
            assert {f"{own} {turn}: {number}" for number in range(3)} <= after


def test_reductions_come_after_what_was_computed(device: Device) -> None:
    streams = CudaStreams(torch.device("cuda", 0))
    device.task("product")()
    with streams.reducing():
        streams.side_by_side(copies(device, "copy", 3))
    assert all("product" in device.before[f"copy {number}"] for number in range(3))


@pytest.mark.parametrize("count", [0, 1, 5])
def test_any_number_of_jobs(device: Device, count: int) -> None:
    """More of them the second time, and fewer the third."""
    streams = CudaStreams(torch.device("cuda", 0))
    for turn, now in enumerate((count, count + 4, count)):
        streams.side_by_side(copies(device, f"{turn}:", now))
        device.task(f"end {turn}")()
        assert device.before[f"end {turn}"] >= {f"{turn}: {number}" for number in range(now)}
