"""The thread that computes beside the program: order, hurry, errors."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

import bmtrain as bmt
from bmtrain.optim.worker import Job, Worker
from bmtrain.runtime import world


@pytest.fixture
def gate() -> threading.Event:
    return threading.Event()


@pytest.fixture
def worker(gate: threading.Event) -> Iterator[Worker]:
    bmt.init_distributed(device="cpu")
    try:
        yield Worker(world.current(), lambda: None if gate.wait(10.0) else pytest.fail("held"))
    finally:
        gate.set()
        bmt.shutdown()


def test_jobs_are_done_in_order_but_what_is_awaited_comes_first(
    worker: Worker, gate: threading.Event
) -> None:
    done: list[int] = []
    jobs = [Job(lambda number=number: done.append(number)) for number in range(5)]  # type: ignore[misc]
    for job in jobs:
        worker.submit(job)
    threading.Timer(0.2, gate.set).start()
    worker.wait(jobs[3])
    worker.wait(jobs[4])
    # the worker has taken the first one before anybody waited
    assert done[:2] == [0, 3]
    worker.wait(jobs[2])
    assert sorted(done) == [0, 1, 2, 3, 4]


def test_an_error_is_raised_at_every_wait_and_the_rest_is_done(
    worker: Worker, gate: threading.Event
) -> None:
    def fail() -> None:
        raise MemoryError("none left")

    done: list[int] = []
    broken, sound = Job(fail), Job(lambda: done.append(1))
    gate.set()
    worker.submit(broken)
    worker.submit(sound)
    for _ in range(2):
        with pytest.raises(MemoryError, match="none left"):
            worker.wait(broken)
    worker.wait(sound)
    assert done == [1]
