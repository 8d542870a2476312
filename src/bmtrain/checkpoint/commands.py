"""`python -m bmtrain check FOLDER` and `consolidate CHECKPOINT FILE`: in one process."""

from __future__ import annotations

import argparse
import pathlib
import sys
import types

from bmtrain.checkpoint.files import is_there
from bmtrain.checkpoint.folder import complete
from bmtrain.checkpoint.shards import NAME, ShardedCheckpoint, verify
from bmtrain.checkpoint.writer import write_file
from bmtrain.errors import CheckpointError, DamagedError

# Exit statuses. argparse exits with 2 for bad arguments, as BAD_INPUT does.
WHOLE, DAMAGED, BAD_INPUT = 0, 1, 2


def _add_check(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Exit status: 0 all intact, 1 at least one is damaged, 2 no checkpoint found."
    parser.add_argument(
        "folder", type=pathlib.Path, help="a checkpoint, or a folder of checkpoints"
    )


def _checkpoints(folder: pathlib.Path) -> list[pathlib.Path]:
    """The folder if it is a checkpoint, else the checkpoints in it, in the order of their steps."""
    found = [folder] if is_there(folder / NAME) else complete(folder)
    if not found:
        raise CheckpointError(
            f"{folder} holds no checkpoint: give the folder of a CheckpointManager."
        )
    return found


def _check(args: argparse.Namespace) -> int:
    try:
        found = _checkpoints(args.folder)
    except CheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    status = WHOLE
    for path in found:
        try:
            manifest = verify(path)
        except CheckpointError as error:
            status = DAMAGED
            what = "damaged" if isinstance(error, DamagedError) else "unreadable"
            print(f"{what}: {error}", flush=True)
        else:
            size = sum(facts.size for facts in manifest.files.values())
            ranks = manifest.world["world_size"]
            print(
                f"whole: {path}, step {manifest.step}, {ranks} rank(s), {size:,} bytes", flush=True
            )
    return status


def _add_consolidate(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Exit status: 0 written, 1 the checkpoint is damaged or the file not writable."
    parser.add_argument(
        "checkpoint",
        type=pathlib.Path,
        help="a folder step-..., or the run's, of which the newest is taken",
    )
    parser.add_argument(
        "file", type=pathlib.Path, help="to write; .safetensors selects that format, else torch's"
    )


def _consolidate(args: argparse.Namespace) -> int:
    try:
        source = ShardedCheckpoint(_checkpoints(args.checkpoint)[-1])  # compares checksums
        write_file(args.file, {**source.all(), **source.others})
    except (CheckpointError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return DAMAGED
    return WHOLE


CHECK = types.SimpleNamespace(add_arguments=_add_check, run=_check)
CONSOLIDATE = types.SimpleNamespace(add_arguments=_add_consolidate, run=_consolidate)
