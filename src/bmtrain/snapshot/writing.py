"""Writing a checkpoint: every rank its files, then rank 0 the manifest, by which it counts."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import io
import json
import os
import pathlib
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from bmtrain.checkpoint.manifest import BLOCK, NAME, FileFacts, Manifest, TensorFacts, parse
from bmtrain.checkpoint.writer import flush_folder, flush_to_disk
from bmtrain.distributed.board import Board
from bmtrain.errors import CheckpointError
from bmtrain.snapshot.host import NUM_THREADS, Live, Snapshot
from bmtrain.snapshot.image import Image

# A new file or none: a link at its name is not followed.
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclasses.dataclass(frozen=True)
class Draft:
    """A checkpoint that is being written.

    Attributes:
        folder: of the checkpoint.
        token: names the files of this attempt: those of a checkpoint that is there already stay.
        rank: of the run.
        step, world, facts, ties: for the manifest.
    """

    folder: pathlib.Path
    token: str
    rank: int
    step: int
    world: dict[str, int]
    facts: dict[str, Any]
    ties: dict[str, dict[str, str]]

    def file(self, suffix: str) -> pathlib.Path:
        """A file of this rank."""
        return self.folder / f"rank-{self.rank:05d}-{self.token}.{suffix}"


class FileOfBlocks:
    """A new file, which threads fill with the blocks of an image.

    They start at once: none can be started when the interpreter ends, and the file may be asked for
    then.
    """

    def __init__(self, path: pathlib.Path, image: Image, blocks: Snapshot | Live) -> None:
        self.path = path
        self._image, self._blocks = image, blocks
        self._descriptor = os.open(path, _NEW, 0o666)
        self._pool = concurrent.futures.ThreadPoolExecutor(NUM_THREADS, "save")
        self._checksums = self._pool.map(self._write_one, range(image.num_blocks))

    def _write_one(self, number: int) -> int:
        with self._blocks.block(number) as memory:
            checksum = zlib.crc32(memory)
            _write_at(self._descriptor, memory, number * BLOCK)
        return checksum

    def finish(self) -> FileFacts:
        """Wait until the file is on the disk; the first error of any thread is raised."""
        try:
            checksums = tuple(self._checksums)
            self._blocks.check()
            os.fsync(self._descriptor)
        finally:
            self._pool.shutdown(cancel_futures=True)
            os.close(self._descriptor)
        return FileFacts(self._image.size, checksums)


def finish(draft: Draft, image: Image, file: FileOfBlocks, rest: bytes, board: Board) -> None:
    """Write this rank's files; on rank 0 wait for the others, and write the manifest.

    Raises:
        CheckpointError: if that cannot be done on this rank, or on rank 0 if it cannot on another.
    """
    beside = draft.file("pt")
    try:
        files = {file.path.name: file.finish(), beside.name: _write_bytes(beside, rest)}
        flush_to_disk(draft.folder)
    except BaseException as error:
        for path in (file.path, beside):
            with contextlib.suppress(OSError):
                path.unlink()
        reason = _reason(error)
        with contextlib.suppress(TimeoutError):  # this error is the first one
            board.gather(json.dumps({"error": reason}))
        raise CheckpointError(_failed(draft.folder, reason)) from error
    texts = board.gather(_as_text(draft, files, image.tensors(file.path.name)))
    if draft.rank == 0:
        _publish(draft, [json.loads(text) for text in texts])


def _reason(error: BaseException) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}: {error}"


def _failed(folder: pathlib.Path, reason: str) -> str:
    return (
        f"cannot save to {folder}: {reason}; earlier checkpoints are intact. Free some space or "
        "choose another folder, and save again."
    )


def _write_bytes(path: pathlib.Path, content: bytes) -> FileFacts:
    descriptor = os.open(path, _NEW, 0o666)
    try:
        _write_at(descriptor, memoryview(content), 0)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    starts = range(0, len(content), BLOCK)
    return FileFacts(
        len(content), tuple(zlib.crc32(content[start : start + BLOCK]) for start in starts)
    )


def _write_at(descriptor: int, memory: memoryview, offset: int) -> None:
    while memory:
        count = os.pwrite(descriptor, memory, offset)
        memory, offset = memory[count:], offset + count


def as_bytes(state: Mapping[str, Any]) -> bytes:
    """What one rank keeps beside tensors, as a file that holds no code.

    Raises:
        CheckpointError: for values of other types than a load accepts.
    """
    buffer = io.BytesIO()
    try:
        torch.save(dict(state), buffer)
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            "the state of optimizers, schedules and the program cannot be kept: expected numbers, "
            f"strings, tensors, and lists, tuples and dicts of these ({reason})."
        ) from error
    return buffer.getvalue()


def _as_text(
    draft: Draft, files: dict[str, FileFacts], tensors: dict[str, dict[str, TensorFacts]]
) -> str:
    """This rank's part of the manifest."""
    part = Manifest(draft.step, draft.world, {}, files, tensors, {})
    return json.dumps({"manifest": part.to_json()})


def _publish(draft: Draft, parts: Sequence[Mapping[str, str]]) -> None:
    """Join the parts of all ranks to the manifest, and let it take its name."""
    for rank, part in enumerate(parts):
        if "error" in part:
            raise CheckpointError(_failed(draft.folder, f"{part['error']} (on rank {rank})"))
    files: dict[str, FileFacts] = {}
    tensors: dict[str, dict[str, TensorFacts]] = {}
    for part in parts:
        one = parse(part["manifest"], is_part=True)
        files |= one.files
        for section, found in one.tensors.items():
            known = tensors.setdefault(section, {})
            for name, facts in found.items():
                before = known.get(name)
                pieces = facts.pieces if before is None else before.pieces + facts.pieces
                known[name] = dataclasses.replace(facts, pieces=pieces)
    manifest = Manifest(draft.step, draft.world, draft.facts, files, tensors, draft.ties)
    text = manifest.to_json()
    parse(text)  # that it contradicts itself must come out now, not when it is needed
    temporary = draft.folder / f"{NAME}.{draft.token}"
    try:
        _write_bytes(temporary, text.encode())
        os.replace(temporary, draft.folder / NAME)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise CheckpointError(_failed(draft.folder, _reason(error))) from error
    flush_folder(draft.folder, f"{draft.folder / NAME}, with which this checkpoint counts,")
