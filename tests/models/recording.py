"""Recorded steps on the CPU: a recorder that writes down operations, and no looks at the device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from unittest import mock

from tests.ranks.graphs import Recording

from bmtrain.graphs.repeated import Recorder


class OperationRecorder(Recorder):
    """Counts what a graph would have done.

    Attributes:
        num_aside: works that were done as they are, before they are recorded.
        num_recorded, num_replays: recordings, and how often they were done again.
    """

    def __init__(self) -> None:
        self.num_aside = self.num_recorded = self.num_replays = 0

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        self.num_aside += 1
        yield

    def record(self, work: Callable[[], object]) -> Callable[[], None]:
        recording = Recording()
        try:
            with recording:
                work()
        finally:
            recording.undo()
        self.num_recorded += 1

        def replay() -> None:
            self.num_replays += 1
            recording.replay()

        return replay


@contextlib.contextmanager
def recorded(ahead: int | None = None) -> Iterator[OperationRecorder]:
    """Inside, steps of generation are recorded as on a GPU, and issued `ahead` as there."""
    recorder = OperationRecorder()
    with (
        mock.patch("model_center.generation.passes.recorder_for", lambda _: recorder),
        # ids are compared with the size of the table on the CPU only, by looking at them
        mock.patch("model_center.layer.embedding.check_range"),
        mock.patch("model_center.generation.engine.steps_ahead", lambda _: ahead)
        if ahead is not None
        else contextlib.nullcontext(),
    ):
        yield recorder
