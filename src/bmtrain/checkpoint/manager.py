"""CheckpointManager: the checkpoints of one run in one folder."""

from __future__ import annotations

import json
import os
import pathlib
import secrets
import time
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch

from bmtrain.checkpoint import folder as folders
from bmtrain.checkpoint.entries import check_finite
from bmtrain.checkpoint.files import reason_of
from bmtrain.checkpoint.image import HostMemory, Image, Live, Snapshot
from bmtrain.checkpoint.loading import load
from bmtrain.checkpoint.shards import (
    MODEL,
    NAME,
    OPTIMIZER,
    SIZES,
    Manifest,
    ShardedCheckpoint,
    read_manifest,
    read_rest,
    verify,
)
from bmtrain.checkpoint.state import (
    SavedOptimizer,
    check_names,
    fitting,
    merged,
    model_parts,
    names_of,
    optimizer_parts,
    own_part,
    put_back_own,
)
from bmtrain.checkpoint.writer import Writer, Writing
from bmtrain.checkpoint.writing import ShardWriter, as_bytes
from bmtrain.distributed import collectives
from bmtrain.distributed.agreement import agree, attempt, told_apart
from bmtrain.distributed.collectives import Board
from bmtrain.distributed.ledger import Ledger
from bmtrain.errors import CheckpointError, DamagedError
from bmtrain.optim.manager import OptimManager
from bmtrain.runtime import log, world
from bmtrain.runtime.arguments import COUNT, SIZE, check, optional
from bmtrain.runtime.process import say
from bmtrain.runtime.seeding import random_states, set_random_states
from bmtrain.runtime.world import World
from bmtrain.shard.engine import Engine

