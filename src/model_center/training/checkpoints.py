"""Checkpoints of a run: what `bmt.CheckpointManager` keeps, and how far the program has come.

Those of earlier versions are read too: see `old_checkpoints`.
"""

from __future__ import annotations

import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

import torch

import bmtrain as bmt
from bmtrain.checkpoint import Writing
from bmtrain.checkpoint.folder import step_of, usable
from bmtrain.distributed.agreement import attempt, everyone
from model_center.training import old_checkpoints
from model_center.training.base_weights import BaseWeights


class Checkpoints:
    """The checkpoints in one folder, which belongs to this run until `close`. Collective.

    Args:
        folder: made if it is not there.
        keep: how many to keep.
        keep_every: also keep those whose step is a multiple of this.
        background: whether `save` returns before the files are written.

    Raises:
        CheckpointError: on every rank, if another run owns the folder, or it cannot be used.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        keep: int = 2,
        keep_every: int | None = None,
        background: bool = True,
    ) -> None:
        self.folder = folder
        self._manager = bmt.CheckpointManager(
            folder, keep=keep, keep_every=keep_every, background=background
        )

    def latest(self, before: int | None = None) -> pathlib.Path | None:
        """The newest checkpoint that is whole; None where there is none. Collective.

        Args:
            before: only those of an earlier step than this count.
        """
        found = self._manager.latest(before)
        old = attempt(lambda: old_checkpoints.latest(self.folder, before), everyone())
        return max((path for path in (found, old) if path is not None), default=None)

    def usable(self) -> list[int]:
        """The steps of those whose files are there, in order, as this rank sees them."""
        return [step for path in usable(self.folder) if (step := step_of(path)) is not None]

    def clear(self) -> None:
        """Delete all checkpoints here. Collective."""
        self._manager.wait()
        attempt(self._clear, everyone())

    def _clear(self) -> None:
        if bmt.rank() == 0:
            for path in self.folder.glob("step-*"):
                shutil.rmtree(path)

    def save(
        self,
        progress: Mapping[str, Any],
        model: torch.nn.Module | BaseWeights,
        optim_manager: bmt.optim.OptimManager,
        made_with: Mapping[str, Any],
        state: Mapping[str, Any] | None = None,
    ) -> Writing:
        """Save the run; the earlier checkpoints stay valid until this one is complete. Collective.

        Args:
            progress: `step`, the number of optimizer steps done, and what else says how far the run
                has come; values as in JSON.
            model: sharded or not; or the base of one, to hold what is trained on it alone.
            optim_manager: with all optimizers and schedules of the run.
            made_with: what another run must have in common to go on from here (`check_same_run`);
                values as in JSON.
            state: of this rank: see `bmt.CheckpointManager.save`.

        Raises:
            CheckpointError: on every rank, if the files cannot be written on one of them.
        """
        facts: dict[str, Any] = {"progress": dict(progress), "made_with": dict(made_with)}
        only = None
        if isinstance(model, BaseWeights):
            facts["base"], only = model.split()
            model = model.model
        return self._manager.save(
            progress["step"], model, optim_manager, facts=facts, state=state, only=only
        )

    def close(self) -> None:
        """Wait for the last checkpoint, and let another run have the folder. Collective."""
        self._manager.close()

    def abandon(self) -> None:
        """Let another run have the folder; nothing is waited for, as ranks may have parted."""
        self._manager.release()
