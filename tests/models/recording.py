"""Recorded steps on the CPU: a recorder that writes down operations, no looks at the device, and
whether memory is given back.
"""

import contextlib
import weakref
from unittest import mock

from tests.garbage import without_collector
from tests.ranks.graphs import Recording

from model_center.generation.recording import Recorder
from model_center.layer.cache import KeyValueCache


class OperationRecorder(Recorder):
    """Counts what a graph would have done.

    Attributes:
        num_aside: works that were done as they are, before they are recorded.
        num_recorded, num_replays: recordings, and how often they were done again.
    """

    def __init__(self):
        self.num_aside = self.num_recorded = self.num_replays = 0

    @contextlib.contextmanager
    def aside(self):
        self.num_aside += 1
        yield

    def record(self, work):
        recording = Recording()
        try:
            with recording:
                work()
        finally:
            recording.undo()
        self.num_recorded += 1

        def replay():
            self.num_replays += 1
            recording.replay()

        return replay


@contextlib.contextmanager
def recorded(ahead=None):
    """Inside, steps of generation are recorded as on a GPU, and issued `ahead` as there."""
    recorder = OperationRecorder()
    with (
        mock.patch("model_center.generation.decode_runner.recorder_for", lambda _: recorder),
        # ids are compared with the size of the table on the CPU only, by looking at them
        mock.patch("model_center.layer.embedding.check_range"),
        mock.patch("model_center.generation.engine.steps_ahead", lambda _: ahead)
        if ahead is not None
        else contextlib.nullcontext(),
    ):
        yield recorder


@contextlib.contextmanager
def watched_caches():
    """Memory of every cache that is fixed inside; without Python's collector."""
    caches = []
    fix = KeyValueCache.fix

    def noted(cache, place):
        fix(cache, place)
        pair = cache[0]._memory
        assert pair is not None
        caches.append(weakref.ref(pair[0]))

    with without_collector(), mock.patch.object(KeyValueCache, "fix", noted):
        yield caches


def alive(caches):
    return [cache() is not None for cache in caches]
