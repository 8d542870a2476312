"""`bmtrain.nccl`: the verbs of BMTrain's NCCL binding, as aliases of `distributed.collectives`.

The groups use NCCL on a GPU, Gloo on a CPU. `src` and `dst` are contiguous tensors or storages, as
in BMTrain. They are read as flat vectors, of equal dtypes and devices; only their numbers of
elements must match. `op` is "sum", "avg", "max", "min" or "prod". `comm` is a communicator of
`bmtrain.config`, such as `config["comm"]`; `root` and `peer` are indices in it. Anything else is a
ConfigurationError.
"""

from __future__ import annotations

import itertools

import torch

from bmtrain.distributed import autograd, collectives
from bmtrain.errors import ConfigurationError
from bmtrain.runtime import world
from bmtrain.runtime.mesh import KINDS, Axis
from bmtrain.runtime.world import World

Buffer = torch.Tensor | torch.UntypedStorage | torch.TypedStorage
NCCLCommunicator = Axis


class _Batch:
    """Sends and receives queued between groupStart and groupEnd. One per run."""

    def __init__(self, current: World) -> None:
        self.depth = 0
        self.queued: list[tuple[Axis, bool, torch.Tensor, int]] = []  # the flag: it is sent


def allReduce(src: Buffer, dst: Buffer, op: str, comm: Axis) -> None:
    """`dst` = the reduction of every rank's `src` by `op` (sum, avg, max, min, prod)."""
    source = _source("allReduce", src, comm, reduces=True)
    _write("allReduce", dst, autograd.all_reduce(source, op, comm))


def allGather(src: Buffer, dst: Buffer, comm: Axis) -> None:
    """`dst` (ranks * n,) = every rank's `src` (n,), in rank order."""
    _write("allGather", dst, collectives.all_gather(_source("allGather", src, comm), comm))


def reduceScatter(src: Buffer, dst: Buffer, op: str, comm: Axis) -> None:
    """`dst` (n,) = this rank's part of the reduction by `op` of every rank's `src` (ranks * n,)."""
    source = _source("reduceScatter", src, comm, reduces=True)
    _write("reduceScatter", dst, autograd.reduce_scatter(source, op, comm))


def broadcast(src: Buffer, dst: Buffer, root: int, comm: Axis) -> None:
    """`dst` = the `src` of rank `root`; elsewhere `src` is not read."""
    axis = autograd.checked("nccl.broadcast", comm, root)
    own = _flat("broadcast", src if axis.index == root else dst).clone()
    collectives.broadcast_(own, root, axis)
    _write("broadcast", dst, own)


def reduce(src: Buffer, dst: Buffer, op: str, root: int, comm: Axis) -> None:
    """`dst` on rank `root` = the reduction of every rank's `src` by `op`; not written elsewhere."""
    total = autograd.all_reduce(_source("reduce", src, comm, root, reduces=True), op, comm)
    if comm.index == root:
        _write("reduce", dst, total)


def send(src: Buffer, peer: int, comm: Axis) -> None:
    """Send `src` to rank `peer`, which must receive as many elements of the same dtype.

    Sending to self is possible only between groupStart and groupEnd.
    """
    _transfer("send", src, peer, comm)


def recv(dst: Buffer, peer: int, comm: Axis) -> None:
    """Fill `dst` with what rank `peer` sends; inside a group it is filled at groupEnd."""
    _transfer("recv", dst, peer, comm)


def groupStart() -> None:
    """Queue sends and receives until the matching groupEnd, which runs them together.

    May be nested.
    """
    world.current("nccl.groupStart").service(_Batch).depth += 1


