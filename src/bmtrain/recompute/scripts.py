"""Detects whether TorchScript has run.

Its executor rewrites a function after the first calls, which then saves different tensors.
"""

from __future__ import annotations

from typing import Any

import torch

from bmtrain.runtime.world import World
from bmtrain.torch_internals import last_script_graph

_NUM_WARM = 4  # calls after which the executor keeps the same graph


class Scripts:
    """Counts sightings of TorchScript on this rank. One per run, from `world.service(Scripts)`.

    TorchScript only tells which graph ran last.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Scripts:
        """Itself: a copy of a block belongs to the same run."""
        return self

    def __init__(self, world: World) -> None:
        self._idle: Any = None  # compiled on the first sighting
        self._graph: Any = None
        self._count = 0

    def count(self) -> int:
        """A counter that grows if TorchScript has run on this thread since the last call."""
        last = last_script_graph()
        if last is not None and last is not self._graph:
            self._count += 1
            self._run_idle()
        return self._count

    def _run_idle(self) -> None:
        """Run a no-op, so that a second call of the same function shows as another last graph."""
        if self._idle is None:
            self._idle = torch.jit.CompilationUnit("def idle():\n    return\n").idle
            for _ in range(_NUM_WARM):
                self._idle()
        self._idle()
        self._graph = last_script_graph()
