"""Where the ranks of a run meet: the store, a room in it of this run's own, and process groups.

A process may run, end the run and begin another, or try again after a failure. What an earlier run
left in the store would be taken for the later one's, and addresses in it lead nowhere. So rank 0
draws a name for each run and tells it to the ranks that have come for it.
"""

from __future__ import annotations

import datetime
import time
import uuid
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

Store: TypeAlias = Any  # torch declares none to type checkers
FOREVER = datetime.timedelta(days=365)


class Meetings:
    """The stores of this process.

    They are kept until it ends: the other ranks may still read what rank 0 hosts, and a second run
    meets at the same place.
    """

    def __init__(self) -> None:
        self._stores: dict[tuple[str, int, int], Store] = {}

    def meet(self, url: str, rank: int, size: int, timeout: float, job: str = "") -> Store:
        """A store that the ranks of this run share, and no other run. Collective.

        Args:
            url: of the rendezvous, as for torch.distributed.
            timeout: seconds to wait for the others, and that the store waits for a key.
            job: what the launcher calls the job. Ranks of another one that come to the same place
                wait there in vain, instead of joining this run.

        Raises:
            RuntimeError, ValueError, OSError: of torch, if they do not come in time.
        """
        limit, end = datetime.timedelta(seconds=timeout), time.monotonic() + timeout
        key = (url, rank, size)
        if key not in self._stores:
            self._stores[key], _, _ = next(rendezvous(url, rank, size, timeout=limit))
        store = self._stores[key]
        store.set_timeout(limit)
        return _own_room(room(store, f"job {job}") if job else store, rank, size, end)


def adopt(store: Store, rank: int, size: int, timeout: float) -> Store:
    """A store of this run's own inside of somebody else's, over a connection of its own.

    Collective. Theirs keeps its timeout.
    """
    end = time.monotonic() + timeout
    own = store.clone()
    own.set_timeout(datetime.timedelta(seconds=timeout))
    return _own_room(room(own, "bmtrain"), rank, size, end)


def tell_all(store: Store, subject: str, rank: int, size: int, text: str) -> list[str]:
    """What every rank says on a subject, in rank order. Collective, once for each subject."""
    store.set(f"{subject} {rank}", text)
    found = store.multi_get([f"{subject} {other}" for other in range(size)])
    return [bytes(text).decode() for text in found]


def room(store: Store, name: str) -> Store:
    """A part of a store, with keys of its own."""
    return dist.PrefixStore(name, store)  # type: ignore[attr-defined]


def _own_room(store: Store, rank: int, size: int, end: float) -> Store:
    """The room whose name rank 0 draws, once every other rank has come with a card of its own.

    Raises:
        RuntimeError: naming all ranks that have not come.
    """
    hello = [f"bmtrain has come: {other}" for other in range(size)]
    if rank:
        card = f"bmtrain invites {uuid.uuid4()}"
        store.set(hello[rank], card)
        try:
            return room(store, store.get(card).decode())
        except BaseException:
            # else rank 0 would take this attempt for the next
            if store.check([hello[rank]]) and store.get(hello[rank]).decode() == card:
                store.delete_key(hello[rank])
            raise
    cards = []
    for other in range(1, size):
        try:
            left = datetime.timedelta(seconds=max(0.001, end - time.monotonic()))
            store.wait([hello[other]], left)
        except RuntimeError as error:
            late = [str(one) for one in range(other, size) if not store.check([hello[one]])]
            if not late:
                raise
            are = f"rank {late[0]} has" if len(late) == 1 else f"ranks {', '.join(late)} have"
            raise RuntimeError(f"{are} not come") from error
        cards.append(store.get(hello[other]).decode())
        store.delete_key(hello[other])
    name = f"bmtrain {uuid.uuid4()}"
    for card in cards:
        store.set(card, name)
    return room(store, name)


class Groups:
    """Opens the process groups of a run, and closes them all.

    Args:
        backend: of the groups that name none: "gloo", or one for each kind of device; None is that
            of the default group.
        timeout: seconds that their collectives wait.
        is_adopted: whether torch's default group is somebody else's. Then it is left alone.
    """

    def __init__(self, backend: str | None, timeout: float, *, is_adopted: bool) -> None:
        self._backend, self._limit = backend, datetime.timedelta(seconds=timeout)
        self._is_adopted = is_adopted
        self._default: dist.ProcessGroup | None = dist.group.WORLD
        self._opened: list[dist.ProcessGroup] = []

    @property
    def are_alive(self) -> bool:
        """Whether the default group is still that which these stand on.

        Whoever destroys it destroys all others with it.
        """
        return dist.is_initialized() and dist.group.WORLD is self._default

    def open(
        self, ranks: Sequence[int] | None = None, backend: str | None = None
    ) -> dist.ProcessGroup:
        """A group of these ranks; None is all. Collective over the world, whoever is in it."""
        group = dist.new_group(
            None if ranks is None else list(ranks),
            timeout=self._limit,
            backend=backend or self._backend,
        )
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            self._opened.append(group)
        return group

    def close(self) -> None:
        """End what was opened, and the default group where it is ours. Safe to call twice."""
        are_alive = self.are_alive
        # Whoever keeps this must not keep their threads.
        opened, self._opened, self._default = self._opened, [], None
        if are_alive and not self._is_adopted:
            dist.destroy_process_group()
        elif are_alive:
            for group in reversed(opened):
                dist.destroy_process_group(group)
