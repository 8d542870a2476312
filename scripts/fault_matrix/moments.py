"""The moments of a run at which a fault can come, and the faults that change what a rank computes
or writes. They replace functions of the library in this process.
"""

from __future__ import annotations

import errno
import functools
import io
import os
import pathlib
import resource
import shutil
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from scripts.fault_matrix.faulty import Fault
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data.dataloader import _BaseDataLoaderIter

import bmtrain as bmt
from bmtrain.checkpoint import folder as folders
from bmtrain.checkpoint import shards, writing
from bmtrain.checkpoint.shards import NAME, ShardedCheckpoint
from bmtrain.checkpoint.writer import Writer
from bmtrain.distributed.collectives import Board
from bmtrain.runtime import process, world
from model_center.training.checkpoints import Checkpoints
from model_center.weights import safetensors_writer

Deed = Callable[[], object]
SAVED_S = 20.0  # that a tiny checkpoint may take on a busy machine


class Clock:
    """Counts the optimizer steps of this rank, and lets a deed happen once, in its step."""

    def __init__(self, fault: Fault) -> None:
        self.fault, self.steps = fault, 0
        self._once = threading.Lock()
        step = bmt.optim.OptimManager.step

        def counted(manager: Any) -> None:
            step(manager)
            self.steps += 1

        replace(bmt.optim.OptimManager, "step", counted)

    @property
    def is_in_step(self) -> bool:
        """Whether the step of the fault is computed here; what has no gradient is not of a step."""
        return self.steps + 1 == self.fault.step

    @property
    def is_after_step(self) -> bool:
        """Whether the step of the fault is done."""
        return self.steps >= self.fault.step

    def strike(self) -> None:
        """The fault, once; one in a step comes when what was saved before counts."""
        if self._once.acquire(blocking=False):
            if self.is_in_step:
                wait_saved()
            self.fault.happen()


def wait_saved() -> None:
    """Return when the checkpoint at which the writer is counts, if there is one."""
    latest = world.current().service(Writer)._latest  # noqa: SLF001
    end = time.monotonic() + SAVED_S
    while latest is not None and not (latest.path / NAME).exists() and time.monotonic() < end:
        time.sleep(0.01)


def replace(owner: Any, name: str, value: object) -> None:
    """In the place of a function or method of the library."""
    setattr(owner, name, value)


def before(owner: Any, name: str, deed: Deed) -> None:
    """Let `deed` come before each call."""
    original = getattr(owner, name)

    def replaced(*args: Any, **kwargs: Any) -> Any:
        deed()
        return original(*args, **kwargs)

    replace(owner, name, replaced)


def _loading(clock: Clock) -> None:
    before(ShardedCheckpoint, "__init__", clock.strike)


def _forward(clock: Clock) -> None:
    def hook(module: torch.nn.Module, args: Any) -> None:
        if clock.is_in_step and torch.is_grad_enabled() and not list(module.children()):
            clock.strike()

    torch.nn.modules.module.register_module_forward_pre_hook(hook)


def _exchange(clock: Clock) -> None:
    """Inside of a collective, which the other ranks have entered or will."""
    begun = threading.Event()

    def strike() -> None:
        begun.wait()
        while not process.is_communicating():
            time.sleep(0.0005)
        clock.fault.happen()

    def hook(module: torch.nn.Module, args: Any) -> None:
        if clock.is_in_step and torch.is_grad_enabled() and not begun.is_set():
            wait_saved()
            begun.set()

    threading.Thread(target=strike, daemon=True).start()
    torch.nn.modules.module.register_module_forward_pre_hook(hook)


def _first_exchange(clock: Clock) -> None:
    """Inside of a collective of the ranks that have just met."""

    def strike() -> None:
        while not (bmt.is_initialized() and process.is_communicating()):
            time.sleep(0.0005)
        clock.fault.happen()

    threading.Thread(target=strike, daemon=True).start()


def _batch(clock: Clock) -> None:
    """A batch is fetched."""
    before(_BaseDataLoaderIter, "__next__", lambda: clock.strike() if clock.is_in_step else None)


def _backward(clock: Clock) -> None:
    def hook(module: torch.nn.Module, args: Any, output: Any) -> None:
        is_tensor = isinstance(output, torch.Tensor) and output.requires_grad
        if clock.is_in_step and is_tensor and isinstance(module, torch.nn.LayerNorm | bmt.Block):
            output.register_hook(lambda gradient: clock.strike())

    torch.nn.modules.module.register_module_forward_hook(hook)


def _optimizer(clock: Clock) -> None:
    def hook(*args: Any) -> None:
        if clock.is_in_step:
            clock.strike()

    register_optimizer_step_pre_hook(hook)


