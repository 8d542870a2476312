"""What storages are called in messages, and in what ranks compare; the phases of a step."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from bmtrain.runtime.mesh import Axis


class Phase(enum.Enum):
    """Forward passes and backward passes (with the recomputation inside them) have orders of their
    own.
    """

    FORWARD = "forward"
    BACKWARD = "backward"


class Label:
    """What a storage is called in messages, the same on all ranks.

    Args:
        number: of the storage, in the order of their creation.
        axis: the ranks that share it.
        names: of its parameters.
    """

    def __init__(self, number: int, axis: Axis, names: Sequence[str]) -> None:
        self.number, self.axis = number, axis
        self.rename(names)

    def rename(self, names: Sequence[str]) -> None:
        """The parameters have better names."""
        shown = ", ".join([*names[:3], *(["..."] if len(names) > 3 else [])])
        self.text = f"storage {self.number} ({shown})"
        self.places = {phase: f"{self.text} in the {phase.value} pass" for phase in Phase}
