"""Checkpoints as versions before 2.1 wrote them: to be read, not written.

model.pt       the model, without frozen parameters that the base still has
base.json      where those come from, and a checksum of each
optimizer.pt   optimizer, learning-rate schedule and loss scale, as whole tensors
random-*.pt    random states, one file per rank
run.json       the step, how far the data have been read, and what the run was made with
"""

from __future__ import annotations

import pathlib
from typing import Any

import bmtrain as bmt
from bmtrain.checkpoint.files import is_there, read_object, read_torch
from bmtrain.checkpoint.folder import complete
from bmtrain.distributed.agreement import attempt, everyone
from bmtrain.errors import CheckpointError
from bmtrain.runtime.seeding import set_random_states

MODEL_FILE, RUN_FILE = "model.pt", "run.json"
OF_THE_CHECKPOINT = ("world_size", "made_with")  # what run.json holds beside the progress


def is_old(checkpoint: pathlib.Path) -> bool:
    """Whether a checkpoint is of this kind."""
    return is_there(checkpoint / RUN_FILE)


def latest(folder: pathlib.Path, before: int | None) -> pathlib.Path | None:
    """The newest one in a folder, of an earlier step than `before`."""
    return next(reversed(complete(folder, before, RUN_FILE)), None)


def read_facts(checkpoint: pathlib.Path) -> dict[str, Any]:
    """The progress, what the run was made with, and the base of the model.

    Raises:
        CheckpointError: if a file is damaged.
    """
    try:
        run = read_object(checkpoint / RUN_FILE)
        progress = {name: value for name, value in run.items() if name not in OF_THE_CHECKPOINT}
        facts = {"progress": progress, "made_with": dict(run["made_with"])}
        if (checkpoint / "base.json").exists():
            facts["base"] = read_object(checkpoint / "base.json")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"the checkpoint {checkpoint} is damaged ({type(error).__name__}: {error})."
        ) from error
    return facts


def load_state(checkpoint: pathlib.Path, optim_manager: bmt.optim.OptimManager) -> dict[str, Any]:
    """Put back optimizers, schedules, scale and random states; returns the progress. Collective."""
    # MappedSource, not read: the ranks of one machine share the pages.
    state = attempt(lambda: _read(checkpoint / "optimizer.pt", mmap=True), everyone())
    optim_manager.load_state_dict(state)
    own = checkpoint / f"random-{bmt.rank()}-of-{bmt.world_size()}.pt"
    random = attempt(lambda: _read(own) if own.exists() else None, everyone())
    if random is not None:
        set_random_states(random, bmt.device())
    progress: dict[str, Any] = read_facts(checkpoint)["progress"]
    return progress


def _read(path: pathlib.Path, *, mmap: bool = False) -> dict[str, Any]:
    found: dict[str, Any] = read_torch(path, mmap=mmap)
    if not isinstance(found, dict):
        raise CheckpointError(f"cannot load {path}: it holds a {type(found).__name__}.")
    return found
