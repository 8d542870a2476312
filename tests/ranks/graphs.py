"""Graphs on the CPU, for tests: a capture writes down every operation with its tensors, a replay
does the operations again.
"""

import contextlib

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from bmtrain.graphs.capture import Graphs, make_graphs
from bmtrain.runtime import world

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


class RecordedGraphs(Graphs):
    """What a run on the CPU uses where `use` was called."""

    def __init__(self):
        self.num_captures = self.num_replays = 0

    def aside(self):
        return contextlib.nullcontext()

    def capture(self, body, streams, num_twice):
        recording = Recording()
        try:
            with recording:
                body([iter([contextlib.nullcontext()] * 2) for _ in range(num_twice)])
        finally:
            recording.undo()
        self.num_captures += 1

        def replay():
            self.num_replays += 1
            recording.replay()

        return replay


def use():
    """From now on this rank captures."""
    graphs = RecordedGraphs()
    world.current().services[make_graphs] = graphs
    return graphs


def _done(out):
    """`out` with the collective that it belongs to, if it does to one, at its end and forgotten."""
    if not isinstance(out, tuple) or not isinstance(out[-1], torch.ScriptObject):
        return out
    dist.Work.unbox(out[-1]).wait()
    return (*out[:-1], FakeWork().boxed())


def _tensors(tree):
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor)]
