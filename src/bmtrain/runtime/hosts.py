"""Which host a process runs on."""

from __future__ import annotations

import pathlib
import platform
from collections.abc import Sequence


def this_host() -> tuple[str, str]:
    """This process's container and kernel boot id ("" if unknown).

    Processes can map each other's memory only if these are equal.
    """
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id")
    return platform.node(), boot.read_text() if boot.exists() else ""


def local_places(hosts: Sequence[object]) -> list[tuple[int, int]]:
    """Local rank and local size of every rank, by the hosts of the ranks in their order."""
    before: dict[object, int] = {}
    numbers = []
    for host in hosts:
        numbers.append(before.get(host, 0))
        before[host] = numbers[-1] + 1
    return [(number, before[host]) for number, host in zip(numbers, hosts, strict=True)]
