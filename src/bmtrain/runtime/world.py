"""Start and end of the distributed run, and the record of it.

The only module that reads environment variables.
"""

from __future__ import annotations

import atexit
import dataclasses
import datetime
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from bmtrain.errors import ConfigurationError, NotInitializedError
from bmtrain.runtime import toolchain
from bmtrain.runtime.mesh import Mesh, build_mesh
from bmtrain.runtime.seeding import seed_everything
from bmtrain.runtime.topology import Topology

Service = TypeVar("Service")
TRANSPORTS = ("auto", "copy_engine", "collective")


def check_zero_level(level: int) -> None:
    """Raise ConfigurationError unless `level` is 2 or 3."""
    if level not in (2, 3):
        raise ConfigurationError(
            f"zero_level is {level!r}: expected 2 (keep full parameters until backward) or "
            "3 (release them)."
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Defaults:
    """Defaults of every Block; a Block's own arguments override them.

    Attributes:
        zero_level: 2 keeps full parameters until backward, 3 releases them after forward.
        reduce_dtype: dtype in which gradients are communicated and summed over ranks; None is the
            parameter's own.
        accumulate_dtype: dtype in which gradients of several micro-batches are accumulated; None
            is the parameter's own.
        num_buffers: full buffers in the ring that ZeRO-3 blocks of one size share.
        transport: how shards and gradients of blocks are moved. "copy_engine" copies between the
            ranks of one host and occupies no SMs; "collective" uses NCCL or Gloo; "auto" copies
            where GPUs can access each other's memory.
        memory_limit: bytes of device memory that blocks with use_checkpoint="auto" may fill in a
            step; None is the capacity of the device. Memory of a CPU is not tracked: there it
            bounds what those blocks save for backward, and None saves everything.
        compile: whether blocks run compiled in passes that lead to a backward pass.
        fp8: whether the linear layers of blocks compute in FP8.
        loss_scale_factor, loss_scale_steps: factor by which an optimizer's loss scale changes, and
            the number of good steps before it grows, in programs of the 0.1.x API
            (`optimizer.loss_scale`, `optim_step`). An OptimManager has its own.

    Raises:
        ConfigurationError: for a value out of range.
    """

    zero_level: int = 3
    reduce_dtype: torch.dtype | None = None
    accumulate_dtype: torch.dtype | None = None
    num_buffers: int = 3
    transport: str = "auto"
    memory_limit: int | None = None
    compile: bool = False
    fp8: bool = False
    loss_scale_factor: float = 2
    loss_scale_steps: int = 1024

    def __post_init__(self) -> None:
        check_zero_level(self.zero_level)
        if self.transport not in TRANSPORTS:
            raise ConfigurationError(
                f"transport is {self.transport!r}: expected one of {', '.join(TRANSPORTS)}."
            )
        for name in ("reduce_dtype", "accumulate_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not (
                isinstance(dtype, torch.dtype) and dtype.is_floating_point
            ):
                raise ConfigurationError(
                    f"{name} is {dtype!r}: expected a floating point torch.dtype or None."
                )
        for name, value in (("compile", self.compile), ("fp8", self.fp8)):
            if not isinstance(value, bool):
                raise ConfigurationError(f"{name} is {value!r}: expected True or False.")
        if type(self.num_buffers) is not int or self.num_buffers < 2:
            raise ConfigurationError(
                f"num_buffers is {self.num_buffers}: expected at least 2, one in use and "
                "one being filled."
            )
        if self.memory_limit is not None and not (
            type(self.memory_limit) is int and self.memory_limit >= 0
        ):
            raise ConfigurationError(
                f"memory_limit is {self.memory_limit!r}: expected a whole number of bytes, or None."
            )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class World:
    """This process's part in the run: rank, device, axes, defaults and the services on top."""

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    device: torch.device
    seed: int
    mesh: Mesh
    defaults: Defaults
    pipe_enabled: bool
    num_micro_batches: int
    timeout: float
    services: dict[object, object] = dataclasses.field(default_factory=dict)

    def service(self, factory: Callable[[World], Service]) -> Service:
        """The run's instance of a service: `factory(world)`, built on first use."""
        if factory not in self.services:
            self.services[factory] = factory(self)
        return cast(Service, self.services[factory])


class _Process:
    """Holds the current world. One per interpreter."""

    def __init__(self) -> None:
        self.world: World | None = None
        self.registered = False


_PROCESS = _Process()


def is_initialized() -> bool:
    """Whether the run is active: after `init_distributed` and before `shutdown`."""
    return _PROCESS.world is not None


def current(what: str = "this call") -> World:
    """The current world; raises NotInitializedError naming `what` before `init_distributed`."""
    if _PROCESS.world is None:
        raise NotInitializedError(what)
    return _PROCESS.world


def rank() -> int:
    """This process's rank in the world; 0 before `init_distributed`."""
    return _PROCESS.world.rank if _PROCESS.world else 0


def world_size() -> int:
    """Number of ranks in the world; 1 before `init_distributed`."""
    return _PROCESS.world.world_size if _PROCESS.world else 1


def device() -> torch.device:
    """The device this rank computes on: its CUDA device, or the CPU if there is none."""
    return (
        _PROCESS.world.device
        if _PROCESS.world
        else _pick_device(int(os.environ.get("LOCAL_RANK", "0")), None)
    )


def launcher() -> int | None:
    """Process id of the torchrun that started this process; None without torchrun."""
    return os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None


def launched_size() -> int:
    """The world size set by the launcher; 1 without a launcher."""
    return _place_in_launch()[1]


def launched_rank() -> int:
    """The rank set by the launcher; 0 without a launcher."""
    return _place_in_launch()[0]


def take_place(rank: int, size: int) -> None:
    """Set the environment of rank `rank` of `size` on one host, overriding any launcher's.

    For processes that the library starts itself.
    """
    os.environ.update(
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
        }
    )


