"""Where recorded tensors go: from model code and pipelines to listeners."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

import torch

from bmtrain.runtime.world import World
from bmtrain.torch_internals import in_backward

EnterMicroBatch = Callable[[int], contextlib.AbstractContextManager[None]]


@dataclasses.dataclass(frozen=True)
class Position:
    """Which part of a run records a tensor.

    Attributes:
        segment: the run is cut where a pipelined pass begins and ends, so passes are the odd
            segments.
        stage: place of the recording layers in the pipeline; 0 outside of passes.
        micro_batch: which rows of the pass; 0 outside of passes.
    """

    segment: int = 0
    stage: int = 0
    micro_batch: int = 0


# Receives a tensor of the graph of the running forward pass, its name and its group.
Listener = Callable[[torch.Tensor, str, str | None, Position], None]


class Recorder:
    """Hands recorded tensors to the listeners.

    One per run, reached by `world.service(Recorder)`.
    """

    def __init__(self, world: World) -> None:
        self.position = Position()
        self.listeners: list[Listener] = []

    @contextlib.contextmanager
    def listening(self, listener: Listener) -> Iterator[None]:
        """Inside, `listener` receives every recorded tensor."""
        self.listeners.append(listener)
        try:
            yield
        finally:
            self.listeners.remove(listener)

    def record(self, x: torch.Tensor, name: str, group: str | None) -> None:
        """Hand `x` to the listeners, but not in backward: recomputation would record it twice."""
        if self.listeners and not in_backward():
            for listener in self.listeners:
                listener(x, name, group, self.position)

    @contextlib.contextmanager
    def pipelined_pass(self, stage: int) -> Iterator[EnterMicroBatch]:
        """Inside, what `stage` records once per micro-batch counts as one pass over all rows.

        Yields a function to be called for each piece of work, in any order and as often as needed:

            with recorder.pipelined_pass(stage) as micro_batch:
                for number, rows in enumerate(parts):
                    with micro_batch(number):
                        outputs.append(run_layers(rows))

        Every rank of the pipeline enters every pass, whether it records anything or not: segments
        would otherwise have different numbers on different ranks.
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
