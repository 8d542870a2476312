"""Messages between the threads of ranks that work beside the training."""

from __future__ import annotations

import torch.distributed as dist

from bmtrain.runtime.world import World


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

    def gather(self, text: str) -> list[str]:
        """The messages of all ranks, in their order, on rank 0; elsewhere none.

        Raises:
            TimeoutError: if a rank has ended, or leaves none within the run's `timeout`.
        """
        if self._group is None:
            return [text]
        found: list[str] | None = [""] * self._size if self._rank == 0 else None
        try:
            dist.gather_object(text, found, dst=0, group=self._group)
        except RuntimeError as error:
            raise TimeoutError(
                f"a rank has ended, or has given no word within {self._timeout:g} s"
            ) from error
        return found or []
