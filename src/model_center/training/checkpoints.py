"""Checkpoints of a run: complete or absent, for any number of ranks.

A checkpoint is a folder `step-00000100` with

    model.pt       the model, by bmt.save, without frozen parameters that the base still has
    base.json      where those come from, and a checksum of each
    optimizer.pt   optimizer, learning-rate schedule and loss scale, as whole tensors: it fits any
                   number of ranks
    random-*.pt    random states, one file per rank
    run.json       the step, how far the data have been read, and what the run was made with

It is written under another name, brought to the disk, and renamed; only then the pointer file
`latest` is replaced. All ranks must see the folder.
"""

from __future__ import annotations

import json
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

import torch

import bmtrain as bmt
from bmtrain.distributed.agreement import attempt, everyone
from model_center.errors import ResumeError
from model_center.training.base_weights import MODEL_FILE, BaseWeights
from model_center.training.files import PARTIAL, to_disk, write_whole
from model_center.training.random_states import random_states, set_random_states

POINTER = "latest"
OF_THE_CHECKPOINT = ("world_size", "made_with")  # what run.json holds beside the progress


class Checkpoints:
    """The checkpoints in one folder, of which the last `keep` are kept."""

    def __init__(self, folder: pathlib.Path, keep: int = 2) -> None:
        self.folder = folder
        self.keep = keep

    def latest(self) -> pathlib.Path | None:
        """The newest complete checkpoint; None where there is none."""
        pointer = self.folder / POINTER
        if pointer.exists():
            target = self.folder / pointer.read_text(encoding="utf-8").strip()
            if (target / "run.json").exists():
                return target
        complete = self._complete()
        return complete[-1] if complete else None

    def clear(self) -> None:
        """Delete all checkpoints here. Collective."""
        if bmt.rank() == 0:
            (self.folder / POINTER).unlink(missing_ok=True)
            for path in self.folder.glob("step-*"):
                shutil.rmtree(path)
        bmt.synchronize()

    def save(
        self,
        progress: Mapping[str, Any],
        model: torch.nn.Module | BaseWeights,
        optim_manager: bmt.optim.OptimManager,
        made_with: Mapping[str, Any],
    ) -> pathlib.Path:
        """Write a checkpoint; the earlier ones stay valid until it is complete. Collective.

        Args:
            progress: `step`, the number of optimizer steps done, and what else says how far the run
                has come; values as in JSON.
            model: sharded or not; or the base of one, to hold what is trained on it alone.
            optim_manager: with all optimizers and schedules of the run.
            made_with: what another run must have in common to go on from here (`check_same_run`);
                values as in JSON.

        Raises:
            CheckpointError: on every rank, if the files cannot be written on one of them.
        """
        final = self.folder / f"step-{progress['step']:08d}"
        partial = final.with_name(final.name + PARTIAL)
        facts = {**progress, "world_size": bmt.world_size(), "made_with": dict(made_with)}
        attempt(lambda: self._begin(partial), everyone())
        if isinstance(model, BaseWeights):
            model.save(partial)
        else:
            bmt.save(model, str(partial / MODEL_FILE))
        state = optim_manager.state_dict(gather_opt=True)
        attempt(lambda: _write(partial, state, facts), everyone())
        attempt(lambda: self._publish(partial, final), everyone())
        return final

    def _begin(self, partial: pathlib.Path) -> None:
        if bmt.rank() == 0:
            for leftover in self.folder.glob(f"step-*{PARTIAL}"):
                shutil.rmtree(leftover)
            partial.mkdir(parents=True)

    def _publish(self, partial: pathlib.Path, final: pathlib.Path) -> None:
        if bmt.rank() != 0:
            return
        for path in partial.iterdir():
            to_disk(path)
        to_disk(partial)
        # complete but never pointed at: the machine died right here
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        to_disk(self.folder)
        write_whole(self.folder / POINTER, final.name + "\n")
        for old in self._complete()[: -self.keep]:
            shutil.rmtree(old)

    def _complete(self) -> list[pathlib.Path]:
        return sorted(
            path
            for path in self.folder.glob("step-*")
            if path.suffix != PARTIAL and (path / "run.json").exists()
        )


def read_facts(checkpoint: pathlib.Path) -> dict[str, Any]:
    """What `run.json` of a checkpoint holds."""
    facts: dict[str, Any] = json.loads((checkpoint / "run.json").read_text(encoding="utf-8"))
    return facts


def check_same_run(
    checkpoint: pathlib.Path,
    made_with: Mapping[str, Any],
    remedy: str = "give the same arguments to go on, or another folder",
) -> None:
    """Compare this run with the one that wrote the checkpoint.

    Raises:
        ResumeError: naming all that differs, and the remedy.
    """
    before = read_facts(checkpoint)["made_with"]
    names = sorted({*before, *made_with})
    differing = [
        f"{name} was {before.get(name)} and is {made_with.get(name)}"
        for name in names
        if before.get(name) != made_with.get(name)
    ]
    if differing:
        raise ResumeError(
            f"{checkpoint} belongs to another run: {'; '.join(differing)}. Remedy: {remedy}."
        )


def load_state(checkpoint: pathlib.Path, optim_manager: bmt.optim.OptimManager) -> dict[str, Any]:
    """Put back all but the model: optimizers, schedules, scale, random states. Collective.

    On another number of ranks the random states stay as they are. Returns the progress that the
    checkpoint was saved with.
    """
    # Mapped, not read: the ranks of one machine share the pages.
    state = torch.load(
        checkpoint / "optimizer.pt", map_location="cpu", mmap=True, weights_only=True
    )
    optim_manager.load_state_dict(state)
    if (checkpoint / _random_file()).exists():
        set_random_states(torch.load(checkpoint / _random_file(), weights_only=True))
    return {
        name: value
        for name, value in read_facts(checkpoint).items()
        if name not in OF_THE_CHECKPOINT
    }


def _write(folder: pathlib.Path, state: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """All files but the model's: those of this rank."""
    torch.save(random_states(), folder / _random_file())
    if bmt.rank() == 0:
        torch.save(state, folder / "optimizer.pt")
        (folder / "run.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def _random_file() -> str:
    return f"random-{bmt.rank()}-of-{bmt.world_size()}.pt"
