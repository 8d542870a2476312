"""Recorded steps on the CPU: a recorder that writes down operations, no looks at the device, and
whether memory is given back.
"""

import contextlib
import weakref
from unittest import mock

import torch
import torch.distributed as dist
from tests.garbage import without_collector
from torch._C._distributed_c10d import FakeWork
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from model_center.generation.recording import Recorder
from model_center.layer.cache import KeyValueCache

SYNCHRONISING = {"_local_scalar_dense"}
MAKING_MEMORY = {"empty", "empty_like", "new_empty", "empty_strided"}


class Recording(TorchDispatchMode):
    """Operations, with their arguments and results, in order.

    A value read by the host ends the capture, as on a GPU.
    """

    def __init__(self):
        super().__init__()
        self.operations = []
        self._made = []
        self._before = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.__name__.split(".")[0]
        if name in SYNCHRONISING:
            raise RuntimeError("operation not permitted when stream is capturing")
        if func._schema.is_mutable:
            self._remember(*_tensors((args, kwargs)))
        out = _done(func(*args, **kwargs))
        if name not in MAKING_MEMORY:
            self.operations.append((func, args, kwargs, out))
        elif out.is_floating_point():
            self._made.append(out.detach())
        return out

    def _remember(self, *tensors):
        for memory in (tensor.untyped_storage() for tensor in tensors):
            if memory.data_ptr() not in self._before:
                self._before[memory.data_ptr()] = (memory, memory.clone())

    def undo(self):
        """Memory is as it was: a capture does nothing."""
        for memory, before in self._before.values():
            if memory.nbytes() == before.nbytes():
                memory.copy_(before)
        self._before.clear()

    def replay(self):
        """Do it all again. Memory of the graph holds nothing at first: on a GPU tensors that did
        not live together share it.
        """
        with torch.no_grad():
            for tensor in self._made:
                tensor.fill_(float("nan"))
            for func, args, kwargs, out in self.operations:
                again = _done(func(*args, **kwargs))
                for old, new in zip(_tensors(out), _tensors(again), strict=True):
                    if new.data_ptr() != old.data_ptr():
                        old.copy_(new)


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


def _done(out):
    """`out` with the collective that it belongs to, if it does to one, at its end and forgotten."""
    if not isinstance(out, tuple) or not isinstance(out[-1], torch.ScriptObject):
        return out
    dist.Work.unbox(out[-1]).wait()
    return (*out[:-1], FakeWork().boxed())


def _tensors(tree):
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor)]
