"""The checkpoints in a folder: which count, which go, which are damaged."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import shutil

from bmtrain.checkpoint.manifest import NAME, Manifest, read_manifest, verify
from bmtrain.checkpoint.writer import flush_to_disk
from bmtrain.errors import CheckpointError

_STEP = re.compile(r"step-([0-9]{8,})")
_OURS = re.compile(r"rank-[0-9]{5,}-[0-9a-f]+\.(bin|pt)|manifest\.json\.[0-9a-f]+")
DAMAGED = ".damaged"


def path_of(folder: pathlib.Path, step: int) -> pathlib.Path:
    """Where the checkpoint of a step is."""
    return folder / f"step-{step:08d}"


def step_of(path: pathlib.Path) -> int | None:
    """The step of a checkpoint; None for what is no name of one."""
    found = _STEP.fullmatch(path.name)
    return None if found is None else int(found[1])


def is_complete(path: pathlib.Path) -> bool:
    """Whether a checkpoint has a manifest."""
    return (path / NAME).exists()


def complete(folder: pathlib.Path, before: int | None = None) -> list[pathlib.Path]:
    """The checkpoints that have a manifest, in the order of their steps, those from `before` on
    left out.
    """
    steps = {path: step_of(path) for path in folder.glob("step-*") if is_complete(path)}
    found = {
        step: path
        for path, step in steps.items()
        if step is not None and (before is None or step < before)
    }
    return [found[step] for step in sorted(found)]


def usable(folder: pathlib.Path) -> list[pathlib.Path]:
    """Those whose files are there, with their sizes."""
    good = []
    for path in complete(folder):
        with contextlib.suppress(CheckpointError):
            read_manifest(path)
            good.append(path)
    return good


def check(path: pathlib.Path, share: int = 0, num_shares: int = 1) -> Manifest:
    """The manifest of a checkpoint of which this share of the blocks has the right checksums.

    Raises:
        CheckpointError: naming the file.
    """
    manifest = read_manifest(path)
    verify(path, manifest, share, num_shares)
    return manifest


def set_aside(path: pathlib.Path) -> None:
    """Let a damaged checkpoint no longer count; its files stay, for whoever wants to look."""
    with contextlib.suppress(FileNotFoundError):
        os.replace(path / NAME, path / (NAME + DAMAGED))


def later(folder: pathlib.Path, step: int) -> list[pathlib.Path]:
    """The checkpoints of later steps than this."""
    return [path for path in complete(folder) if (step_of(path) or 0) > step]


def prune(folder: pathlib.Path, keep: int, keep_every: int | None, newest: pathlib.Path) -> None:
    """Remove old checkpoints, and what attempts that were broken off have left.

    Those whose step is a multiple of `keep_every` stay, the last `keep` whose files are there, and
    the `newest`, the one just written: a run that went back has later steps in its folder. What is
    damaged, or of another kind, is not touched and not counted.
    """
    good = usable(folder)
    for path in good[:-keep]:
        if path != newest and (not keep_every or (step_of(path) or 0) % keep_every):
            remove(path)
    for path in folder.glob("step-*"):
        if step_of(path) is None or not path.is_dir() or path.is_symlink():
            continue
        named = set(read_manifest(path).files) if path in good else set()
        if path in good or not (path / NAME).exists():
            _tidy(path, named)


def remove(path: pathlib.Path) -> None:
    """Remove a checkpoint: its manifest first, so that it does not count while its files go."""
    with contextlib.suppress(FileNotFoundError):
        (path / NAME).unlink()
        flush_to_disk(path)
    shutil.rmtree(path)


def _tidy(path: pathlib.Path, named: set[str]) -> None:
    """Remove the files of attempts, and the folder if it is empty then."""
    if (path / (NAME + DAMAGED)).exists():
        return
    for file in path.iterdir():
        if _OURS.fullmatch(file.name) and file.name not in named:
            file.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        path.rmdir()
