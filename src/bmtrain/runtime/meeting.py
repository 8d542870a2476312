"""Where the ranks of a run find each other: the store, and a room in it of this run's own.

A process may run, end the run and begin another, or try again after a failure. What an earlier run
left in the store would be taken for the later one's, and addresses in it lead nowhere. So rank 0
draws a name for each run and tells it to the ranks that have come for it.
"""

from __future__ import annotations

import datetime
import time
import uuid
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
        limit = datetime.timedelta(seconds=timeout)
        key = (url, rank, size)
        end = time.monotonic() + timeout
        if key not in self._stores:
            self._stores[key], _, _ = next(rendezvous(url, rank, size, timeout=limit))
        store = self._stores[key]
        store.set_timeout(limit)
        return _own_room(_room(store, f"job {job}") if job else store, rank, size, end)


def adopt(store: Store, rank: int, size: int, timeout: float) -> Store:
    """A store of this run's own inside of somebody else's, over a connection of its own.

    Collective. Theirs keeps its timeout.
    """
    end = time.monotonic() + timeout
    own = own_connection(store)
    own.set_timeout(datetime.timedelta(seconds=timeout))
    return _own_room(_room(own, "bmtrain"), rank, size, end)


def tell_all(store: Store, subject: str, rank: int, size: int, text: str) -> list[str]:
    """What every rank says on a subject, in rank order. Collective, once for each subject."""
    store.set(f"{subject} {rank}", text)
    found = store.multi_get([f"{subject} {other}" for other in range(size)])
    return [bytes(text).decode() for text in found]


def _room(store: Store, name: str) -> Store:
    return dist.PrefixStore(name, store)  # type: ignore[attr-defined]


def _own_room(store: Store, rank: int, size: int, end: float) -> Store:
    return _room(store, _host(store, size, end) if rank == 0 else _guest(store, rank))


def _host(store: Store, size: int, end: float) -> str:
    """Wait for every other rank, then tell all of them a new name."""
    cards = []
    for rank in range(1, size):
        left = datetime.timedelta(seconds=max(0.001, end - time.monotonic()))
        _await(store, rank, size, left)
        cards.append(store.get(_hello(rank)).decode())
        store.delete_key(_hello(rank))
    name = f"bmtrain {uuid.uuid4()}"
    for card in cards:
        store.set(card, name)
    return name


def _await(store: Store, rank: int, size: int, left: datetime.timedelta) -> None:
    """Wait for a rank; a RuntimeError names all that have not come."""
    try:
        store.wait([_hello(rank)], left)
    except RuntimeError as error:
        late = [str(one) for one in range(rank, size) if not store.check([_hello(one)])]
        if not late:
            raise
        are = f"rank {late[0]} has" if len(late) == 1 else f"ranks {', '.join(late)} have"
        raise RuntimeError(f"{are} not come") from error


def _guest(store: Store, rank: int) -> str:
    """Come with a card of one's own, and wait for the name."""
    card = f"bmtrain invites {uuid.uuid4()}"
    store.set(_hello(rank), card)
    try:
        return store.get(card).decode()
    except BaseException:
        # else rank 0 would take this attempt for the next
        if store.check([_hello(rank)]) and store.get(_hello(rank)).decode() == card:
            store.delete_key(_hello(rank))
        raise


def _hello(rank: int) -> str:
    return f"bmtrain has come: {rank}"


def own_connection(store: Store) -> Store:
    """A second connection to a store.

    A thread that waits in the first one would keep the others from using it.
    """
    return store.clone()
