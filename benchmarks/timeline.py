"""When what happens in steps with the optimizer in host memory: on the GPU and on the bus."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from backends import Ours

from bmtrain.optim import streaming


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
        # when loads begin to come up, are there, and are updated and down again
        self.loads: list[list[Any]] = []

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
        streamer = optimizer._streamer
        run, update = streamer.run, streaming.compute

        def ran(*arguments: Any) -> Any:
            self.loads.append([self._moment(streamer, "_up")])
            event = run(*arguments)
            self.loads[-1].append(self._moment(streamer, "_down"))
            return event

        def updated(*arguments: Any) -> None:
            self.loads[-1].append(self.marks.event())
            update(*arguments)
            self.loads[-1].append(self.marks.event())

        with (
            mock.patch.object(streamer, "run", ran),
            mock.patch.object(streaming, "compute", updated),
        ):
            for _ in range(count):
                self.step(data)
            optimizer.wait()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return self._result()

    def _moment(self, streamer: Any, stream: str) -> Any:
        return self.marks.event(getattr(streamer, stream) if streamer.is_beside else None)

    def _result(self) -> dict[str, Any]:
        seconds = self.marks.seconds
        return {
            "steps": [
                {name: _rounded((host, seconds(event))) for name, (host, event) in step.items()}
                for step in self.steps
            ],
            "loads": [_rounded(list(map(seconds, moments))) for moments in self.loads],
        }


def _rounded(span: Sequence[float]) -> list[float]:
    return [round(x, 5) for x in span]


def table(result: dict[str, Any]) -> list[str]:
    """Lines: of each step milliseconds of the GPU's phases, and of what belongs to its update."""
    steps, lines = result["steps"], []
    per_step = len(result["loads"]) // max(1, len(steps))
    for number, step in enumerate(steps):
        names = list(step)
        phases = [
            f"{name} {1000 * (step[after][1] - step[name][1]):.0f} (host "
            f"{1000 * (step[after][0] - step[name][0]):.0f})"
            for name, after in itertools.pairwise(names)
        ]
        lines.append(f"step {number} at {1000 * step['forward'][1]:.0f} ms: " + ", ".join(phases))
        own = result["loads"][number * per_step : (number + 1) * per_step]
        if own:
            busy = sum(done - begun for _, begun, done, _ in own)
            lines.append(
                f"    its {len(own)} loads from {1000 * own[0][0]:.0f} to "
                f"{1000 * own[-1][3]:.0f} ms, updates busy {1000 * busy:.0f}"
            )
    return lines
