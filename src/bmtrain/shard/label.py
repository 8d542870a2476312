"""Names of storages in messages and in the ledger; the phases of a step."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from bmtrain.runtime.mesh import Axis


class Phase(enum.Enum):
    """Forward and backward (with its recomputation) each have their own order of gathers."""

    FORWARD = "forward"
    BACKWARD = "backward"


class Label:
    """The name of a storage in messages, the same on all ranks.

    Args:
        number: of the storage, in order of creation.
        axis: the ranks that share it.
        names: of its parameters.
    """

    def __init__(self, number: int, axis: Axis, names: Sequence[str]) -> None:
        self.number, self.axis = number, axis
        self.rename(names)

    def rename(self, names: Sequence[str]) -> None:
        """Set the names of the parameters."""
        shown = ", ".join([*names[:3], *(["..."] if len(names) > 3 else [])])
        self.text = f"storage {self.number} ({shown})"
        self.places = {phase: f"{self.text} in the {phase.value} pass" for phase in Phase}
