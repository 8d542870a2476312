"""Decode steps issued before the host knows that they are needed: the device never idles."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from model_center.generation.search import DecodeTask, Search


class AsyncRead:
    """An asynchronous copy of a tensor to the host.

    `read` synchronizes with the work issued before the copy, and with none issued after it.
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


class StopCheck(NamedTuple):
    """Whether a search continues after a step, and the state of its generator at that point."""

    continues: AsyncRead
    drawn: torch.Tensor | None


class StopChecks:
    """Checks after each step of a search whether it continues.

    Once a step is known to have been the last one, the generator is reset to its state there: a
    program draws the same numbers afterwards, however many steps were issued ahead.
    """

    def __init__(self, search: Search, task: DecodeTask) -> None:
        self._search = search
        self._generator = task.generator
        device = task.prefix.device
        if not task.config.do_sample or task.config.seed is not None:
            self._generator = None  # nothing is drawn, or the generator is ours alone
        elif self._generator is None:
            self._generator = (
                torch.default_generator
                if device.type == "cpu"
                else torch.cuda.default_generators[device.index]
            )

    def ask(self) -> StopCheck:
        """The check after the step just issued; does not synchronize."""
        drawn = None if self._generator is None else self._generator.get_state()
        return StopCheck(AsyncRead(self._search.continues()), drawn)

    def was_last(self, answer: StopCheck) -> bool:
        """Whether the step of a check was the last one; synchronizes with it."""
        if answer.continues.read():
            return False
        if self._generator is not None and answer.drawn is not None:
            self._generator.set_state(answer.drawn)
        return True