_SHOWN = 120  # characters of a value in a message
_AGAIN_S = 0.2  # between two looks at files that do not fit
_CURE = (
    "Facts are finite numbers, texts, lists and dicts with texts as keys; tensors, tuples and the "
    "like are kept in `state`."
)


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
        check("CheckpointManager", keep=(keep, SIZE), keep_every=(keep_every, optional(SIZE)))
        self._world = world.current("CheckpointManager")
        self.folder, self.keep, self.keep_every = pathlib.Path(folder), keep, keep_every
        self.background = background
        self._axis = self._world.mesh.world
        # Before connections are opened, for which a rank that is alone here would wait.
        self._world.service(Ledger).enter(
            self._axis, f"CheckpointManager({str(self.folder)!r})", compares=True
        )
        self._writer = self._world.service(Writer)
        self._board = self._world.service(Board)
        self._memory = HostMemory(self._world.device)
        self._snapshot: Snapshot | None = None
        self._damaged: list[pathlib.Path] = []  # newer than the whole one that `latest` has found
        self._lock = folders.Lock(self.folder)
        attempt(self._lock.take if self._world.rank == 0 else lambda: None, self._axis)
        problem = (
            f"{self.folder} does not exist here, though rank 0 has made it: give a folder on a "
            "file system that all machines share."
        )
        agree(None if os.path.isdir(self.folder) else problem, self._axis)

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

        Args:
            model, optim_manager: as `save` will get them.
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
            step: number of optimizer steps taken, the same on all ranks; it names the folder.
            model: any module, its parameters sharded or not.
            optim_manager: with all optimizers and schedules; None saves the model alone.
            facts: of the program, the same on all ranks; values as in JSON.
            state: of the program on this rank, a data loader's for example; numbers, strings,
                tensors, and lists, tuples and dicts of these.
            only: names of the model's tensors to save, of tied ones the first; None for all.

        Returns a handle whose `wait()` returns once the checkpoint counts. A failure in the
        background is printed at once, and raised by it or by the next save.

        Raises:
            CheckpointError: on every rank, if the checkpoint cannot be written, if ranks ask for
                different ones, or if weights, buffers, states of optimizers or learning rates are
                not finite; earlier ones are intact.
        """
        axis = self._axis
        self._writer.settle()
        self._snapshot = None
        asked = attempt(lambda: _asked(step, model, optim_manager, facts or {}, only), axis)
        for name, value in asked.items():
            told = told_apart(value, axis, f"{name} of a checkpoint")
            if told:
                raise CheckpointError(
                    f"save got different {name} on the ranks ({told}). Nothing was saved. Give "
                    "all ranks the same; pass values of a single rank as `state`."
                )
        check_finite(model, [] if optim_manager is None else optim_manager.optimizers, only)
        step = int(step)
        path = self.folder / f"step-{step:08d}"
        attempt(lambda: self._make(path, step) if self._world.rank == 0 else None, axis)
        token = collectives.broadcast_object(
            secrets.token_hex(4), 0, axis, "CheckpointManager.save"
        )

        parts, ties = attempt(lambda: model_parts(model, only), axis)
        own = own_part(model, only, axis)

        def collect() -> tuple[Image, bytes]:
            rest: dict[str, Any] = {
                "own": own,
                "random": random_states(self._world.device),
                "state": state and dict(state),
                "optim_manager": None,
            }
            if optim_manager is not None:
                more, kept = optimizer_parts(optim_manager)
                rest["optim_manager"] = {**kept, "names": names_of(model, optim_manager)}
                parts.extend(more)
            return Image(parts), as_bytes(rest)

        image, rest = attempt(collect, axis)
        manifest = Manifest(step, _sizes(self._world), dict(facts or {}), {}, {}, {MODEL: ties})

        def begin() -> ShardWriter:
            blocks: Snapshot | Live
            if self.background:
                blocks = self._snapshot = Snapshot(image, self._memory, self._world.device)
                # Without it, the next step would write what is still being copied.
                self._world.service(Engine).steps.waits.append(blocks.wait)
            else:
                blocks = Live(image, self._world.device)
            return ShardWriter(path, token, manifest, image, blocks, rest, self._board)

        writer = attempt(begin, axis)

        def write() -> None:
            writer.finish()
            if self._world.rank == 0:
                try:
                    self._set_aside()
                    folders.tidy(self.folder, self.keep, self.keep_every, path)
                except Exception as error:  # the checkpoint counts already
                    say(
                        f"[rank 0] {path} is saved, but old checkpoints and temporary files could "
                        f"not be removed: {reason_of(error)}. The run continues.\n"
                    )

        return self._writer.begin(Writing(path, write, axis), background=self.background)

    def _make(self, path: pathlib.Path, step: int) -> None:
        """Make the folder of a checkpoint."""
        for newest in folders.complete(self.folder)[-1:]:
            if (folders.step_of(newest) or 0) > step and newest not in self._damaged:
                log.warn(
                    f"{newest} is of a later step than {step}, which is saved now, and restore "
                    "takes the latest step: remove it if the run continues from here."
                )
        try:
            path.mkdir(exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"cannot save to {path}: {error.strerror or error}.") from error

    def latest(self, before: int | None = None) -> pathlib.Path | None:
        """The newest checkpoint that is whole, checksums and all; None without any. Collective.

        Damaged ones that are newer are named in a warning, and no longer count once `restore` has
        loaded the one before, or another has been saved. Damage is what two looks at the files have
        found, of two ranks if there are several.

        Args:
            before: look at earlier steps than this alone.

        Raises:
            CheckpointError: on every rank, if all that are there are damaged, or if files cannot be
                read just now, on one rank perhaps. Nothing is changed: try again.
        """
        self._writer.settle()
        axis, what = self._axis, "CheckpointManager.latest"

        def look() -> list[list[str]]:
            kinds = (NAME, NAME + folders.DAMAGED) if self._world.rank == 0 else ()
            return [
                [path.name for path in folders.complete(self.folder, before, kind)]
                for kind in kinds
            ]

        names, aside = collectives.broadcast_object(attempt(look, axis), 0, axis, what)
        reasons = [f"{self.folder / name} was set aside as damaged." for name in aside]
        damaged: list[pathlib.Path] = []
        for path in [self.folder / name for name in reversed(names)]:
            reason = self._damage(path)
            if reason is None:
                self._damaged = damaged
                return path
            damaged.append(path)
            reasons.append(reason)
            if self._world.rank == 0:
                log.warn(f"{reason} An earlier checkpoint is used, if there is one.")
        if not reasons:
            return None
        raise CheckpointError(
            f"none of the checkpoints in {self.folder} can be used: {' '.join(reasons)} Nothing "
            "was changed. Restore their files; to start from scratch, give another folder or "
            "remove them."
        )

    def _damage(self, path: pathlib.Path) -> str | None:
        """What is wrong with the files of a checkpoint; None if nothing is. Collective.

        Raises:
            CheckpointError: on every rank, for what one of them cannot read, or sees alone.
        """
        axis = self._axis

        def told(share: int | None) -> list[str | None]:
            def look() -> str | None:
                try:
                    if share is None:
                        read_manifest(path)
                    else:  # each rank computes its share of the checksums
                        verify(path, (axis.index + share) % axis.size, axis.size)
                except DamagedError as error:
                    return str(error)
                return None

            return collectives.gather_objects(attempt(look, axis), axis, "CheckpointManager.latest")

        # all ranks see the same names and sizes, or those of one are not up to date
        found = told(None)
        if None not in found:
            time.sleep(_AGAIN_S)
            found = told(None)
            if None not in found:
                return found[0]
        if not any(found):
            found = told(0)
            if not any(found):
                return None
            again = told(1)  # of each share by the rank before
            both = [one for rank, one in enumerate(found) if one and again[rank - 1]]
            if both:
                return both[0]
        first = next(rank for rank, one in enumerate(found) if one)
        raise CheckpointError(
            f"{found[first]} Only rank {first} sees this: its host has other files, or failing "
            "memory or a failing disk. Nothing was changed: repair that host, and start again."
        )

    def _set_aside(self) -> None:
        """Let damaged checkpoints no longer count, since there is another that is whole."""
        damaged, self._damaged = self._damaged, []
        for path in damaged if self._world.rank == 0 else ():
            folders.set_aside(path)

    def restore(
        self,
        model: torch.nn.Module,
        optim_manager: OptimManager | None = None,
        *,
        path: str | pathlib.Path | None = None,
        only: Collection[str] | None = None,
    ) -> Restored | None:
        """Load the newest whole checkpoint; None if there is no checkpoint. Collective.

        Loads weights, optimizers, schedules, loss scale, and at the same number of ranks the random
        states.

        Args:
            model: of the parameters' names and shapes that were saved, on any number of ranks.
            optim_manager: with optimizers and schedules of the saved kinds; None loads the model
                alone.
            path: another checkpoint than the newest.
            only: as `save` got it; all else in the model stays as it is.

        Raises:
            CheckpointError: on every rank, if it does not fit the model or the optimizers, or for
                what `latest` refuses; both are as they were, unless a read failed halfway.
            DamagedError: for a `path` whose files are not those that were written.
        """
        found = self.latest() if path is None else pathlib.Path(path)
        if found is None:
            return None
        if path is not None and (damage := self._damage(found)):
            raise DamagedError(f"{damage} Nothing was changed.")
        restored = restore_from(found, model, optim_manager, only)
        self._set_aside()
        return restored


def restore_from(
    path: pathlib.Path,
    model: torch.nn.Module | None,
    manager: OptimManager | None,
    only: Collection[str] | None = None,
) -> Restored:
    """Put back what a whole checkpoint holds, or all but the model. Collective.

    Raises:
        CheckpointError: on every rank, if it does not fit the model or the optimizers.
    """
    current = world.current("CheckpointManager")
    axis = current.mesh.world
    manifest = attempt(lambda: read_manifest(path), axis)
    names = sorted(name for name in manifest.files if name.endswith(".pt"))
    is_alike = manifest.world == _sizes(current) and len(names) == axis.size
    if is_alike:
        rest = attempt(lambda: read_rest(path / names[axis.index], manifest), axis)
    else:
        rest = attempt(lambda: _merged(path, names, manifest) if axis.index == 0 else {}, axis)
        rest = collectives.broadcast_object(rest, 0, axis, "CheckpointManager.restore")

    def fits() -> list[SavedOptimizer]:
        state = rest["optim_manager"]
        if manager is None:
            return []
        if state is None:
            raise CheckpointError(
                f"{path} holds no optimizers: it was saved without an OptimManager."
            )
        found = fitting(manager, ShardedCheckpoint(path, OPTIMIZER), state)
        if model is not None:  # older checkpoints have no names
            check_names(state.get("names", []), names_of(model, manager), model)
        return found

    saved = attempt(fits, axis)
    if model is not None:
        load(model, path, only=only)

    def put_back() -> None:
        if is_alike and model is not None and "own" in rest:
            put_back_own(model, rest["own"])
        for one in saved:
            one.load()
        if manager is not None:
            manager.load_rest(rest["optim_manager"])

    attempt(put_back, axis)
    check_finite(
        torch.nn.Module() if model is None else model,
        [] if manager is None else manager.optimizers,
        outcome=f"{path} is loaded, but cannot be used",
    )
    if is_alike:
        set_random_states(rest["random"], current.device)
    return Restored(manifest.step, manifest.facts, rest["state"] if is_alike else None)


def _sizes(current: World) -> dict[str, int]:
    """The sizes of a run: at others, what each rank has for itself is of no use."""
    return {name: vars(current.mesh.topology)[name] for name in SIZES}


def _merged(path: pathlib.Path, names: list[str], manifest: Manifest) -> dict[str, Any]:
    """What all ranks together have kept of optimizers."""
    if not names:
        raise CheckpointError(f"{path} holds no rank's state.")
    managers = [read_rest(path / name, manifest)["optim_manager"] for name in names]
    return {"optim_manager": None if None in managers else merged(managers)}


def _asked(
    step: int,
    model: torch.nn.Module,
    manager: OptimManager | None,
    facts: Mapping[str, Any],
    only: Collection[str] | None,
) -> dict[str, str]:
    """What all ranks must give `save` alike, as texts.

    The parameters of optimizers are among it, in their order: states are kept by number, and each
    rank writes its part of them.

    Raises:
        CheckpointError: for facts that JSON does not give back as they are.
    """
    check("CheckpointManager.save", CheckpointError, step=(step, COUNT))
    try:
        text = json.dumps(dict(facts), allow_nan=False, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"save got facts that JSON cannot hold ({error}). {_CURE}") from error
    back = json.loads(text)
    for name, value in facts.items():
        if name not in back or back[name] != value:
            raise CheckpointError(
                f"save got the fact {name!r}: {str(value)[:_SHOWN]}, which JSON would give back as "
                f"{str(back.get(str(name)))[:_SHOWN]}. {_CURE}"
            )
    return {
        "step": str(step),
        "facts": text,
        "only": "None" if only is None else str(sorted(only)),
        "optim_manager": "None" if manager is None else "an OptimManager",
        "optimizers": str(names_of(model, manager)),
    }