def groupEnd() -> None:
    """Run the sends and receives since the outermost groupStart; their order cannot deadlock.

    One communicator after the other, in an order that is the same on all ranks: with different
    orders, two ranks could each wait for the other in different communicators and deadlock.

    Raises:
        ConfigurationError: without a groupStart before it, or if this rank's sends to itself and
            its receives from itself differ in number, length or dtype.
    """
    batch = world.current("nccl.groupEnd").service(_Batch)
    if batch.depth == 0:
        raise ConfigurationError("groupEnd was called without a groupStart before it.")
    batch.depth -= 1
    if batch.depth:
        return
    queued, batch.queued = batch.queued, []
    axes = dict.fromkeys(axis for axis, *_ in queued)
    for axis in sorted(axes, key=lambda axis: KINDS.index(axis.name)):
        # messages to self, which torch refuses: the n-th send fills the n-th receive
        own, into, sends, receives = (
            [
                (x, peer)
                for owner, sent, x, peer in queued
                if owner is axis and (peer == axis.index) == is_own and sent == is_sent
            ]
            for is_own, is_sent in itertools.product((True, False), repeat=2)
        )
        if [(x.dtype, x.numel()) for x, _ in own] != [(x.dtype, x.numel()) for x, _ in into]:
            raise ConfigurationError(
                f"rank {axis.index} sends {len(own)} tensors to itself and receives {len(into)}: "
                "expected as many, of the same numbers of elements and dtypes, in the same order."
            )
        for (x, _), (target, _) in zip(own, into, strict=True):
            target.copy_(x)
        collectives.exchange(sends, receives, axis)


def commCount(comm: Axis) -> int:
    """Number of ranks of `comm`."""
    return autograd.checked("nccl.commCount", comm).size


def commRank(comm: Axis) -> int:
    """This rank's index in `comm`."""
    return autograd.checked("nccl.commRank", comm).index


def commDestroy(comm: Axis) -> None:
    """Only checks `comm`: the run owns all communicators and closes them at its end."""
    autograd.checked("nccl.commDestroy", comm)


def _transfer(what: str, buffer: Buffer, peer: int, comm: Axis) -> None:
    """Send or receive, or leave that to groupEnd; outside of a group with another rank alone."""
    x, batch = _flat(what, buffer), world.current(f"nccl.{what}").service(_Batch)
    autograd.checked(f"nccl.{what}", comm, peer)
    if batch.depth:
        batch.queued.append((comm, what == "send", x, peer))
        return
    if peer == comm.index:
        raise ConfigurationError(
            f"nccl.{what} got this rank itself, {peer}: expected another one; between "
            "groupStart() and groupEnd() a rank may send to itself."
        )
    (collectives.send if what == "send" else collectives.receive_)(x, peer, comm)


def _flat(what: str, buffer: Buffer) -> torch.Tensor:
    """A 1-D tensor that shares the buffer's memory."""
    if isinstance(buffer, torch.Tensor):
        if not buffer.is_contiguous():
            raise ConfigurationError(
                f"nccl.{what} got a tensor of strides {buffer.stride()}: expected a "
                "contiguous one; call .contiguous()."
            )
        return buffer.detach().view(-1)
    if isinstance(buffer, torch.UntypedStorage | torch.TypedStorage):
        dtype = torch.uint8 if isinstance(buffer, torch.UntypedStorage) else buffer.dtype
        return torch.empty(0, dtype=dtype, device=buffer.device).set_(buffer)
    raise ConfigurationError(
        f"nccl.{what} got {type(buffer).__name__}: expected a tensor or a storage."
    )


def _source(
    what: str, src: Buffer, comm: Axis, root: int = 0, *, reduces: bool = False
) -> torch.Tensor:
    """The elements of `src`, once the communicator is known to have a rank `root`."""
    autograd.checked(f"nccl.{what}", comm, root)
    if reduces and isinstance(src, torch.UntypedStorage):
        raise ConfigurationError(
            f"nccl.{what} got an untyped storage, whose bytes cannot be reduced: "
            "expected a tensor or typed storage."
        )
    return _flat(what, src)


def _write(what: str, dst: Buffer, values: torch.Tensor) -> None:
    """Write the result, of any shape, to a destination that must fit."""
    target = _flat(what, dst)
    found, wanted = (f"{x.numel()} elements of {x.dtype} on {x.device}" for x in (target, values))
    if found != wanted:
        raise ConfigurationError(
            f"nccl.{what} got a destination of {found}: expected {wanted}; nothing was written."
        )
    target.copy_(values.view(-1))
