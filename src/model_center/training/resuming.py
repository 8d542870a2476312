"""Going on from a checkpoint of a run, of this version or an earlier one."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

import bmtrain as bmt
from bmtrain.checkpoint.manager import restore_from
from bmtrain.checkpoint.shards import read_manifest
from model_center.errors import ResumeError
from model_center.training import old_checkpoints

# What runs were made with before they said so: Adam's states had one form.
_UNSAID = {"moments": "fp32", "master_weights": "fp32"}


def read_facts(checkpoint: pathlib.Path) -> dict[str, Any]:
    """The `progress` and `made_with` of a checkpoint, and the `base` of its model.

    Raises:
        CheckpointError: if it is damaged.
    """
    if old_checkpoints.is_old(checkpoint):
        return old_checkpoints.read_facts(checkpoint)
    return read_manifest(checkpoint).facts


def model_path(checkpoint: pathlib.Path) -> pathlib.Path:
    """What `bmt.load` reads the model's weights from."""
    if old_checkpoints.is_old(checkpoint):
        return checkpoint / old_checkpoints.MODEL_FILE
    return checkpoint


def check_same_run(
    checkpoint: pathlib.Path,
    made_with: Mapping[str, Any],
    remedy: str = "give the same arguments to resume, or another folder",
) -> None:
    """Compare this run with the one that wrote the checkpoint.

    Raises:
        ResumeError: naming all that differs, and the remedy.
    """
    before, now = {**_UNSAID, **read_facts(checkpoint)["made_with"]}, {**_UNSAID, **made_with}
    names = sorted({*before, *now})
    differing = [
        _difference(name, before, now) for name in names if before.get(name) != now.get(name)
    ]
    if differing:
        raise ResumeError(
            f"{checkpoint} belongs to another run: {'; '.join(differing)}. Remedy: {remedy}."
        )


def _difference(name: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    if name == "weights" and name in before and name in now:  # digests, which tell a reader nothing
        return "weights have other names or shapes (another model, or adapters on one side only)"
    return f"{name} was {before.get(name)} and is {now.get(name)}"


def load_state(
    checkpoint: pathlib.Path, optim_manager: bmt.optim.OptimManager
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Put back all but the model: optimizers, schedules, scale, random states. Collective.

    Returns the progress that the checkpoint was saved with, and this rank's state. On another
    number of ranks the random states stay as they are, and there is no state of a rank.
    """
    if old_checkpoints.is_old(checkpoint):
        return old_checkpoints.load_state(checkpoint, optim_manager), None
    restored = restore_from(checkpoint, None, optim_manager)
    return restored.facts["progress"], restored.state
