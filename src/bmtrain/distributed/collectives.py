"""Collectives and point-to-point transfers over an axis, of tensors and picklable objects.

Collectives are logged in the ledger. Elsewhere, only ledger.py, peers.py and transport.py call
those of torch.distributed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from bmtrain.distributed.ledger import FIRST_BYTES, Ledger
from bmtrain.errors import ConfigurationError
from bmtrain.runtime import world
from bmtrain.runtime.mesh import Axis
from bmtrain.runtime.world import World
from bmtrain.torch_internals import all_gather_flat, reduce_scatter_flat

OPS: dict[str, tuple[Any, Any]] = {
    "sum": (dist.ReduceOp.SUM, torch.sum),
    "avg": (dist.ReduceOp.AVG, torch.mean),
    "max": (dist.ReduceOp.MAX, torch.amax),
    "min": (dist.ReduceOp.MIN, torch.amin),
    "prod": (dist.ReduceOp.PRODUCT, torch.prod),
}


def check_divided(x: torch.Tensor, axis: Axis) -> None:
    """Raise ConfigurationError unless the ranks divide dim 0 of what they reduce-scatter."""
    if x.dim() == 0 or x.shape[0] % axis.size:
        raise ConfigurationError(
            f"reduce_scatter over {axis.size} ranks got shape {tuple(x.shape)}: "
            f"expected dim 0 divisible by {axis.size}."
        )


def _enter(axis: Axis, what: str, x: torch.Tensor | None = None) -> None:
    """Log the collective; RanksDivergedError on all ranks if they are known to have diverged."""
    text = what if x is None else f"{what} of {tuple(x.shape)} {x.dtype}"
    compares = x is None or x.device.type == "cpu"
    world.current().service(Ledger).enter(axis, text, compares=compares)


def _goes_along(ledger: Ledger) -> bool:
    """Whether data travel with the ledger's words: on a CPU. A compiler leaves alone what it knows
    as a collective.
    """
    return ledger.is_immediate and not torch.compiler.is_compiling()


def _enter_alone(axis: Axis, what: str) -> None:
    """Before a transfer between some ranks of an axis, which is not logged."""
    world.current().service(Ledger).refuse_traced(axis, what)


def all_gather(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Every rank's `x`, stacked: (axis.size, *x.shape)."""
    ledger = world.current().service(Ledger)
    if axis.size > 1 and _goes_along(ledger):
        return ledger.gathered(x, axis, f"all_gather of {tuple(x.shape)} {x.dtype}")
    _enter(axis, "all_gather", x)
    out = x.new_empty((axis.size, *x.shape))
    all_gather_flat(out.view(-1), x.contiguous().view(-1), group=axis.group)
    return out


