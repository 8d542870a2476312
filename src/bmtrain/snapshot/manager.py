"""CheckpointManager: the checkpoints of one run in one folder."""

from __future__ import annotations

import os
import pathlib
import secrets
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch

from bmtrain.checkpoint.loading import load
from bmtrain.checkpoint.manifest import MODEL, OPTIMIZER, Manifest, read_manifest
from bmtrain.checkpoint.shards import ShardedCheckpoint
from bmtrain.checkpoint.writer import Writer, Writing
from bmtrain.distributed import collectives
from bmtrain.distributed.agreement import attempt
from bmtrain.distributed.board import Board
from bmtrain.distributed.ledger import Ledger
from bmtrain.errors import CheckpointError, ConfigurationError
from bmtrain.optim.manager import OptimManager
from bmtrain.runtime import log, world
from bmtrain.runtime.seeding import random_states, set_random_states
from bmtrain.shard.engine import Engine
from bmtrain.snapshot import folder as folders
from bmtrain.snapshot.host import HostMemory, Live, Snapshot
from bmtrain.snapshot.image import Image
from bmtrain.snapshot.lock import Lock
from bmtrain.snapshot.order import check_names, check_order, described, names_of
from bmtrain.snapshot.reading import read_rest
from bmtrain.snapshot.state import check_optimizers, load_optimizers, model_parts, optimizer_parts
from bmtrain.snapshot.writing import Draft, FileOfBlocks, as_bytes, finish


class Restored(NamedTuple):
    """What a checkpoint says beside weights and optimizers.

    Attributes:
        step: of the run.
        facts: the program's own, the same on all ranks.
        state: the program's own of this rank; None at another number of ranks.
    """

    step: int
    facts: dict[str, Any]
    state: dict[str, Any] | None


