"""Time and bandwidth of the collectives that training uses, by message size, from 1 KiB up."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from functools import partial

import torch

from bmtrain.distributed import collectives
from bmtrain.distributed.results import synchronize
from bmtrain.distributed.transport import gather_shards, reduce_shards
from bmtrain.errors import ConfigurationError
from bmtrain.runtime import world
from bmtrain.runtime.log import aligned
from bmtrain.runtime.mesh import Axis

__all__ = ["Row", "all_gather", "reduce_scatter", "send_recv"]

MIN_SIZE = 1024
WARM_UPS = 2
BUDGET_S = 0.2  # target time per message size; at least one call is measured
MAX_CALLS = 50


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table.

    Attributes:
        size: bytes of the full message: the output of an all-gather, the input of a reduce-scatter,
            the message of a send. The buffer is rounded down to a multiple of the world size.
        seconds: the mean time of one call, on the slowest rank.
        bandwidth: bytes per second that each rank sends and receives, the load on the links: size *
            (ranks - 1) / ranks per call for the collectives, size for a send.
    """

    size: int
    seconds: float
    bandwidth: float


def all_gather(max_size: int | None = None) -> list[Row]:
    """Measure all-gathers by size, print the table on rank 0 and return it. Collective.

    Args:
        max_size: bytes of the largest full buffer; by default 1 GiB on a GPU, 16 MiB on a CPU.

    Raises:
        ConfigurationError: for a `max_size` below 1 KiB.
    """
    return _measure("all_gather", max_size)


def reduce_scatter(max_size: int | None = None) -> list[Row]:
    """Measure reduce-scatters by size. Collective.

    `max_size` and errors are those of `all_gather`.
    """
    return _measure("reduce_scatter", max_size)


def send_recv(max_size: int | None = None) -> list[Row]:
    """Measure sends of every rank to the next one in a ring. Collective.

    `max_size` and errors are those of `all_gather`. With a world size of 1 the table is empty.
    """
    return _measure("send_recv", max_size)


def _measure(what: str, max_size: int | None) -> list[Row]:
    current = world.current(f"benchmark.{what}")
    axis, device = current.mesh.world, current.device
    limit = max_size if max_size is not None else (2**24 if device.type == "cpu" else 2**30)
    if limit < MIN_SIZE:
        raise ConfigurationError(
            f"benchmark.{what} got max_size={limit} bytes: expected at least {MIN_SIZE}."
        )
    rows, size, is_send = [], MIN_SIZE, what == "send_recv"
    share = 1.0 if is_send else (axis.size - 1) / axis.size
    following, previous = (axis.index + 1) % axis.size, (axis.index - 1) % axis.size
    while size <= limit and not (is_send and axis.size == 1):
        numel = size // torch.float16.itemsize
        parts = 1 if is_send else axis.size
        own = torch.zeros(numel // parts, dtype=torch.float16, device=device)
        full = own.repeat(parts)
        calls: dict[str, Callable[[], None]] = {
            "all_gather": partial(gather_shards, [full], [own], axis),
            "reduce_scatter": partial(reduce_shards, [own], [full], axis),
            "send_recv": partial(
                collectives.exchange, [(own, following)], [(full, previous)], axis
            ),
        }
        seconds = _time(calls[what], axis)
        rows.append(Row(size=size, seconds=seconds, bandwidth=size * share / seconds))
        size *= 2
    if current.rank == 0:
        lines = [("size", "time", "bandwidth")]
        for row in rows:
            speed = f"{row.bandwidth / 1e9:,.3f} GB/s"
            lines.append((format_size(row.size), f"{row.seconds * 1e6:,.1f} us", speed))
        print(f"{what}, {axis.size} ranks", aligned(lines), sep="\n")
    return rows


def _time(call: Callable[[], None], axis: Axis) -> float:
    """Seconds of one call on the slowest rank."""

    def seconds_of(calls: int) -> float:
        synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        device = world.current("benchmark").device
        if device.type != "cpu":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - begin) / calls

    for _ in range(WARM_UPS):
        single = seconds_of(1)
    # Agree on one time, and thereby on one number of calls: otherwise a rank that makes more calls
    # than the others would hang in its last collective.
    single = max(collectives.gather_objects(single, axis, "a time"))
    calls = min(max(int(BUDGET_S / max(single, 1e-9)), 1), MAX_CALLS)
    return max(*collectives.gather_objects(seconds_of(calls), axis, "a time"), 1e-9)


def format_size(x: int) -> str:
    """Bytes in the largest unit of which there is a whole number at least."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if x < 1024 or unit == "GiB":
            break
        x //= 1024
    return f"{x} {unit}"
