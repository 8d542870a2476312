"""What ranks keep beside tensors: this rank's own, or at another number of ranks those of all."""

from __future__ import annotations

import pathlib
from typing import Any

from bmtrain.checkpoint.files import read_torch
from bmtrain.checkpoint.manifest import Manifest
from bmtrain.distributed import collectives
from bmtrain.distributed.agreement import attempt
from bmtrain.errors import CheckpointError
from bmtrain.runtime import world
from bmtrain.runtime.mesh import Axis
from bmtrain.snapshot.state import merged


def read_rest(
    path: pathlib.Path, manifest: Manifest, axis: Axis
) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """This rank's own part, None if another number of ranks wrote it, and one for optimizers.

    Collective.
    """
    names = sorted(name for name in manifest.files if name.endswith(".pt"))
    topology = world.current().mesh.topology
    sizes = {"world_size": axis.size, "tp_size": topology.tp_size, "pipe_size": topology.pipe_size}
    if manifest.world == sizes and len(names) == axis.size:
        own = attempt(lambda: _read(path / names[axis.index]), axis)
        return own, own
    whole = attempt(lambda: _all(path, names) if axis.index == 0 else None, axis)
    return None, collectives.broadcast_object(whole, 0, axis, "CheckpointManager.restore")


def _all(path: pathlib.Path, names: list[str]) -> dict[str, Any]:
    if not names:
        raise CheckpointError(f"{path} holds no rank's state.")
    parts = [_read(path / name) for name in names]
    managers = [part["optim_manager"] for part in parts]
    return {"optim_manager": None if None in managers else merged(managers)}


def _read(path: pathlib.Path) -> dict[str, Any]:
    found: dict[str, Any] = read_torch(path, mmap=False)
    if not isinstance(found, dict) or not {"random", "state", "optim_manager"} <= set(found):
        raise CheckpointError(f"cannot load {path}: it holds no state of a rank.")
    return found
