"""When what happens in steps with the optimizer in host memory: on the GPU, the bus, the CPU."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from backends import Ours

from bmtrain.optim import host_update
from bmtrain.optim.worker import Worker
from bmtrain.runtime import world

Span = tuple[float, float]


class Marks:
    """Moments on the host and on streams, in seconds since the device was idle."""

    def __init__(self) -> None:
        self._is_gpu = torch.cuda.is_available()
        if self._is_gpu:
            torch.cuda.synchronize()
        self._began = time.perf_counter()
        self._first = self.event()

    def now(self) -> float:
        """Of the host."""
        return time.perf_counter() - self._began

    def event(self, stream: torch.cuda.Stream | None = None) -> Any:
        """A moment of a stream, by default the program's."""
        if not self._is_gpu:
            return self.now()
        event: Any = torch.cuda.Event(enable_timing=True)
        event.record(stream or torch.cuda.current_stream())
        return event

    def seconds(self, event: Any) -> float:
        """When it was; the device has done everything."""
        if not self._is_gpu:
            return float(event)
        milliseconds: float = self._first.elapsed_time(event)
        return milliseconds / 1000


class Recorder:
    """Records copies, updates and waits while it is entered."""

    def __init__(self, backend: Ours) -> None:
        self.backend, self.marks = backend, Marks()
        self.steps: list[dict[str, tuple[float, Any]]] = []
        self.copies: dict[str, list[tuple[Any, Any]]] = {"down": [], "up": []}
        self.arrivals: list[Span] = []
        self.updates: list[Span] = []
        self.waits: list[Span] = []

    def step(self, data: tuple[torch.Tensor, torch.Tensor]) -> None:
        """One step, with its phases marked."""
        backend, marks = self.backend, self.marks
        self.steps.append({})

        def mark(name: str) -> None:
            self.steps[-1][name] = marks.now(), marks.event()

        mark("forward")
        loss = backend.model(*data)
        mark("backward")
        backend.manager.backward(loss)
        mark("clip")
        backend.manager.clip_grad_norm(backend.optimizer.param_groups, max_norm=1.0)
        mark("step")
        backend.manager.step()
        mark("end")
        backend.manager.zero_grad()

    def record(self, data: tuple[torch.Tensor, torch.Tensor], count: int) -> dict[str, Any]:
        """What happened in so many steps, in seconds."""
        optimizer: Any = self.backend.optimizer
        bus, worker = optimizer._bus, world.current().service(Worker)
        compute = host_update.HostUpdate._compute

        def computed(update: Any, tensors: Any) -> None:
            began = self.marks.now()
            if update._arrived is not None:
                update._arrived.synchronize()
            arrived = self.marks.now()
            compute(update, tensors)
            self.arrivals.append((began, arrived))
            self.updates.append((arrived, self.marks.now()))

        with (
            mock.patch.object(host_update.HostUpdate, "_compute", computed),
            mock.patch.object(worker, "wait", self._waiting(worker.wait)),
            mock.patch.object(bus, "download", self._copying("down", bus.download, bus._down)),
            mock.patch.object(bus, "upload", self._copying("up", bus.upload, bus._up)),
        ):
            for _ in range(count):
                self.step(data)
            optimizer.settle()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return self._result()

    def _waiting(self, wait: Callable[..., None]) -> Callable[..., None]:
        def waited(job: Any) -> None:
            began = self.marks.now()
            wait(job)
            self.waits.append((began, self.marks.now()))

        return waited

    def _copying(
        self, name: str, copy: Callable[..., Any], stream: torch.cuda.Stream | None
    ) -> Callable[..., Any]:
        def copied(target: torch.Tensor, source: torch.Tensor) -> Any:
            began = self.marks.event(stream)
            event = copy(target, source)
            self.copies[name].append((began, self.marks.event(stream)))
            return event

        return copied

    def _result(self) -> dict[str, Any]:
        seconds = self.marks.seconds
        spans = {
            name: [(seconds(a), seconds(b)) for a, b in pairs]
            for name, pairs in self.copies.items()
        }
        spans |= {"arrive": self.arrivals, "cpu": self.updates, "wait": self.waits}
        return {
            "steps": [
                {name: _rounded((host, seconds(event))) for name, (host, event) in step.items()}
                for step in self.steps
            ],
            "spans": {name: [_rounded(x) for x in found] for name, found in spans.items()},
        }


def _rounded(span: Span) -> list[float]:
    return [round(x, 5) for x in span]


def table(result: dict[str, Any]) -> list[str]:
    """Lines: of each step milliseconds of the GPU's phases, and of what belongs to its update."""
    steps, lines = result["steps"], []
    per_step = len(result["spans"]["cpu"]) // max(1, len(steps))
    for number, step in enumerate(steps):
        names = list(step)
        phases = [
            f"{name} {1000 * (step[after][1] - step[name][1]):.0f} (host "
            f"{1000 * (step[after][0] - step[name][0]):.0f})"
            for name, after in itertools.pairwise(names)
        ]
        lines.append(f"step {number} at {1000 * step['forward'][1]:.0f} ms: " + ", ".join(phases))
        for kind in ("down", "arrive", "cpu", "up", "wait"):
            own = result["spans"][kind][number * per_step : (number + 1) * per_step]
            if kind == "wait":  # for an update more than once, until the next step is taken
                taken = [step["end"][0] for step in steps[number : number + 2]]
                own = [x for x in result["spans"][kind] if taken[0] <= x[0] <= taken[-1]]
            if own:
                busy = sum(end - begin for begin, end in own)
                lines.append(
                    f"    its {kind:6} from {1000 * own[0][0]:.0f} to "
                    f"{1000 * max(end for _, end in own):.0f} ms, busy {1000 * busy:.0f}"
                )
    return lines