def init_distributed(  # noqa: PLR0913 (BMTrain's arguments)
    init_method: str = "env://",
    seed: int = 0,
    pipe_size: int = -1,
    num_micro_batches: int | None = None,
    tp_size: int = 1,
    *,
    zero_level: int = 3,
    device: str | torch.device | None = None,
    timeout: float = 1800.0,
    reduce_dtype: torch.dtype | None = None,
    accumulate_dtype: torch.dtype | None = None,
    num_buffers: int = 3,
    transport: str = "auto",
    memory_limit: int | None = None,
    compile: bool | None = None,
    fp8: bool = False,
    loss_scale_factor: float = 2,
    loss_scale_steps: int = 1024,
) -> None:
    """Join the run: read the launcher's environment, pick the device, build the groups, set seeds.

    Args:
        init_method: rendezvous URL of torch.distributed; "env://" without a launcher is a world of
            one process.
        seed: seeds torch, random and numpy identically on every rank, so that all ranks initialise
            the same model.
        pipe_size: number of pipeline stages; -1 for no pipeline.
        num_micro_batches: micro-batches of the pipeline; by default the number of stages.
        tp_size: ranks that share each tensor-parallel layer.
        zero_level: 2 or 3, the default of every Block.
        device: "cpu" or "cuda"; by default CUDA if available.
        timeout: seconds a collective may wait for the other ranks.
        reduce_dtype, accumulate_dtype, num_buffers, transport, memory_limit, fp8, loss_scale_*: see
            `Defaults`.
        compile: see `Defaults`; None compiles on CUDA if Triton and a C compiler are found.

    Raises:
        RuntimeError: on a second call.
        ConfigurationError: if the sizes do not divide the world, an argument is out of range, an
            environment variable is malformed, or this rank has no GPU of its own.
    """
    if _PROCESS.world is not None:
        raise RuntimeError(
            "init_distributed was called a second time: call it once, at the start of the program."
        )
    if not timeout > 0:
        raise ConfigurationError(f"timeout is {timeout!r}: expected a number of seconds.")
    number, size, local_rank, local_size = _place_in_launch()
    chosen = _pick_device(local_rank, device)
    defaults = Defaults(
        zero_level=zero_level,
        reduce_dtype=reduce_dtype,
        accumulate_dtype=accumulate_dtype,
        num_buffers=num_buffers,
        transport=transport,
        memory_limit=memory_limit,
        compile=_compiles(compile, chosen),
        fp8=fp8,
        loss_scale_factor=loss_scale_factor,
        loss_scale_steps=loss_scale_steps,
    )
    topology = Topology(rank=number, world_size=size, pipe_size=max(pipe_size, 1), tp_size=tp_size)
    micro_batches = _num_micro_batches(num_micro_batches, pipe_size)
    _join(init_method, number, size, chosen, timeout)
    _PROCESS.world = World(
        rank=number,
        world_size=size,
        local_rank=local_rank,
        local_size=local_size,
        device=chosen,
        seed=seed,
        mesh=build_mesh(topology),
        defaults=defaults,
        pipe_enabled=pipe_size > 0,
        num_micro_batches=micro_batches,
        timeout=timeout,
    )
    seed_everything(seed)
    if not _PROCESS.registered:
        _PROCESS.registered = True
        atexit.register(shutdown)
        sys.excepthook = _leave_loudly


