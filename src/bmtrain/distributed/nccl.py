"""`bmtrain.nccl`: the API of BMTrain's NCCL binding, on torch.distributed groups.

The groups use NCCL on a GPU, Gloo on a CPU. Sources and destinations are contiguous tensors or
storages, as in BMTrain. They are read as flat vectors; only their numbers of elements must match. A
communicator is an `Axis`, such as `bmtrain.config["comm"]`; ranks are indices in it.
"""

from __future__ import annotations

from typing import NoReturn

import torch

from bmtrain.distributed import collectives
from bmtrain.errors import ConfigurationError, RemovedError
from bmtrain.runtime import world
from bmtrain.runtime.arguments import COUNT
from bmtrain.runtime.mesh import KINDS, Axis
from bmtrain.runtime.world import World

Buffer = torch.Tensor | torch.UntypedStorage | torch.TypedStorage
NCCLCommunicator = Axis


class _Batch:
    """Sends and receives queued between groupStart and groupEnd. One per run."""

    def __init__(self, current: World) -> None:
        self.depth = 0
        self._sends: dict[Axis, list[tuple[torch.Tensor, int]]] = {}
        self._receives: dict[Axis, list[tuple[torch.Tensor, int]]] = {}

    def add_send(self, x: torch.Tensor, peer: int, axis: Axis) -> None:
        self._sends.setdefault(axis, []).append((x, peer))
        self._receives.setdefault(axis, [])

    def add_receive(self, x: torch.Tensor, peer: int, axis: Axis) -> None:
        self._receives.setdefault(axis, []).append((x, peer))
        self._sends.setdefault(axis, [])

    def run(self) -> None:
        """Run all, one communicator after the other.

        The order is the same on all ranks: with different orders, two ranks could each wait for the
        other in different communicators and deadlock.
        """
        sends, receives = self._sends, self._receives
        self._sends, self._receives = {}, {}
        for axis in sorted(sends, key=lambda axis: KINDS.index(axis.name)):
            _copy_to_self(sends[axis], receives[axis], axis)
            collectives.exchange(
                _to_others(sends[axis], axis), _to_others(receives[axis], axis), axis
            )


def _copy_to_self(
    sends: list[tuple[torch.Tensor, int]], receives: list[tuple[torch.Tensor, int]], axis: Axis
) -> None:
    """Messages to self, which torch.distributed refuses: the n-th send fills the n-th receive."""
    own_sends = [x for x, peer in sends if peer == axis.index]
    own_receives = [x for x, peer in receives if peer == axis.index]
    if [(x.dtype, x.numel()) for x in own_sends] != [(x.dtype, x.numel()) for x in own_receives]:
        raise ConfigurationError(
            f"rank {axis.index} sends {len(own_sends)} tensors to itself and receives "
            f"{len(own_receives)}: expected as many, of "
            "the same numbers of elements and dtypes, in the same order."
        )
    for x, into in zip(own_sends, own_receives, strict=True):
        _write(into, x)


def _to_others(
    messages: list[tuple[torch.Tensor, int]], axis: Axis
) -> list[tuple[torch.Tensor, int]]:
    return [(x, peer) for x, peer in messages if peer != axis.index]


def allReduce(src: Buffer, dst: Buffer, op: str, comm: Axis) -> None:
    """`dst` = the reduction of every rank's `src` by `op` (sum, avg, max, min, prod)."""
    _check(comm, "allReduce")
    source, target = _pair(src, dst, 1, 1, "allReduce", reduces=True)
    _write(target, collectives.all_reduce(source, op, comm))


def allGather(src: Buffer, dst: Buffer, comm: Axis) -> None:
    """`dst` (ranks * n,) = every rank's `src` (n,), in rank order."""
    _check(comm, "allGather")
    source, target = _pair(src, dst, comm.size, 1, "allGather")
    _write(target, collectives.all_gather(source, comm).view(-1))


def reduceScatter(src: Buffer, dst: Buffer, op: str, comm: Axis) -> None:
    """`dst` (n,) = this rank's part of the reduction by `op` of every rank's `src` (ranks * n,)."""
    _check(comm, "reduceScatter")
    source, target = _pair(src, dst, 1, comm.size, "reduceScatter", reduces=True)
    _write(target, collectives.reduce_scatter(source, op, comm))


def broadcast(src: Buffer, dst: Buffer, root: int, comm: Axis) -> None:
    """`dst` = the `src` of rank `root`; elsewhere `src` is not read."""
    _check(comm, "broadcast", root)
    source, target = _pair(src, dst, 1, 1, "broadcast")
    if comm.index == root:
        _write(target, source)
    with torch.no_grad():
        collectives.broadcast_(target, root, comm)


def reduce(src: Buffer, dst: Buffer, op: str, root: int, comm: Axis) -> None:
    """`dst` on rank `root` = the reduction of every rank's `src` by `op`; not written elsewhere."""
    _check(comm, "reduce", root)
    source, target = _pair(src, dst, 1, 1, "reduce", reduces=True)
    collectives.check_op(op)
    total = source.clone()
    collectives.reduce_(total, root, "sum" if op == "avg" else op, comm)
    if comm.index == root:
        _write(target, total / comm.size if op == "avg" else total)