def reduce_scatter(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """This rank's part of the sum of `x` (axis.size * n, ...) over ranks: (n, ...)."""
    check_divided(x, axis)
    ledger = world.current().service(Ledger)
    if axis.size > 1 and _goes_along(ledger):
        ledger.enter(axis, f"reduce_scatter of {tuple(x.shape)} {x.dtype}", compares=False)
        # A gradient may be one number in many places, which cannot be sent as it is.
        rows = x.detach().contiguous().view(axis.size, x.shape[0] // axis.size, *x.shape[1:])
        arrived = torch.empty_like(rows)
        ledger.swap(axis, rows.flatten(1), arrived.flatten(1))
        return arrived.sum(0, dtype=x.dtype)
    _enter(axis, "reduce_scatter", x)
    out = x.new_empty((x.shape[0] // axis.size, *x.shape[1:]))
    reduce_scatter_flat(
        out.view(-1), x.contiguous().view(-1), op=dist.ReduceOp.SUM, group=axis.group
    )
    return out


def all_reduce(x: torch.Tensor, op: str, axis: Axis) -> torch.Tensor:
    """A new tensor of x's shape: the reduction of every rank's `x`, by one of OPS but avg."""
    out = x.clone(memory_format=torch.contiguous_format)
    all_reduce_(out, op, axis)
    return out


def all_reduce_(x: torch.Tensor, op: str, axis: Axis) -> None:
    """All-reduce `x` in place over the axis."""
    if axis.size == 1:
        return
    ledger = world.current().service(Ledger)
    if _goes_along(ledger) and x.nbytes <= FIRST_BYTES:
        found = ledger.gathered(x, axis, f"all_reduce ({op}) of {tuple(x.shape)} {x.dtype}")
        x.detach().copy_(OPS[op][1](found, 0))
    else:
        _enter(axis, f"all_reduce ({op})", x)
        dist.all_reduce(x, op=OPS[op][0], group=axis.group)


def broadcast_(x: torch.Tensor, source: int, axis: Axis) -> None:
    """Overwrite `x` with that of the rank at index `source` of the axis."""
    if axis.size > 1:
        _enter(axis, f"broadcast from rank {axis.ranks[source]}", x)
        dist.broadcast(x, src=axis.ranks[source], group=axis.group)


def send(x: torch.Tensor, target: int, axis: Axis) -> None:
    """Send `x` to the rank at index `target` of the axis."""
    _enter_alone(axis, "a send")
    dist.send(x, dst=axis.ranks[target], group=axis.group)


def receive_(x: torch.Tensor, source: int, axis: Axis) -> None:
    """Overwrite `x` with what the rank at index `source` sends."""
    _enter_alone(axis, "a receive")
    dist.recv(x, src=axis.ranks[source], group=axis.group)


@dataclasses.dataclass(frozen=True)
class Transfer:
    """Sends or receives in flight. Holds their tensors, which must outlive the transfer."""

    tensors: Sequence[torch.Tensor]
    works: Sequence[dist.Work]

    def wait(self) -> None:
        """Order later work on the current stream (on the CPU: this thread) after the transfer."""
        for work in self.works:
            work.wait()


def start(
    sends: Sequence[tuple[torch.Tensor, int]],
    receives: Sequence[tuple[torch.Tensor, int]],
    axis: Axis,
    what: str,
) -> Transfer:
    """Start sends and receives of contiguous tensors, each with the index of the other rank.

    One batch, which cannot deadlock whatever order ranks use. Point to point: the other ranks of
    the axis do not take part. `what` it is, for messages.
    """
    _enter_alone(axis, what)
    ops = [
        dist.P2POp(op, x, axis.ranks[other], group=axis.group)
        for op, pairs in ((dist.isend, sends), (dist.irecv, receives))
        for x, other in pairs
    ]
    tensors = [x for x, _ in (*sends, *receives)]
    return Transfer(tensors, dist.batch_isend_irecv(ops) if ops else [])


def send_object(value: Any, target: int, axis: Axis) -> None:
    """Send the picklable `value` to the rank at index `target`; travels on the CPU."""
    _enter_alone(axis, "a send")
    dist.send_object_list(
        [value], dst=axis.ranks[target], group=axis.group, device=torch.device("cpu")
    )


def receive_object(source: int, axis: Axis) -> Any:
    """Receive what the rank at index `source` sends by `send_object`."""
    _enter_alone(axis, "a receive")
    box: list[Any] = [None]
    dist.recv_object_list(box, src=axis.ranks[source], group=axis.group, device=torch.device("cpu"))
    return box[0]


def exchange(
    sends: Sequence[tuple[torch.Tensor, int]],
    receives: Sequence[tuple[torch.Tensor, int]],
    axis: Axis,
) -> None:
    """Run all sends and receives as one batch."""
    start(sends, receives, axis, "an exchange").wait()


def all_gather_rows(x: torch.Tensor, counts: Sequence[int], axis: Axis) -> torch.Tensor:
    """Every rank's `x` (n, ...), one after the other; `counts` are their numbers of rows."""
    padded = x.new_zeros((max(counts), *x.shape[1:]))
    if padded.numel() == 0:
        return x.new_empty((sum(counts), *x.shape[1:]))
    padded[: x.shape[0]] = x
    # Sent as bytes: not every backend supports every dtype.
    sent = all_gather(padded.contiguous().view(-1).view(torch.uint8), axis)
    parts = sent.view(x.dtype).view(axis.size, *padded.shape)
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


def gather_objects(value: Any, axis: Axis, what: str) -> list[Any]:
    """Every rank's picklable `value`, in rank order; travels on the CPU.

    `what` it is for: ranks that have diverged must not take one exchange for another.
    """
    if axis.size == 1:
        return [value]
    ledger = world.current().service(Ledger)
    own = bytearray(pickle.dumps(value))
    # The first exchange has room for most values, and says how long the others are.
    first = bytearray(len(own).to_bytes(8, "little") + own).ljust(FIRST_BYTES, b"\0")
    firsts = _gathered_bytes(first[:FIRST_BYTES], ledger, axis, what)
    sizes = [int.from_bytes(data[:8], "little") for data in firsts]
    rests, most = [b""] * axis.size, max(sizes) + 8 - FIRST_BYTES
    if most > 0:
        rest = own[FIRST_BYTES - 8 :].ljust(most, b"\0")
        rests = _gathered_bytes(rest, ledger, axis, what)
    parts = zip(sizes, firsts, rests, strict=True)
    return [pickle.loads((first[8:] + rest)[:size]) for size, first, rest in parts]


def _gathered_bytes(own: bytearray, ledger: Ledger, axis: Axis, what: str) -> list[bytes]:
    """Every rank's `own`, as long on each."""
    sent = torch.frombuffer(own, dtype=torch.uint8)
    return [bytes(x.numpy()) for x in ledger.gathered(sent, axis, f"exchange for {what}")]


def broadcast_object(value: Any, source: int, axis: Axis, what: str) -> Any:
    """The picklable `value` of the rank at index `source`; travels on the CPU. `what` it is for."""
    box = [value]
    if axis.size > 1:
        _enter(axis, f"broadcast from rank {axis.ranks[source]} for {what}")
        with world.current().service(Ledger).naming_lost_ranks(axis):
            dist.broadcast_object_list(
                box, src=axis.ranks[source], group=axis.group, device=torch.device("cpu")
            )
    return box[0]


def barrier(axis: Axis) -> None:
    """Block the host until every rank of the axis has arrived: a comparison waits for all."""
    _enter(axis, "barrier")


class Board:
    """Brings messages to rank 0 over connections of its own. Its construction is collective.

    Threads must not use the groups of the training: their collectives would meet those of the main
    thread. Nor do they use the run's store, which may live in torchrun: a checkpoint must be
    finished after torchrun has been killed.

    All ranks gather in the same order, and the groups stay until they have: see `World.at_end`.
    """

    def __init__(self, world: World) -> None:
        self._rank, self._size, self._timeout = world.rank, world.world_size, world.timeout
        self._group = world.groups.open(backend="gloo") if self._size > 1 else None

    def gather(self, text: str, step: Callable[[list[str]], None]) -> None:
        """Call `step` on rank 0 with the messages of all ranks, in their order.

        Returns on every rank once that has returned: when one of them ends, its launcher ends the
        others, and rank 0 would not come to the end of the step.

        Raises:
            TimeoutError: if a rank has ended, or leaves none within the run's `timeout`.
        """
        if self._group is None:
            step([text])
            return
        found: list[str] | None = [""] * self._size if self._rank == 0 else None
        try:
            dist.gather_object(text, found, dst=0, group=self._group)
        except RuntimeError as error:
            raise TimeoutError(
                f"a rank has ended, or has not answered within {self._timeout:g} s"
            ) from error
        try:
            if found is not None:
                step(found)
        finally:
            with contextlib.suppress(RuntimeError):  # one that has ended has its part there
                dist.broadcast(torch.zeros(1, device="cpu"), 0, self._group)