class CheckpointManager:
    """Checkpoints `step-00000100` in a folder that all ranks see; one run owns it. Collective.

    Each rank writes its own slices of weights and optimizer state, and its random states, in
    parallel. A checkpoint counts once its manifest, with sizes and checksums of all files, has
    taken its name: a kill at any moment leaves the earlier ones.

    With `background`, `save` copies this rank's state into host memory while training goes on (the
    next optimizer step waits for that), and threads write it to disk. Host memory of a rank: its
    part of the checkpoint, once, which `reserve` can page-lock beforehand; without `background` 256
    MiB. One checkpoint is in flight: a `save` first waits for the one before.

    Args:
        folder: made if it is not there.
        keep: how many to keep. Only those whose files are there count; damaged ones do not.
        keep_every: also keep those whose step is a multiple of this.
        background: whether `save` returns before the files are written.

    Raises:
        CheckpointError: on every rank, if another run owns the folder, or it cannot be used.
        ConfigurationError: for values out of range.

    Example:
        with CheckpointManager("checkpoints", keep=3) as checkpoints:
            restored = checkpoints.restore(model, optim_manager)
            for step in range(restored.step if restored else 0, num_steps):
                ...
                checkpoints.save(step + 1, model, optim_manager)
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep: int = 2,
        keep_every: int | None = None,
        background: bool = True,
    ) -> None:
        for name, value in (("keep", keep), ("keep_every", keep_every)):
            if value is not None and not (type(value) is int and value > 0):
                raise ConfigurationError(f"{name} is {value!r}: expected a positive whole number.")
        self._world = world.current("CheckpointManager")
        self.folder, self.keep, self.keep_every = pathlib.Path(folder), keep, keep_every
        self.background = background
        self._axis = self._world.mesh.world
        # Before connections are opened, for which a rank that is alone here would wait.
        self._world.service(Ledger).enter(
            self._axis, f"CheckpointManager({str(self.folder)!r})", is_on_host=True
        )
        self._writer = self._world.service(Writer)
        self._board = self._world.service(Board)
        self._memory = HostMemory(self._world.device)
        self._snapshot: Snapshot | None = None
        self._lock = Lock(self.folder)
        attempt(self._open, self._axis)
        attempt(self._see, self._axis)

    def _open(self) -> None:
        if self._world.rank == 0:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise CheckpointError(
                    f"cannot use {self.folder} for checkpoints: {error.strerror or error}."
                ) from error
            self._lock.take()

    def _see(self) -> None:
        if not self.folder.is_dir():
            raise CheckpointError(
                f"{self.folder} is not there, though rank 0 has made it: give a folder on a file "
                "system that all machines share."
            )

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        if kind is None:
            self.close()
        else:  # the other ranks may not come to a wait
            self.release()

    def close(self) -> None:
        """Wait until the last checkpoint is written, and let others have the folder. Collective.

        Raises:
            CheckpointError: on every rank, if it could not be written.
        """
        try:
            self.wait()
        finally:
            self.release()

    def release(self) -> None:
        """Let others have the folder at once."""
        self._lock.release()

    def wait(self) -> None:
        """Return on every rank once the last checkpoint is written. Collective.

        Raises:
            CheckpointError: on every rank, if it could not be written.
        """
        self._writer.settle()

    def wait_copied(self) -> None:
        """Wait until the program may write to weights and optimizer state.

        Steps of optimizers do that themselves.
        """
        if self._snapshot is not None:
            self._snapshot.wait()

    def reserve(self, model: torch.nn.Module, optim_manager: OptimManager | None = None) -> None:
        """Page-lock the host memory that `save` will need, in the background. Collective.

        Without it the first `save` does, at about 2 GB/s.
        """
        if self.background:
            parts, _ = model_parts(model, None)
            if optim_manager is not None:
                parts += optimizer_parts(optim_manager)[0]
            self._memory.reserve(Image(parts).size)

    def save(
        self,
        step: int,
        model: torch.nn.Module,
        optim_manager: OptimManager | None = None,
        *,
        facts: Mapping[str, Any] | None = None,
        state: Mapping[str, Any] | None = None,
        only: Collection[str] | None = None,
    ) -> Writing:
        """Save the run as it is after `step` steps. Collective.

        Args:
            model: any module, its parameters sharded or not.
            optim_manager: with all optimizers and schedules.
            facts: of the program, the same on all ranks; values as in JSON.
            state: of the program on this rank, a data loader's for example; numbers, strings,
                tensors, and lists, tuples and dicts of these.
            only: names of the model's tensors to save, of tied ones the first; None for all.

        Returns a handle whose `wait()` returns once the checkpoint counts. A failure in the
        background is printed at once, and raised by it or by the next save.

        Raises:
            CheckpointError: on every rank, if the checkpoint cannot be written, or if ranks ask for
                different ones; earlier ones are intact.
        """
        self._writer.settle()
        self._snapshot = None
        order = attempt(lambda: described(step, model, optim_manager, facts, only), self._axis)
        token, first = collectives.broadcast_object(
            (secrets.token_hex(4), order), 0, self._axis, "CheckpointManager.save"
        )
        step = int(step)
        path = folders.path_of(self.folder, step)
        attempt(lambda: self._prepare(path, step, order, first), self._axis)
        image, ties, rest = attempt(
            lambda: self._collected(model, optim_manager, state, only), self._axis
        )
        topology = self._world.mesh.topology
        sizes = {
            "world_size": self._world.world_size,
            "tp_size": topology.tp_size,
            "pipe_size": topology.pipe_size,
        }
        draft = Draft(path, token, self._world.rank, step, sizes, dict(facts or {}), ties)
        blocks = attempt(lambda: self._blocks(image), self._axis)
        file = attempt(lambda: FileOfBlocks(draft.file("bin"), image, blocks), self._axis)

        def write() -> None:
            finish(draft, image, file, rest, self._board)
            if draft.rank == 0:
                folders.prune(self.folder, self.keep, self.keep_every, path)

        writing = Writing(path, write, self._axis)
        return self._writer.begin(writing, background=self.background)

    def _prepare(
        self, path: pathlib.Path, step: int, order: Mapping[str, str], first: Mapping[str, str]
    ) -> None:
        """Make the folder of a checkpoint that is asked for alike here and on rank 0."""
        check_order(order, first)
        if self._world.rank != 0:
            return
        if later := folders.later(self.folder, step):
            log.warn(
                f"{later[-1]} is of a later step than {step}, which is saved now, and restore "
                "takes the latest step: remove it if the run goes on from here."
            )
        _make(path)

    def _collected(
        self,
        model: torch.nn.Module,
        optim_manager: OptimManager | None,
        state: Mapping[str, Any] | None,
        only: Collection[str] | None,
    ) -> tuple[Image, dict[str, dict[str, str]], bytes]:
        """This rank's tensors, the ties among them, and the file of all that is no tensor."""
        parts, ties = model_parts(model, only)
        rest: dict[str, Any] = {
            "random": random_states(self._world.device),
            "state": None,
            "optim_manager": None,
        }
        if state is not None:
            rest["state"] = dict(state)
        if optim_manager is not None:
            more, rest["optim_manager"] = optimizer_parts(optim_manager)
            rest["optim_manager"]["names"] = names_of(model, optim_manager)
            parts += more
        return Image(parts), {MODEL: ties}, as_bytes(rest)

    def _blocks(self, image: Image) -> Snapshot | Live:
        if not self.background:
            return Live(image, self._world.device)
        self._snapshot = Snapshot(image, self._memory, self._world.device)
        # Without it, the next step would write what is still being copied.
        self._world.service(Engine).steps.before_next(self._snapshot.wait)
        return self._snapshot

    def latest(self, before: int | None = None) -> pathlib.Path | None:
        """The newest checkpoint that is whole, checksums and all; None without one. Collective.

        Damaged ones that are newer are named in a warning, and no longer count.

        Args:
            before: look at earlier steps than this alone.
        """
        self._writer.settle()
        damaged: set[str] = set()
        while True:
            name = collectives.broadcast_object(
                self._newest(damaged, before), 0, self._axis, "CheckpointManager.latest"
            )
            if name is None:
                return None
            try:
                self._check(self.folder / name)
            except CheckpointError as error:
                damaged.add(name)
                if self._world.rank == 0:
                    log.warn(f"{error} An earlier checkpoint is used, if there is one.")
                    folders.set_aside(self.folder / name)
            else:
                return self.folder / name

    def _newest(self, damaged: Collection[str], before: int | None) -> str | None:
        """The last one that has a manifest, as rank 0 sees it."""
        if self._world.rank != 0:
            return None
        names = [path.name for path in folders.complete(self.folder, before)]
        return next((name for name in reversed(names) if name not in damaged), None)

    def _check(self, path: pathlib.Path) -> None:
        """Compare all checksums; each rank computes its share."""
        attempt(lambda: folders.check(path, self._axis.index, self._axis.size), self._axis)

    def restore(
        self,
        model: torch.nn.Module,
        optim_manager: OptimManager | None = None,
        *,
        path: pathlib.Path | None = None,
    ) -> Restored | None:
        """Go on from the newest whole checkpoint; None if there is none. Collective.

        Loads weights, optimizers, schedules, loss scale, and at the same number of ranks the random
        states.

        Args:
            path: another checkpoint.

        Raises:
            CheckpointError: on every rank, if it does not fit the model or the optimizers; both are
                as they were, unless a read failed halfway.
        """
        found = self.latest() if path is None else path
        if found is None:
            return None
        rest = Rest(found)
        if optim_manager is not None:
            rest.check(model, optim_manager)
        load(model, found)
        return rest.load(optim_manager)


