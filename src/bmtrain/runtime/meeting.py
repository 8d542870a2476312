"""Where the ranks of a run meet: the store, a room in it of this run's own, and process groups.

A process may run, end the run and begin another, or try again after a failure. What an earlier run
left in the store would be taken for the later one's, and addresses in it lead nowhere. So rank 0
draws a name for each run and tells it to the ranks that have come for it.
"""

from __future__ import annotations

import datetime
import ipaddress
import socket
import threading
import time
import urllib.parse
import uuid
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from bmtrain.runtime.process import say

Store: TypeAlias = Any  # torch declares none to type checkers
PAUSE_S = 0.05
NAME_S = 1.0  # for a name server that has no answer now, and for a port that is becoming free
WORD_S = 35.0  # of waiting for a rank to join, until that is said
_IN_VAIN = "in vain: "
FOREVER = datetime.timedelta(days=365)


def meet(
    stores: dict[str, Store],
    url: str,
    rank: int,
    size: int,
    timeout: float,
    job: str = "",
    *,
    is_hosted: bool = True,
    is_local: bool = False,
) -> Store:
    """A store that the ranks of this run share, and no other run. Collective.

    Args:
        stores: of this process, which are kept until it ends: the other ranks may still read what
            rank 0 hosts, and a second run meets at the same place.
        url: of the rendezvous, as for torch.distributed.
        timeout: seconds to wait for the others, and that the store waits for a key.
        job: what the launcher calls the job. Ranks of another one that come to the same place wait
            there in vain, instead of joining this run.
        is_hosted: whether rank 0 hosts the store, and not torchrun.
        is_local: whether all ranks are on this host: nobody else can reach what rank 0 hosts then,
            where the address is a loopback one.

    Raises:
        RuntimeError, ValueError, OSError: if they do not come in time, saying why.
    """
    key, end = f"{url} {rank} {size}", time.monotonic() + timeout
    if key not in stores:
        stores[key] = _in_time(lambda: _opened(url, rank, size, end, is_hosted, is_local), url, end)
    stores[key].set_timeout(datetime.timedelta(seconds=timeout))
    return _own_room(room(stores[key], f"job {job}"), rank, size, end)


def _in_time(step: Callable[[], Store], url: str, end: float) -> Store:
    """What a step of torch's gives, which may wait for ever for what a stranger does not say."""
    found: list[Store] = []
    errors: list[Exception] = []

    def attempt() -> None:
        try:
            found.append(step())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=attempt, name="rendezvous", daemon=True)
    thread.start()
    thread.join(max(1.0, end + 1.0 - time.monotonic()))  # to say why at its end
    if errors:
        raise errors[0]
    if not found:
        raise RuntimeError(
            f"{url} accepts connections but does not answer: does another program use it?"
        )
    return found[0]


def _opened(url: str, rank: int, size: int, end: float, is_hosted: bool, is_local: bool) -> Store:
    place, begin = urllib.parse.urlparse(url), time.monotonic()
    host, port, is_host = place.hostname, place.port or 0, is_hosted and rank == 0
    limit = datetime.timedelta(seconds=end - begin)
    listener: int | None = None
    if place.scheme != "tcp" or not host:
        return next(rendezvous(url, rank, size, timeout=limit))[0]
    # torch waits up to twice as long for a name or a port, and a thread that comes back from there
    # while the interpreter ends aborts the process
    while True:
        try:
            family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            if not is_host:
                socket.create_connection((host, port), max(end - time.monotonic(), 0.1)).close()
            elif is_local and ipaddress.ip_address(address[0]).is_loopback:
                listener = socket.create_server(address[:2], family=family, backlog=size).detach()
            break
        except OSError as error:
            is_lasting = is_host or isinstance(error, socket.gaierror)
            if time.monotonic() > (begin + NAME_S if is_lasting else end):
                more = "" if is_lasting else ": rank 0 has not come, or has another address"
                raise OSError(f"{host}: {error.strerror or error}{more}") from error
        time.sleep(PAUSE_S)
    return dist.TCPStore(  # type: ignore[attr-defined]
        host,
        port,
        size,
        is_master=is_host,
        timeout=limit / 2,
        wait_for_workers=False,  # `_own_room` says who has not come
        multi_tenant=True,
        master_listen_fd=listener,
    )


