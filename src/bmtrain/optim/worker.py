"""A thread that computes beside the program: jobs in order, but those that are awaited first."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from bmtrain.runtime.world import World, num_cores


class Job:
    """Work for a `Worker`."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self.done: Future[None] = Future()

    def run(self) -> None:
        """Do the work, once."""
        try:
            self._work()
        except BaseException as error:  # raised where the job is awaited
            self.done.set_exception(error)
        else:
            # Before anyone knows: what the work refers to is not held by it any more.
            del self._work
            self.done.set_result(None)


class Worker:
    """The thread of a process; one per run, reached by `world.service(Worker)`.

    Kernels of torch run without Python's lock, and on this rank's share of the cores but one, which
    launches the GPU's kernels. On a CPU, where the program computes with the same cores, the number
    of threads is the program's.

    Args:
        world: of the run.
        before_job: called in the thread before each job; tests delay it.
    """

    def __init__(self, world: World, before_job: Callable[[], None] | None = None) -> None:
        self._before_job = before_job
        share = max(1, num_cores() // world.local_size - 1)
        self._num_threads = None if world.device.type == "cpu" else share
        self._executor = ThreadPoolExecutor(1, "update")
        self._jobs: collections.deque[Job] = collections.deque()
        self._lock = threading.Lock()
        self._scratch: dict[torch.dtype, torch.Tensor] = {}
        self._is_running = False

    def submit(self, job: Job) -> None:
        """Do a job after those that wait already."""
        self._start()
        with self._lock:
            self._jobs.append(job)
        self._executor.submit(self._next)

    def wait(self, job: Job) -> None:
        """Wait for a job; if it has not begun, it is the next.

        Raises:
            BaseException: what the job has raised, at every call.
        """
        with self._lock:
            if job in self._jobs:
                self._jobs.remove(job)
                self._jobs.appendleft(job)
        job.done.result()

    def scratch(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory (numel,) for the job that runs. The same for all: new pages would cost more."""
        known = self._scratch.get(dtype)
        if known is None or known.numel() < numel:
            known = self._scratch[dtype] = torch.empty(numel, dtype=dtype, device="cpu")
        return known[:numel]

    def _start(self) -> None:
        if self._is_running:
            return
        self._is_running = True
        if self._num_threads is None:
            return
        before = torch.get_num_threads()
        self._executor.submit(torch.set_num_threads, self._num_threads).result()
        # The number is a thread's own, but also what threads that are made later begin with.
        torch.set_num_threads(before)

    def _next(self) -> None:
        with self._lock:
            job = self._jobs.popleft()
        if self._before_job is not None:
            self._before_job()
        job.run()
