"""Memory that ranks share, on CPUs: files that all of them map stand for the memory of GPUs, so that
gathers and reductions by copies run without any.
"""

import contextlib
import pathlib
import tempfile
import weakref
from unittest import mock

import torch

from bmtrain.distributed import collectives, peers
from bmtrain.distributed.agreement import attempt
from bmtrain.distributed.ledger import Ledger
from bmtrain.runtime import world


class FilePeers(peers.Peers):
    """Processes of one host."""

    def __init__(self, axis, device, timeout):
        self.axis, self._device, self.alive = axis, device, weakref.WeakSet()

    def allocate(self, numel, dtype):
        num_bytes = numel * dtype.itemsize

        def mapped(paths):
            options = {"size": numel, "dtype": dtype, "device": self._device}
            return [torch.from_file(str(path), shared=True, **options) for path in paths]

        with attempt(
            lambda: tempfile.TemporaryDirectory(prefix="bmtrain-"), self.axis, OSError
        ) as folder:
            path = attempt(
                lambda: make_file(pathlib.Path(folder, "memory"), num_bytes), self.axis, OSError
            )
            paths = collectives.gather_objects(path, self.axis, "shared memory")
            # Safe to delete the files afterwards: every rank has mapped all of them by then.
            parts = attempt(lambda: mapped(paths), self.axis, OSError)
        own = parts[self.axis.index]
        # The PeerMemory gets an alias of this rank's tensor: holding the tensor itself would keep
        # the shard alive, and its finaliser, which drops this memory, would never run.
        aliases = [own.detach() if part is own else part for part in parts]
        memory = peers.PeerMemory(aliases, None, num_bytes)
        self.alive.add(memory)
        return own, memory

    def barrier(self, channel):
        # not a collective of its own in the ledger: the gather or reduction around it is logged
        world.current().service(Ledger).compare(self.axis)


def make_file(path, num_bytes):
    """A file of zeros."""
    with open(path, "wb") as file:
        file.truncate(num_bytes)
    return path


@contextlib.contextmanager
def in_files():
    """Inside, ranks on CPUs have such memory if `transport="copy_engine"` asks for it."""
    find = peers._obstacle

    def obstacle(axis, device):
        found = find(axis, device)
        return None if found is not None and found.what.endswith("CPUs") else found

    with (
        mock.patch.object(peers, "Peers", FilePeers),
        mock.patch.object(peers, "_obstacle", obstacle),
    ):
        yield
