"""Reading and writing as one: what fails on one rank becomes the same error on every other."""

from __future__ import annotations

from bmtrain.distributed.agreement import agree, attempt
from bmtrain.runtime import world
from bmtrain.runtime.mesh import Axis

__all__ = ["agree", "attempt", "everyone"]


def everyone() -> Axis | None:
    """All ranks of the run; None before `init_distributed`, where there is nobody to agree with."""
    return world.current().mesh.world if world.is_initialized() else None
