"""Checkpoints of a run: complete or absent, whatever moment the machine dies at.

A checkpoint is a folder `step-00000100` with

    model.pt       the model, by bmt.save
    optimizer.pt   optimizer, learning-rate schedule and loss scale, whole tensors: fits any number of processes
    random-*.pt    random states, one file per rank
    run.json       step, samples read, and what the run was made with

It is written under another name, brought to the disk, and renamed; only then the pointer file `latest` is replaced.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.utils.deterministic as torch_deterministic

import bmtrain as bmt

PARTIAL = ".partial"
POINTER = "latest"


class ResumeError(ValueError):
    """A checkpoint that does not belong to the run that was asked for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Position:
    """How far training has come: optimizer steps done, and sequences read by all ranks together."""

    step: int = 0
    consumed: int = 0


class Checkpoints:
    """The checkpoints in one folder, of which the last `keep` are kept. All ranks call each method together."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.folder = folder
        self.keep = keep

    def latest(self) -> Path | None:
        """The newest complete checkpoint; None where there is none."""
        pointer = self.folder / POINTER
        if pointer.exists():
            target = self.folder / pointer.read_text().strip()
            if (target / "run.json").exists():
                return target
        complete = self._complete()
        return complete[-1] if complete else None

    def clear(self) -> None:
        """Delete all checkpoints here."""
        if bmt.rank() == 0:
            (self.folder / POINTER).unlink(missing_ok=True)
            for path in self.folder.glob("step-*"):
                shutil.rmtree(path)
        bmt.synchronize()

    def save(
        self, position: Position, model: torch.nn.Module, optim_manager: bmt.optim.OptimManager, made_with: Mapping[str, Any]
    ) -> Path:
        """Write a checkpoint; the earlier ones stay valid until it is complete."""
        final = self.folder / f"step-{position.step:08d}"
        partial = final.with_name(final.name + PARTIAL)
        if bmt.rank() == 0:
            for leftover in self.folder.glob(f"step-*{PARTIAL}"):
                shutil.rmtree(leftover)
            partial.mkdir(parents=True)
        bmt.synchronize()
        bmt.save(model, str(partial / "model.pt"))
        state = optim_manager.state_dict(gather_opt=True)
        torch.save(_random_states(), partial / _random_file())
        if bmt.rank() == 0:
            torch.save(state, partial / "optimizer.pt")
            facts = {**dataclasses.asdict(position), "world_size": bmt.world_size(), "made_with": dict(made_with)}
            (partial / "run.json").write_text(json.dumps(facts, indent=2) + "\n")
        bmt.synchronize()
        if bmt.rank() == 0:
            self._publish(partial, final)
        bmt.synchronize()
        return final

    def _publish(self, partial: Path, final: Path) -> None:
        for path in partial.iterdir():
            _to_disk(path)
        _to_disk(partial)
        shutil.rmtree(final, ignore_errors=True)  # complete but never pointed at: the machine died right here
        partial.rename(final)
        _to_disk(self.folder)
        write_whole(self.folder / POINTER, final.name + "\n")
        for old in self._complete()[: -self.keep]:
            shutil.rmtree(old)

    def _complete(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("step-*") if path.suffix != PARTIAL and (path / "run.json").exists())


def read_facts(checkpoint: Path) -> dict[str, Any]:
    """What `run.json` of a checkpoint holds."""
    facts: dict[str, Any] = json.loads((checkpoint / "run.json").read_text())
    return facts


def check_same_run(checkpoint: Path, made_with: Mapping[str, Any]) -> None:
    """ResumeError naming all that differs between the run that wrote the checkpoint and this one."""
    before = read_facts(checkpoint)["made_with"]
    names = sorted({*before, *made_with})
    differing = [
        f"{name} was {before.get(name)} and is {made_with.get(name)}" for name in names if before.get(name) != made_with.get(name)
    ]
    if differing:
        raise ResumeError(
            f"{checkpoint} belongs to another run: {'; '.join(differing)}. "
            "Give the same arguments to go on, another --save-dir to keep both, or --restart to begin anew."
        )


def load_state(checkpoint: Path, optim_manager: bmt.optim.OptimManager) -> Position:
    """Put back everything but the model: optimizer, schedule, loss scale, random states.

    On another number of ranks the random states stay those of the start.
    """
    # Mapped, not read: the ranks of one machine share the pages.
    state = torch.load(checkpoint / "optimizer.pt", map_location="cpu", mmap=True, weights_only=True)
    optim_manager.load_state_dict(state)
    if (checkpoint / _random_file()).exists():
        _set_random_states(torch.load(checkpoint / _random_file(), weights_only=True))
    facts = read_facts(checkpoint)
    return Position(step=facts["step"], consumed=facts["consumed"])


def choose_repeatable_kernels() -> None:
    """On GPUs, sum in the same order each time; the faster backward of attention, above all, does not."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Attention looks at this mode only if it is strict; with warnings only it stays as it is.
    torch.use_deterministic_algorithms(torch.cuda.is_available(), warn_only=False)
    torch_deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a debugging aid, costs time


def write_whole(path: Path, text: str) -> None:
    """Replace a file so that a reader, or a crash, meets the old text or the new one and nothing between."""
    beside = path.with_name(path.name + PARTIAL)
    with beside.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
    _to_disk(path.parent)


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _random_file() -> str:
    return f"random-{bmt.rank()}-of-{bmt.world_size()}.pt"


def _random_states() -> dict[str, Any]:
    """Python's, numpy's and torch's random states, in types that a weights-only load accepts."""
    kind, keys, place, has_gauss, gauss = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), place, has_gauss, gauss),
        "cpu": torch.get_rng_state(),
    }
    if bmt.device().type == "cuda":
        states["device"] = torch.cuda.get_rng_state(bmt.device())
    return states


def _set_random_states(states: Mapping[str, Any]) -> None:
    random.setstate(states["python"])
    kind, keys, place, has_gauss, gauss = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), place, has_gauss, gauss))
    torch.set_rng_state(states["cpu"])
    if "device" in states and bmt.device().type == "cuda":
        torch.cuda.set_rng_state(states["device"], bmt.device())
