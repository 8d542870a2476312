"""The process groups of a run, and their end."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

import torch.distributed as dist


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
        if not are_alive:
            return
        if not self._is_adopted:
            dist.destroy_process_group()
            return
        for group in reversed(opened):
            dist.destroy_process_group(group)