def _make(path: pathlib.Path) -> None:
    try:
        path.mkdir(exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot save to {path}: {error.strerror or error}.") from error


def facts_of(path: pathlib.Path) -> dict[str, Any]:
    """The program's facts in a checkpoint."""
    return read_manifest(path).facts


def load_rest(path: pathlib.Path, optim_manager: OptimManager | None) -> Restored:
    """Put back all of a checkpoint but the model. Collective.

    Raises:
        CheckpointError: on every rank, if it does not fit the optimizers.
    """
    return Rest(path).load(optim_manager)


class Rest:
    """All of a checkpoint but the model. Its construction and its methods are collective."""

    def __init__(self, path: pathlib.Path) -> None:
        self._axis = world.current("CheckpointManager").mesh.world
        self._path = path
        self._manifest: Manifest = attempt(lambda: read_manifest(path), self._axis)
        self._own, self._found = read_rest(path, self._manifest, self._axis)

    def check(self, model: torch.nn.Module, manager: OptimManager) -> None:
        """CheckpointError on every rank unless this is the state of such optimizers."""
        attempt(lambda: check_optimizers(manager, *self._optimizers()), self._axis)
        saved = self._optimizers()[1].get("names", [])  # older checkpoints have none
        attempt(lambda: check_names(saved, names_of(model, manager)), self._axis)

    def load(self, manager: OptimManager | None) -> Restored:
        """Put it back."""
        if manager is not None:
            attempt(lambda: load_optimizers(manager, *self._optimizers()), self._axis)
        step, facts = self._manifest.step, self._manifest.facts
        if self._own is None:
            return Restored(step, facts, None)
        set_random_states(self._own["random"], world.device())
        return Restored(step, facts, self._own["state"])

    def _optimizers(self) -> tuple[ShardedCheckpoint, dict[str, Any]]:
        if self._found["optim_manager"] is None:
            raise CheckpointError(
                f"{self._path} holds no optimizers: it was saved without an OptimManager."
            )
        return ShardedCheckpoint(self._path, OPTIMIZER), self._found["optim_manager"]
