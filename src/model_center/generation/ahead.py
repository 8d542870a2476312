"""Steps that are issued before it is known that they are needed, so that the device never waits."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from model_center.generation.search import Search, Task


class Later:
    """What a tensor holds now, for the host to read later.

    Reading waits for the work issued before, and for none issued after.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._values = tensor.to("cpu", non_blocking=True)
        self._copied: torch.cuda.Event | None = None
        if tensor.device.type != "cpu":
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(tensor.device))

    def read(self) -> Any:
        """The values, as `tolist` gives them."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._values.tolist()


class Answer(NamedTuple):
    """Whether a search goes on after a step, and the state of its random numbers there."""

    goes_on: Later
    drawn: torch.Tensor | None


class Questions:
    """Asks after each step of a search whether it goes on.

    Once a step is known to have been the last one, the random numbers that steps behind it have
    drawn are put back: a program draws the same ones afterwards, however many steps were ahead.
    """

    def __init__(self, search: Search, task: Task) -> None:
        self._search = search
        self._generator = task.generator
        device = task.prefix.device
        if not task.config.do_sample or task.config.seed is not None:
            self._generator = None  # nothing is drawn, or by nobody else
        elif self._generator is None:
            self._generator = (
                torch.default_generator
                if device.type == "cpu"
                else torch.cuda.default_generators[device.index]
            )

    def ask(self) -> Answer:
        """The answer after the step that was just issued; it does not wait for it."""
        drawn = None if self._generator is None else self._generator.get_state()
        return Answer(Later(self._search.goes_on()), drawn)

    def was_last(self, answer: Answer) -> bool:
        """Whether the step of an answer was the last one; waits for it."""
        if answer.goes_on.read():
            return False
        if self._generator is not None and answer.drawn is not None:
            self._generator.set_state(answer.drawn)
        return True