def _saving(clock: Clock) -> None:
    write_at = writing._write_at  # noqa: SLF001

    def half(descriptor: int, memory: memoryview, offset: int) -> None:
        if clock.is_after_step:
            write_at(descriptor, memory[: len(memory) // 2], offset)
            clock.strike()
        write_at(descriptor, memory, offset)

    replace(writing, "_write_at", half)


def _just_saved(clock: Clock) -> None:
    """The program goes on, and the files of this rank are being written."""
    write_at, save = writing._write_at, bmt.CheckpointManager.save  # noqa: SLF001

    def slow(*args: Any) -> None:
        time.sleep(0.5)
        write_at(*args)

    def saved(*args: Any, **kwargs: Any) -> Any:
        if clock.is_after_step:
            replace(writing, "_write_at", slow)
        found = save(*args, **kwargs)
        if clock.is_after_step:
            clock.strike()
        return found

    replace(bmt.CheckpointManager, "save", saved)


def _manifest(clock: Clock) -> None:
    """The files of this rank are written, and nobody knows yet."""
    before(Board, "gather", lambda: clock.strike() if clock.is_after_step else None)


def _pruning(clock: Clock) -> None:
    """An old checkpoint has lost its manifest, and its files are there."""
    before(shutil, "rmtree", lambda: clock.strike() if clock.is_after_step else None)


def _ending(clock: Clock) -> None:
    before(Checkpoints, "close", clock.strike)


def _exporting(clock: Clock) -> None:
    """The new folder is beside the old one, half of a tensor in its file."""
    write_at = safetensors_writer._write_at  # noqa: SLF001

    def half(file: pathlib.Path, offset: int, left: memoryview) -> None:
        write_at(file, offset, left[: len(left) // 2])
        clock.strike()
        write_at(file, offset, left)

    replace(safetensors_writer, "_write_at", half)


MOMENTS: dict[str, Callable[[Clock], None]] = {
    "loading": _loading,
    "first exchange": _first_exchange,
    "batch": _batch,
    "forward": _forward,
    "exchange": _exchange,
    "first step": _exchange,
    "backward": _backward,
    "optimizer": _optimizer,
    "just saved": _just_saved,
    "saving": _saving,
    "before the manifest": _manifest,
    "pruning": _pruning,
    "ending": _ending,
    "exporting": _exporting,
}


def _bad_loss(clock: Clock) -> None:
    forward = bmt.loss.FusedCrossEntropy.forward

    def replaced(self: Any, *args: Any) -> torch.Tensor:
        loss: torch.Tensor = forward(self, *args)
        if clock.steps + 1 < clock.fault.step or not torch.is_grad_enabled():
            return loss
        wait_saved()
        clock.fault.note()
        return loss * float("nan")

    replace(bmt.loss.FusedCrossEntropy, "forward", replaced)


def _bad_loss_once(clock: Clock) -> None:
    forward = bmt.loss.FusedCrossEntropy.forward

    def replaced(self: Any, *args: Any) -> torch.Tensor:
        loss: torch.Tensor = forward(self, *args)
        if not clock.is_in_step or not torch.is_grad_enabled():
            return loss
        clock.fault.note()
        return loss * float("nan")

    replace(bmt.loss.FusedCrossEntropy, "forward", replaced)


def _bad_gradient(clock: Clock) -> None:
    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        wait_saved()
        clock.fault.note()
        return gradient * float("nan")

    def hook(module: torch.nn.Module, args: Any, output: Any) -> None:
        is_tensor = isinstance(output, torch.Tensor) and output.requires_grad
        is_now = clock.steps + 1 >= clock.fault.step
        if is_now and is_tensor and isinstance(module, torch.nn.LayerNorm | bmt.Block):
            output.register_hook(spoil)

    torch.nn.modules.module.register_module_forward_hook(hook)


def _bad_weight(clock: Clock) -> None:
    step = bmt.optim.OptimManager.step

    def replaced(manager: Any) -> None:
        step(manager)
        if clock.steps == clock.fault.step:
            clock.fault.note()
            sharded = manager.optimizers[0].param_groups[0]["params"][0]
            sharded.local.detach().view(-1)[0] = float("nan")

    replace(bmt.optim.OptimManager, "step", replaced)


def _skipped(clock: Clock) -> None:
    step = bmt.optim.OptimManager.step

    def replaced(manager: Any) -> None:
        if clock.is_in_step:
            clock.fault.note()
            clock.steps += 1
            return
        step(manager)

    replace(bmt.optim.OptimManager, "step", replaced)


def _one_more(clock: Clock) -> None:
    def further() -> None:
        if clock.is_in_step:
            clock.fault.note()
            bmt.synchronize()

    before(bmt.optim.OptimManager, "backward", further)


def _full_disk(clock: Clock) -> None:
    write_at = writing._write_at  # noqa: SLF001

    def replaced(descriptor: int, memory: memoryview, offset: int) -> None:
        if clock.is_after_step:
            write_at(descriptor, memory[: len(memory) // 2], offset)
            clock.fault.note()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_at(descriptor, memory, offset)

    replace(writing, "_write_at", replaced)


def _size_limit(clock: Clock) -> None:
    """The system refuses what makes a file longer than 16 KiB."""

    def limit() -> None:
        if clock.is_after_step:
            clock.fault.note()
            _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (16 * 1024, hard))

    before(Checkpoints, "save", limit)


def _read_only(clock: Clock) -> None:
    """No file below the folder of the run can be opened for writing, no folder made."""
    folder = str(pathlib.Path(clock.fault.mark).parent)
    opened, made, io_open = os.open, os.mkdir, io.open

    def refuse(path: Any) -> None:
        name = os.fspath(path) if isinstance(path, str | os.PathLike) else ""
        if clock.is_after_step and name.startswith(folder) and name != clock.fault.mark:
            clock.fault.note()
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), name)

    def open_(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR):
            refuse(path)
        return opened(path, flags, *args, **kwargs)

    def mkdir(path: Any, *args: Any, **kwargs: Any) -> None:
        refuse(path)
        made(path, *args, **kwargs)

    def open_file(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if set(mode) & set("wax+"):
            refuse(path)
        return io_open(path, mode, *args, **kwargs)

    replace(os, "open", open_)
    replace(os, "mkdir", mkdir)
    replace(io, "open", open_file)


def _unreadable(clock: Clock) -> None:
    """Its host cannot read what others have written."""

    def fail(memory: memoryview, path: pathlib.Path, offset: int) -> None:
        clock.fault.note()
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    replace(shards, "read_into", fail)


# What the system is asked, by the functions that ask it.
CALLS: dict[str, tuple[tuple[Any, str], ...]] = {
    "fsync": ((os, "fsync"),),
    "rename": ((os, "replace"), (os, "rename")),
    "mkdir": ((os, "mkdir"),),
    "unlink": ((os, "unlink"), (os, "remove"), (os, "rmdir")),
    "list": ((os, "listdir"), (os, "scandir")),
    "stat": ((os, "stat"),),
    "manifest": ((os, "open"), (io, "open")),
}
ERRORS = {name: getattr(errno, name) for name in ("EIO", "ENOSPC", "EACCES")}


def _refusing(code: int, call: str) -> Callable[[Clock], None]:
    """The system answers a call on checkpoints with an error from then on; while pruning, that of
    the thread that prunes.
    """

    def change(clock: Clock) -> None:
        folder = clock.fault.mark.removesuffix("-mark")
        pruning: set[int] = set()
        tidy = folders.tidy

        def tidied(*args: Any) -> None:
            pruning.add(threading.get_ident())
            tidy(*args)
            pruning.clear()

        replace(folders, "tidy", tidied)

        def is_now() -> bool:
            if clock.fault.moment == "pruning":
                return clock.is_after_step and threading.get_ident() in pruning
            return clock.is_after_step

        def refused(original: Any) -> Any:
            def ask(what: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> Any:
                path = _path_of(what, dir_fd)
                is_wanted = call != "manifest" or pathlib.Path(path).name.startswith(NAME)
                is_ours = f"{path}/".startswith(f"{folder}/step-") or (
                    call == "list" and path == folder
                )
                if is_wanted and is_ours and is_now():
                    clock.fault.note()
                    raise OSError(code, os.strerror(code), path)
                if dir_fd is not None:
                    kwargs["dir_fd"] = dir_fd
                return original(what, *args, **kwargs)

            return ask

        for owner, name in CALLS[call]:
            replace(owner, name, refused(getattr(owner, name)))

    return change


def _path_of(what: Any, dir_fd: int | None) -> str:
    """The path of what a call of the system is given: a path, or a number of an open file."""
    if isinstance(what, int):
        return os.readlink(f"/proc/self/fd/{what}")
    path = os.fsdecode(what) if isinstance(what, str | bytes | os.PathLike) else ""
    return path if dir_fd is None else os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), path)


CHANGES: dict[str, Callable[[Clock], None]] = {
    "NaN in the losses of a rank": _bad_loss,
    "NaN in one loss of a rank": _bad_loss_once,
    "NaN in the gradients of a rank": _bad_gradient,
    "NaN in a weight": _bad_weight,
    "skipped step": _skipped,
    "one collective more": _one_more,
    "full disk": _full_disk,
    "limit of file sizes": _size_limit,
    "read-only file system": _read_only,
    "unreadable files on a rank": _unreadable,
    **{
        f"{name} at {call}": _refusing(code, call)
        for call in CALLS
        for name, code in ERRORS.items()
    },
}


def install(fault: Fault) -> None:
    """Prepare this process."""
    if fault.timeout is not None:
        limited = functools.partial(bmt.init_distributed, timeout=fault.timeout)
        replace(bmt, "init_distributed", limited)
    if fault.is_here and fault.moment != "import":
        change = CHANGES.get(fault.own_kind) or MOMENTS[fault.moment]
        change(Clock(fault))