def send(src: Buffer, peer: int, comm: Axis) -> None:
    """Send `src` to rank `peer`, which must receive as many elements of the same dtype.

    Sending to self is possible only between groupStart and groupEnd.
    """
    batch, source = _batch("send"), _flat(src, "send")
    _check(comm, "send", peer)
    if batch.depth:
        batch.add_send(source, peer, comm)
    else:
        _check_other(comm, "send", peer)
        collectives.send(source, peer, comm)


def recv(dst: Buffer, peer: int, comm: Axis) -> None:
    """Fill `dst` with what rank `peer` sends; inside a group it is filled at groupEnd."""
    batch, target = _batch("recv"), _flat(dst, "recv")
    _check(comm, "recv", peer)
    if batch.depth:
        batch.add_receive(target, peer, comm)
    else:
        _check_other(comm, "recv", peer)
        collectives.receive_(target, peer, comm)


def groupStart() -> None:
    """Queue sends and receives until the matching groupEnd, which runs them together.

    May be nested.
    """
    _batch("groupStart").depth += 1


def groupEnd() -> None:
    """Run the sends and receives since the outermost groupStart; their order cannot deadlock."""
    batch = _batch("groupEnd")
    if batch.depth == 0:
        raise ConfigurationError("groupEnd was called without a groupStart before it.")
    batch.depth -= 1
    if batch.depth == 0:
        batch.run()


def getUniqueId() -> NoReturn:
    """Always raises RemovedError: `init_distributed` creates the groups."""
    raise RemovedError(
        "bmtrain.nccl.getUniqueId",
        "init_distributed makes all groups; they are in bmtrain.config, config['comm'] first.",
    )


def commInitRank(unique_id: bytes, world_size: int, rank: int) -> NoReturn:
    """Always raises RemovedError: `init_distributed` creates the groups."""
    raise RemovedError(
        "bmtrain.nccl.commInitRank",
        "init_distributed makes all groups; they are in bmtrain.config, config['comm'] first.",
    )


def commCount(comm: Axis) -> int:
    """Number of ranks of a communicator."""
    _check(comm, "commCount")
    return comm.size


def commRank(comm: Axis) -> int:
    """This rank's index in a communicator."""
    _check(comm, "commRank")
    return comm.index


def commDestroy(comm: Axis) -> None:
    """Only checks its argument: the run owns all communicators and closes them at its end."""
    _check(comm, "commDestroy")


def _batch(what: str) -> _Batch:
    return world.current(f"nccl.{what}").service(_Batch)


def _check(comm: Axis, what: str, peer: int = 0) -> None:
    """Raise ConfigurationError if `comm` is no communicator or `peer` is not in it."""
    if not isinstance(comm, Axis):
        raise ConfigurationError(
            f"nccl.{what} got {type(comm).__name__} as communicator: expected one of "
            "the run, bmtrain.config['comm'] for example, "
            "after init_distributed()."
        )
    if not COUNT.holds(peer) or peer >= comm.size:
        raise ConfigurationError(
            f"nccl.{what} got rank {peer!r}: expected 0 to {comm.size - 1}, a place in its "
            "communicator."
        )


def _check_other(comm: Axis, what: str, peer: int) -> None:
    if peer == comm.index:
        raise ConfigurationError(
            f"nccl.{what} got this rank itself, {peer}: expected another one; between "
            "groupStart() and groupEnd() a rank may send "
            "to itself."
        )


def _flat(buffer: Buffer, what: str) -> torch.Tensor:
    """A 1-D tensor that shares the buffer's memory."""
    if isinstance(buffer, torch.Tensor):
        if not buffer.is_contiguous():
            raise ConfigurationError(
                f"nccl.{what} got a tensor of strides {buffer.stride()}: expected a "
                "contiguous one; call .contiguous()."
            )
        return buffer.detach().view(-1)
    if isinstance(buffer, torch.UntypedStorage):
        return torch.empty(0, dtype=torch.uint8, device=buffer.device).set_(buffer)
    if isinstance(buffer, torch.TypedStorage):
        return torch.empty(0, dtype=buffer.dtype, device=buffer.device).set_(buffer)
    raise ConfigurationError(
        f"nccl.{what} got {type(buffer).__name__}: expected a tensor or a storage."
    )


def _pair(
    src: Buffer, dst: Buffer, times: int, parts: int, what: str, *, reduces: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Flat source and destination, the latter of source.numel() * times / parts elements."""
    source, target = _flat(src, what), _flat(dst, what)
    if source.dtype != target.dtype:
        raise ConfigurationError(
            f"nccl.{what} got {source.dtype} to be written to {target.dtype}: expected the "
            "same dtype."
        )
    if source.device != target.device:
        raise ConfigurationError(
            f"nccl.{what} got {source.device} to be written to {target.device}: expected "
            "the same device."
        )
    if source.numel() * times != target.numel() * parts:
        raise ConfigurationError(
            f"nccl.{what} got {source.numel()} elements and a destination of {target.numel()}: "
            f"expected {source.numel() * times / parts:g}."
        )
    if reduces and (isinstance(src, torch.UntypedStorage) or isinstance(dst, torch.UntypedStorage)):
        raise ConfigurationError(
            f"nccl.{what} got an untyped storage, whose bytes cannot be reduced: "
            "expected a tensor or typed storage."
        )
    return source, target


def _write(target: torch.Tensor, values: torch.Tensor) -> None:
    if target.data_ptr() != values.data_ptr():
        target.copy_(values)