def adopt(store: Store, rank: int, size: int, timeout: float) -> Store:
    """A store of this run's own inside of somebody else's, over a connection of its own.

    Collective. Theirs keeps its timeout.
    """
    own = store.clone()
    own.set_timeout(datetime.timedelta(seconds=timeout))
    return _own_room(room(own, "bmtrain"), rank, size, time.monotonic() + timeout)


def tell_all(store: Store, subject: str, rank: int, size: int, text: str) -> list[str]:
    """What every rank says on a subject, in rank order. Collective, once for each subject."""
    keys = [f"{subject} {other}" for other in range(size)]
    store.set(keys[rank], text)
    try:
        return [bytes(text).decode() for text in store.multi_get(keys)]
    except RuntimeError as error:
        late = [f"rank {other}" for other, key in enumerate(keys) if not store.check([key])]
        raise RuntimeError(f"{' and '.join(late)} does not answer any more") from error


def room(store: Store, name: str) -> Store:
    """A part of a store, with keys of its own."""
    return dist.PrefixStore(name, store)  # type: ignore[attr-defined]


def _own_room(store: Store, rank: int, size: int, end: float) -> Store:
    """The room whose name rank 0 draws, once every other rank has come with a card of its own.

    Raises:
        RuntimeError: naming all ranks that have not come, or numbers of ranks that differ.
    """
    hello = [f"bmtrain has come: {other}" for other in range(size)]
    if rank:
        card = f"bmtrain invites {uuid.uuid4()} of {size}"
        store.set(hello[rank], card)
        try:
            # rank 0, whose time ends later where it was started later, says who is missing
            if not _comes(store, card, 0, end + 3 * NAME_S):
                raise RuntimeError("rank 0 has not arrived")
            answer = store.get(card).decode()
        except BaseException:
            # else rank 0 would take this attempt for the next
            if store.check([hello[rank]]) and store.get(hello[rank]).decode() == card:
                store.delete_key(hello[rank])
            raise
        why = answer.partition(_IN_VAIN)[2]
        if why:
            store.delete_key(card)  # it is read
            raise RuntimeError(why)
        return room(store, answer)
    cards, late = [], []
    for other in range(1, size):
        if _comes(store, hello[other], other, end):
            cards.append(store.get(hello[other]).decode())
            store.delete_key(hello[other])
        else:
            late.append(f"rank {other}")
    sizes = sorted({str(size), *(card.rpartition(" ")[2] for card in cards)})
    why = f"{' and '.join(late)} has not come" if late else ""
    if len(sizes) > 1:
        why = f"ranks differ in their number of ranks ({', '.join(sizes)})"
    answer = f"{_IN_VAIN}{why}" if why else f"bmtrain {uuid.uuid4()}"
    for card in cards:
        store.set(card, answer)
    if why:
        # Without this wait the store would be gone with this process before the others have read.
        end = time.monotonic() + NAME_S
        while any(store.check([card]) for card in cards) and time.monotonic() < end:
            time.sleep(PAUSE_S)
        raise RuntimeError(why)
    return room(store, answer)


def _comes(store: Store, key: str, other: int, end: float) -> bool:
    """Whether a rank leaves a key in time; it is said once that it takes long."""
    word = time.monotonic() + WORD_S
    while not store.check([key]):  # to wait for it would have torch print a stack
        if time.monotonic() > end:
            return False
        if time.monotonic() > word:
            say(f"rank {other} has not reached init_distributed for {WORD_S:.0f} s.\n")
            word = end
        time.sleep(PAUSE_S)
    return True


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
            ranks and list(ranks), timeout=self._limit, backend=backend or self._backend
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