def shutdown() -> None:
    """Leave the run: drop its services and destroy the process groups.

    Registered with atexit; safe to call twice.
    """
    world, _PROCESS.world = _PROCESS.world, None
    if world is None:
        return
    world.services.clear()
    world.mesh.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def _place_in_launch() -> tuple[int, int, int, int]:
    """Rank, world size, local rank and local world size, as set by the launcher."""
    number, size = _environment_number("RANK", 0), _environment_number("WORLD_SIZE", 1)
    return (
        number,
        size,
        _environment_number("LOCAL_RANK", number),
        _environment_number("LOCAL_WORLD_SIZE", size),
    )


def _compiles(wanted: bool | None, chosen: torch.device) -> bool:
    """Whether blocks compile by default."""
    if wanted is not None:
        return wanted
    if chosen.type == "cpu":
        return False
    own = os.environ.get("CC")
    missing = toolchain.missing_for_gpu((own,) if own else toolchain.C_COMPILERS)
    if missing is not None:
        warnings.warn(
            f"blocks run uncompiled: torch.compile needs {missing}, which was not found.",
            UserWarning,
            stacklevel=3,
        )
    return missing is None


def _num_micro_batches(wanted: int | None, pipe_size: int) -> int:
    if wanted is not None and wanted < 1:
        raise ConfigurationError(
            f"num_micro_batches is {wanted}: expected at least 1, or None for as many as stages."
        )
    return max(pipe_size, 1) if wanted is None else wanted


def _environment_number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not re.fullmatch(r"\s*-?[0-9]+\s*", text):
        raise ConfigurationError(
            f"the environment variable {name} is {text!r}: expected a whole number; "
            "start the program with torchrun."
        )
    return int(text)


def _pick_device(local_rank: int, wanted: str | torch.device | None) -> torch.device:
    kind = (
        torch.device(wanted).type
        if wanted is not None
        else ("cuda" if torch.cuda.is_available() else "cpu")
    )
    if kind == "cpu":
        return torch.device("cpu")
    if kind != "cuda":
        raise ConfigurationError(f"device {wanted!r} is not supported: expected 'cpu' or 'cuda'.")
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise ConfigurationError(
            f"local rank {local_rank} has no GPU of its own: this machine shows "
            f"{count}; start at most {count} processes on it."
        )
    return torch.device("cuda", local_rank)


def _join(init_method: str, number: int, size: int, chosen: torch.device, timeout: float) -> None:
    """Initialise torch.distributed.

    CPU tensors always use Gloo, so that agreements between ranks do not synchronise with the
    device.
    """
    cuda = chosen.type == "cuda"
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    if cuda:
        torch.cuda.set_device(chosen)
    limit = datetime.timedelta(seconds=timeout)
    if size == 1 and init_method == "env://":
        dist.init_process_group(
            backend,
            store=dist.HashStore(),  # type: ignore[attr-defined]
            rank=0,
            world_size=1,
            timeout=limit,
        )
        return
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if init_method == "env://" and name not in os.environ:
            raise ConfigurationError(
                f"WORLD_SIZE is {size} but {name} is not set: start the program with "
                "torchrun, which sets it."
            )
    dist.init_process_group(
        backend, init_method=init_method, rank=number, world_size=size, timeout=limit
    )


def _leave_loudly(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Exception hook: with several ranks, print this rank's traceback and exit without cleanup.

    A regular interpreter exit would first wait for collectives that the other ranks never join.
    Exiting at once lets the launcher stop them within seconds, with the traceback of the failed
    rank printed first.
    """
    world = _PROCESS.world
    lines = traceback.format_exception(kind, error, trace)
    if world is None or world.world_size == 1:
        sys.__excepthook__(kind, error, trace)
        return
    sys.stdout.flush()
    sys.stderr.write(f"[rank {world.rank}] this rank failed; the run ends.\n" + "".join(lines))
    sys.stderr.flush()
    os._exit(130 if issubclass(kind, KeyboardInterrupt) else 1)


def num_cores() -> int:
    """Number of CPU cores this process may run on."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
