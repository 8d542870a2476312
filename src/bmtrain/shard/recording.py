"""Where recorded tensors go: the meeting point of model code, pipelines and whoever looks on."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from bmtrain.runtime.world import World
from bmtrain.torch_internals import in_backward

EnterMicroBatch = Callable[[int], contextlib.AbstractContextManager[None]]


@dataclasses.dataclass(frozen=True)
class Position:
    """Which part of a run records a tensor.

    segment: the run is cut where a pipelined pass begins and where it ends, so passes are the odd
    segments. stage: place of the recording layers in the pipeline; 0 outside of passes.
    micro_batch: which rows of the pass; 0 outside of passes.
    """

    segment: int = 0
    stage: int = 0
    micro_batch: int = 0


class Listener(Protocol):
    """Whoever wants to know of recorded tensors."""

    def record(self, x: torch.Tensor, name: str, group: str | None, position: Position) -> None:
        """Take note of `x`, which is part of the graph of the running forward pass."""


class Recorder:
    """Hands recorded tensors to the listeners.

    One per run, reached by `world.service(Recorder)`.
    """

    def __init__(self, world: World) -> None:
        self.position = Position()
        self._listeners: list[Listener] = []

    @property
    def is_listening(self) -> bool:
        """Whether anybody wants to know."""
        return bool(self._listeners)

    @contextlib.contextmanager
    def listening(self, listener: Listener) -> Iterator[None]:
        """Inside, `listener` hears of every recorded tensor."""
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)

    def record(self, x: torch.Tensor, name: str, group: str | None) -> None:
        """Tell the listeners. What runs inside a backward pass is recomputation: its forward pass
        has told them already.
        """
        if self.is_listening and not in_backward():
            for listener in self._listeners:
                listener.record(x, name, group, self.position)

    @contextlib.contextmanager
    def pipelined_pass(self, stage: int) -> Iterator[EnterMicroBatch]:
        """Inside, the layers of `stage` run once per micro-batch, and what they record counts as
        one pass over all rows.

        Gives a function to be called for each piece of work, in any order and as often as needed:

            with recorder.pipelined_pass(stage) as micro_batch:
                for number, rows in enumerate(parts):
                    with micro_batch(number):
                        outputs.append(run_layers(rows))

        Every rank of the pipeline enters every pass, whether it records anything or not.
        """
        if in_backward():
            yield lambda number: contextlib.nullcontext()
            return
        before = self.position
        self.position = Position(segment=before.segment + 1, stage=stage)
        try:
            yield self._micro_batch
        finally:
            self.position = Position(segment=before.segment + 2)

    @contextlib.contextmanager
    def _micro_batch(self, number: int) -> Iterator[None]:
        before = self.position
        self.position = dataclasses.replace(before, micro_batch=number)
        try:
            yield
        finally:
            self.position = before
