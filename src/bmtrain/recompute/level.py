"""Levels of recomputation: what a block keeps from forward to backward."""

from __future__ import annotations

import enum

from bmtrain.errors import ConfigurationError

AUTO = "auto"


class Level(enum.Enum):
    """What a block keeps from forward to backward. Later levels keep less and compute more."""

    #: everything that backward reads
    NOTHING = "nothing"
    #: results of matmuls, convolutions and attention; norms, activations, dropout and casts are
    #: nearly free to recompute
    CHEAP = "norms and activations"
    #: the inputs of the block; costs one more forward pass
    BLOCK = "everything"
    #: nothing on the device: like BLOCK, with the inputs in pinned host memory until backward
    OFFLOADED = "everything (inputs on the host)"

    def is_whole(self) -> bool:
        """Whether the whole block is recomputed."""
        return self in (Level.BLOCK, Level.OFFLOADED)


def level_of(use_checkpoint: bool | str | Level) -> Level | None:
    """The level that `use_checkpoint` asks for; None for "auto", which lets the planner choose.

    Raises:
        ConfigurationError: for anything but a bool (or 1 and 0), a Level and "auto".
    """
    if use_checkpoint == AUTO:
        return None
    if isinstance(use_checkpoint, Level):
        return use_checkpoint
    if use_checkpoint in (True, False):  # also 1 and 0, which programs write
        return Level.BLOCK if use_checkpoint else Level.NOTHING
    raise ConfigurationError(
        f"use_checkpoint is {use_checkpoint!r}: expected True (recompute the block), "
        'False (keep everything) or "auto" (recompute '
        "what does not fit)."
    )
