"""Start and end of the distributed run, and the record of it.

The only module that reads environment variables.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import datetime
import faulthandler
import json
import os
import secrets
import signal
import socket
import sys
import threading
import time
import traceback
import urllib.parse
import warnings
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist

from bmtrain.errors import (
    AlreadyInitializedError,
    ConfigurationError,
    JoinError,
    NotInitializedError,
    RanksDivergedError,
    first_line,
)
from bmtrain.runtime import process
from bmtrain.runtime.arguments import COUNT, POSITIVE, SIZE, Rule, check, optional
from bmtrain.runtime.launchers import (
    FOREIGN,
    TORCHRUN,
    Launch,
    local_rank_hint,
    meeting_place,
    number,
    read_launch,
)
from bmtrain.runtime.meeting import Groups, Store, adopt, meet, tell_all
from bmtrain.runtime.mesh import Mesh, build_mesh
from bmtrain.runtime.process import Exit, Launcher, say, this_host
from bmtrain.runtime.seeding import Draws, seed_everything
from bmtrain.runtime.topology import Topology
from bmtrain.runtime.watchdog import Place, Watchdog
from bmtrain.torch_internals import default_store

Service = TypeVar("Service")
TRANSPORTS = ("auto", "copy_engine", "collective")
_TRANSPORT = Rule(f"one of {', '.join(TRANSPORTS)}", TRANSPORTS.__contains__)
_DTYPE = Rule(
    "a floating point torch.dtype", lambda x: isinstance(x, torch.dtype) and x.is_floating_point
)
_DEVICE = Rule("'cpu' or 'cuda'", lambda x: x is None or torch.device(x).type in ("cpu", "cuda"))
_SWITCH = Rule("True or False", lambda x: isinstance(x, bool))
_OURS = "bmtrain-"  # how the names of runs begin that `starting` starts
_LAST_S = 120.0  # that a failed program waits for what it was saving
_INTERRUPTED = "was interrupted by Ctrl-C"
_ANY_GPU = torch.device("cuda")
#: by which programs read the environment
ENVIRONMENT, READ_ENVIRONMENT = os.environ, os.getenv


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
    transport: str = "auto"
    memory_limit: int | None = None
    compile: bool = False
    fp8: bool = False
    loss_scale_factor: float = 2
    loss_scale_steps: int = 1024

    def __post_init__(self) -> None:
        check_zero_level(self.zero_level)
        check(
            "init_distributed",
            transport=(self.transport, _TRANSPORT),
            reduce_dtype=(self.reduce_dtype, optional(_DTYPE)),
            accumulate_dtype=(self.accumulate_dtype, optional(_DTYPE)),
            compile=(self.compile, _SWITCH),
            fp8=(self.fp8, _SWITCH),
            memory_limit=(self.memory_limit, optional(COUNT)),
        )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class World:
    """This process's part in the run: rank, device, axes, defaults and the services on top.

    Attributes:
        draws: the random numbers of this rank.
        watchdog: gets a note of all progress.
        launcher: the torchrun that started this process; None without, and in the process of
            somebody else.
        groups: opens process groups.
        store: a key-value store of this run's own, for the main thread.
        is_guest: whether the process is somebody else's: a worker whose process group was there
            before the run, or whose main thread does something else. Then the run leaves signals,
            hooks and the end of the process alone.
        at_end: what services do before the run's groups go.
    """

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    device: torch.device
    seed: int
    mesh: Mesh
    defaults: Defaults
    draws: Draws
    pipe_enabled: bool
    num_micro_batches: int
    timeout: float
    watchdog: Watchdog
    launcher: Launcher | None
    groups: Groups
    store: Store
    is_guest: bool
    services: dict[object, object] = dataclasses.field(default_factory=dict)
    at_end: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack)

    def service(self, factory: Callable[[World], Service]) -> Service:
        """The run's instance of a service: `factory(world)`, built on first use."""
        if factory not in self.services:
            self.services[factory] = factory(self)
        return cast(Service, self.services[factory])


class _Process:
    """Holds the current world. One per interpreter."""

    def __init__(self) -> None:
        self.world: World | None = None
        self.registered = self.hooked = False
        self.stores: dict[str, Store] = {}


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
        _PROCESS.world.device if _PROCESS.world else _pick_device(local_rank_hint(os.environ), None)
    )


def unwatched() -> contextlib.AbstractContextManager[None]:
    """A context for work that takes long without a collective or an optimizer step.

        with bmtrain.unwatched():
            rebuild_index()

    The watchdog does not count its time as a hang. Ranks that wait for this work
    enter it too.
    """
    return current("unwatched").watchdog.off()


def launched() -> Launch:
    """What the launcher says of this process; a world of one without a launcher."""
    return read_launch(os.environ)


def take_place(rank: int, size: int) -> None:
    """Set the environment of rank `rank` of `size` on one host, overriding any launcher's.

    For processes that the library starts itself.
    """
    for name in FOREIGN:
        os.environ.pop(name, None)
    os.environ.update(_place(rank, size))


def _place(rank: int, size: int) -> dict[str, str]:
    own, all_ranks = str(rank), str(size)
    return {"RANK": own, "LOCAL_RANK": own, "WORLD_SIZE": all_ranks, "LOCAL_WORLD_SIZE": all_ranks}


def environment_of(rank: int, size: int, port: int) -> dict[str, str]:
    """The environment of a rank that this process starts, as torchrun would set it.

    It so watches this process as it would watch torchrun.
    """
    kept = {name: value for name, value in os.environ.items() if name not in FOREIGN}
    threads = str(max((os.cpu_count() or 1) // size, 1))
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GROUP_WORLD_SIZE": "1"}
    run = {TORCHRUN: f"{_OURS}{os.getpid()}-{port}"}
    return {"OMP_NUM_THREADS": threads, **kept, **_place(rank, size), **meeting, **run}


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
    watchdog: float | Literal["auto"] | None = "auto",
    reduce_dtype: torch.dtype | None = None,
    accumulate_dtype: torch.dtype | None = None,
    transport: str = "auto",
    memory_limit: int | None = None,
    compile: bool | None = None,
    fp8: bool = False,
    loss_scale_factor: float = 2,
    loss_scale_steps: int = 1024,
) -> None:
    """Join the run: read the launcher's environment, pick the device, build the groups, set seeds.

    The ranks are those of torchrun, srun, mpirun or mpiexec; without a launcher the world is this
    process alone. Where torch.distributed is initialised already, by Ray Train for example, its
    process group is adopted: the ranks are those of it, `shutdown` closes only the groups that the
    run has added, and signals, hooks and the end of the process are left alone. Call it on all
    ranks of the group.

    Args:
        init_method: rendezvous URL of torch.distributed; "env://" is where the launcher says.
        seed: seeds torch, random and numpy identically on every rank, so that all ranks initialise
            the same model. In training, blocks and layers draw other numbers on each data-parallel
            rank, for dropout.
        pipe_size: number of pipeline stages; -1 for no pipeline.
        num_micro_batches: micro-batches of the pipeline; by default the number of stages.
        tp_size: ranks that share each tensor-parallel layer.
        zero_level: 2 keeps full parameters until backward, 3 releases them after forward. This and
            the dtypes, `compile` and `fp8` are defaults of every Block, which its own arguments
            override.
        device: "cpu" or "cuda", or one GPU by its number ("cuda:1"); by default CUDA if available,
            and the GPU of the local rank, in an adopted process the one that is current.
        timeout: seconds that the ranks wait for each other: to join, and in any collective.
        watchdog: seconds without progress after which a run is reported as hanging and ended,
            counted from the first optimizer step on; "auto" derives them from `timeout`, None never
            ends a run.
        reduce_dtype: dtype in which gradients are communicated and summed over ranks; None is the
            parameter's own.
        accumulate_dtype: dtype in which gradients of several micro-batches are accumulated; None is
            the parameter's own.
        transport: how shards and gradients of blocks are moved. "copy_engine" copies between the
            ranks of one host and occupies no SMs; "collective" uses NCCL or Gloo; "auto" copies
            where GPUs can access each other's memory.
        memory_limit: bytes of device memory that blocks with use_checkpoint="auto" may fill in a
            step; None is the capacity of the device. On a CPU it bounds what those blocks save for
            backward, and None saves everything.
        compile: whether blocks run compiled in passes that lead to a backward pass; None compiles
            on CUDA if Triton and a C compiler are found.
        fp8: whether the linear layers of blocks compute in FP8.
        loss_scale_factor, loss_scale_steps: factor by which an optimizer's loss scale changes, and
            the number of good steps before it grows, in programs of the 0.1.x API
            (`optimizer.loss_scale`, `optim_step`). An OptimManager has its own.

    From here on, a rank whose torchrun has ended ends itself. After an error, and after `shutdown`,
    it can be called again, by all ranks.

    Raises:
        AlreadyInitializedError: while a run of this process is open.
        ConfigurationError: if the sizes do not divide the world, an argument is out of range, an
            environment variable is malformed or contradicts another, several processes are meant
            and this one has no rank, `init_method` is given beside a process group, or a rank has
            no GPU of its own.
        JoinError: if the ranks do not find each other within `timeout`.
    """
    if _PROCESS.world is not None and not _PROCESS.world.groups.are_alive:
        shutdown()  # a run whose process group its owner has destroyed
    if _PROCESS.world is not None:
        raise AlreadyInitializedError(
            f"a run of {_PROCESS.world.world_size} rank(s) is open in this process: call "
            "bmtrain.shutdown() on all ranks first, or use the run (bmtrain.is_initialized())."
        )
    is_main = threading.current_thread() is threading.main_thread()
    is_ours = os.environ.get(TORCHRUN, "").startswith(_OURS)
    if is_main and is_ours and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # see `starting`
    is_adopted, is_torchrun = dist.is_initialized(), TORCHRUN in os.environ
    agent_hosts = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # the store
    launcher = None
    if is_torchrun and not is_adopted:
        launcher = Launcher(number(os.environ, "RANK") if "RANK" in os.environ else 0)
    try:
        most = Rule(
            f"a number of seconds up to timeout ({timeout!r}), after which the ranks wait no "
            'longer anyway, "auto", or None for no watchdog',
            lambda x: x in ("auto", None) or (POSITIVE.holds(x) and x <= timeout),
        )
        check(
            "init_distributed",
            timeout=(timeout, POSITIVE),
            watchdog=(watchdog, most),
            device=(device, _DEVICE),
            num_micro_batches=(num_micro_batches, optional(SIZE)),
        )
        launch = _adopted_launch(init_method) if is_adopted else read_launch(os.environ)
        defaults = Defaults(
            zero_level=zero_level,
            reduce_dtype=reduce_dtype,
            accumulate_dtype=accumulate_dtype,
            transport=transport,
            memory_limit=memory_limit,
            compile=False if compile is None else compile,
            fp8=fp8,
            loss_scale_factor=loss_scale_factor,
            loss_scale_steps=loss_scale_steps,
        )
        topology = Topology(
            rank=launch.rank, world_size=launch.size, pipe_size=max(pipe_size, 1), tp_size=tp_size
        )
        url = init_method
        if url == "env://" and not is_adopted:
            url = meeting_place(launch, os.environ)
        with _joining(launch, url, timeout):
            store = _meet(launch, url, timeout, is_adopted, not agent_hosts)
            (local_rank, local_size), chosen = _settle(launch, store, device, is_adopted)
            place = Place(
                launch.rank,
                launch.size,
                chosen,
                timeout,
                is_host=launch.rank == 0 and not is_adopted and not agent_hosts,
                # a process that torchrun has started is the program's own
                is_guest=is_adopted or not (is_main or is_torchrun),
            )
            groups = _open(place, store, is_adopted)
            mesh, dog = _join(place, topology, groups, store, watchdog)
        defaults = dataclasses.replace(defaults, compile=_compiles(compile, chosen))
        _PROCESS.world = World(
            rank=launch.rank,
            world_size=launch.size,
            local_rank=local_rank,
            local_size=local_size,
            device=chosen,
            seed=seed,
            mesh=mesh,
            defaults=defaults,
            draws=Draws(topology, chosen),
            pipe_enabled=pipe_size > 0,
            num_micro_batches=num_micro_batches or topology.pipe_size,
            timeout=timeout,
            watchdog=dog,
            launcher=launcher,
            groups=groups,
            store=store,
            is_guest=place.is_guest,
        )
        seed_everything(seed)
        _take_part_in_the_end(_PROCESS.world)
        if launch.warning and launch.rank == 0:
            warnings.warn(launch.warning, UserWarning, stacklevel=2)
    except BaseException:
        if launcher is not None:
            launcher.left.set()
        raise


def _take_part_in_the_end(world: World) -> None:
    """Have the end of this process end the run. Once."""
    if not _PROCESS.registered:
        _PROCESS.registered = True
        atexit.register(shutdown)
    if world.is_guest:
        return
    if not _PROCESS.hooked:
        _PROCESS.hooked = True
        sys.excepthook = _leave_loudly
    if world.world_size > 1 and not faulthandler.is_enabled():
        faulthandler.enable(2, all_threads=False)  # a crash in C leaves the place


def shutdown() -> None:
    """Leave the run: drop its services and destroy the process groups that it has opened.

    Registered with atexit; safe to call twice.
    """
    world, _PROCESS.world = _PROCESS.world, None
    if world is None:
        return
    world.watchdog.stop()
    if world.launcher is not None:
        world.launcher.left.set()
    world.at_end.close()
    world.services.clear()
    world.mesh.close()
    world.groups.close()
    world.watchdog.see_off()


def _adopted_launch(init_method: str) -> Launch:
    """This process's place in the process group that is there already."""
    if init_method != "env://":
        raise ConfigurationError(
            f"init_method is {init_method!r}, but torch.distributed is initialised already: leave "
            "it out to run on that process group, or call init_distributed before whatever made it."
        )
    if default_store() is None:
        raise ConfigurationError(
            "torch.distributed is initialised already, by a backend without a store (MPI), through "
            "which the ranks would meet: initialise it with Gloo or NCCL, or not at all."
        )
    return Launch(launcher="torch.distributed", rank=dist.get_rank(), size=dist.get_world_size())


def _compiles(wanted: bool | None, chosen: torch.device) -> bool:
    """Whether blocks compile by default."""
    if wanted is not None:
        return wanted
    if chosen.type == "cpu":
        return False
    own = os.environ.get("CC")
    missing = process.missing_for_gpu((own,) if own else process.C_COMPILERS)
    if missing is not None:
        warnings.warn(
            f"blocks run uncompiled: torch.compile needs {missing}, which was not found.",
            UserWarning,
            stacklevel=3,
        )
    return missing is None


def environment() -> dict[str, str]:
    """A copy of the process's environment variables."""
    return dict(os.environ)


def _pick_device(local_rank: int, asked: torch.device | None) -> torch.device:
    if not (torch.cuda.is_available() if asked is None else asked.type == "cuda"):
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if asked is not None and asked.index is not None:
        if asked.index >= count:
            raise ConfigurationError(
                f"device '{asked}' does not exist: this machine shows {count} GPU(s)."
            )
        return asked
    if local_rank >= count:
        # Slurm's --gpus-per-task and containers show each rank its own GPU only, as number 0
        if count == 1 and TORCHRUN not in os.environ:
            return torch.device("cuda", 0)
        raise ConfigurationError(
            f"local rank {local_rank} has no GPU of its own: this machine shows "
            f"{count}; start at most {count} processes on it."
        )
    return torch.device("cuda", local_rank)


def _settle(
    launch: Launch, store: Store, wanted: str | torch.device | None, is_adopted: bool
) -> tuple[tuple[int, int], torch.device]:
    """Local rank and size, and the device. Collective.

    Raises:
        ConfigurationError: on all ranks, if one of them has no device of its own.
    """
    local_rank, local_size = launch.local_rank, launch.local_size
    asked = None if wanted is None else torch.device(wanted)

    def tell(subject: str, words: object) -> list[Any]:
        texts = tell_all(store, subject, launch.rank, launch.size, json.dumps(words))
        return [json.loads(text) for text in texts]

    if local_rank is None or local_size is None:
        own = _current_gpu() if is_adopted else None
        told = tell("place", [*this_host(), own])
        here = [rank for rank in range(launch.size) if told[rank][:2] == told[launch.rank][:2]]
        local_size = len(here)
        local_rank = here.index(launch.rank) if local_rank is None else local_rank
        gpus = {told[rank][2] for rank in here}
        # One that the owner of the process has made current; all have 0 if nobody has.
        if own is not None and len(gpus) == len(here) and asked in (None, _ANY_GPU):
            asked = torch.device("cuda", own)
    problem, chosen = "", torch.device("cpu")
    try:
        chosen = _pick_device(local_rank, asked)
    except ConfigurationError as error:
        problem = str(error)
    told = tell("device", [problem, _gpu_name(chosen)])
    owners: dict[str, int] = {}
    for rank, (text, gpu) in enumerate(told):
        if text:
            raise ConfigurationError(text if rank == launch.rank else f"rank {rank}: {text}")
        if gpu and owners.setdefault(gpu, rank) != rank:
            raise ConfigurationError(
                f"ranks {owners[gpu]} and {rank} have the same GPU ({gpu}): start at most one "
                "process for each GPU, or show each of them a GPU of its own."
            )
    return (local_rank, local_size), chosen


def _gpu_name(chosen: torch.device) -> str:
    """What no other GPU is called; "" for a CPU."""
    if chosen.type != "cuda":
        return ""
    return str(torch.cuda.get_device_properties(chosen).uuid)


def _current_gpu() -> int | None:
    """The GPU that the owner of this process has chosen; 0 if it has not, None without GPUs."""
    if not torch.cuda.is_available():
        return None
    bound = dist.group.WORLD.bound_device_id if dist.group.WORLD is not None else None
    return torch.cuda.current_device() if bound is None else bound.index


@contextlib.contextmanager
def _joining(launch: Launch, url: str, timeout: float) -> Iterator[None]:
    """Errors of torch inside are a JoinError, and of a failed attempt nothing is left."""
    begin, was_initialized = time.monotonic(), dist.is_initialized()
    try:
        yield
    except (RuntimeError, OSError, ValueError) as error:
        if dist.is_initialized() and not was_initialized:
            dist.destroy_process_group()
        if isinstance(error, ConfigurationError):
            raise
        raise JoinError(
            f"rank {launch.rank} of {launch.size} could not join the run at "
            f"{url.removeprefix('tcp://')} "
            f"({time.monotonic() - begin:.0f} s, timeout {timeout:g} s): {first_line(error)}. All "
            "ranks must be started, with the same address and world size, each with a rank of its "
            "own."
        ) from None


def _meet(launch: Launch, url: str, timeout: float, is_adopted: bool, is_hosted: bool) -> Store:
    """A store that the ranks of this run share. Collective. `is_hosted`: by rank 0."""
    if is_adopted:
        return adopt(default_store(), launch.rank, launch.size, timeout)
    if url == "env://":
        return dist.HashStore()  # type: ignore[attr-defined]
    try:
        is_place = str(url).startswith("file://") or urllib.parse.urlparse(url).port is not None
    except ValueError:
        is_place = False
    if not is_place:
        raise ConfigurationError(
            f"init_method is {url!r}: expected env://, file://PATH, or tcp://HOST:PORT with a port "
            "from 0 to 65535."
        )
    return meet(
        _PROCESS.stores,
        url,
        launch.rank,
        launch.size,
        timeout,
        launch.run,
        is_hosted=is_hosted,
        is_local=launch.local_size == launch.size,
    )


def _open(place: Place, store: Store, is_adopted: bool) -> Groups:
    """The run's process groups: their default one, if it is not there yet. Collective.

    CPU tensors always use Gloo, so that agreements between ranks do not synchronise with the
    device.
    """
    is_gpu = place.device.type == "cuda"
    backend = "cpu:gloo,cuda:nccl" if is_gpu else "gloo"
    if is_gpu:
        torch.cuda.set_device(place.device)
    if not is_adopted:
        hook = sys.excepthook
        dist.init_process_group(
            backend,
            store=store,
            rank=place.rank,
            world_size=place.size,
            timeout=datetime.timedelta(seconds=place.timeout),
        )
        sys.excepthook = hook  # torch has put one of its own there
    return Groups(backend if is_adopted else None, place.timeout, is_adopted=is_adopted)


def _join(
    place: Place,
    topology: Topology,
    groups: Groups,
    store: Store,
    watchdog: float | Literal["auto"] | None,
) -> tuple[Mesh, Watchdog]:
    """Build the mesh and start the watchdog; both of them, or nothing is left. Collective."""
    try:
        mesh = build_mesh(topology, groups)
        seconds = watchdog if isinstance(watchdog, int | float) else None
        dog = Watchdog(place, seconds, None if place.size == 1 else store)
        told = [((socket.gethostname(), os.getpid()), secrets.token_bytes(32))] * place.size
        if place.size > 1:
            dist.all_gather_object(told, told[0], group=mesh.world.group)
    except BaseException:
        groups.close()
        raise
    is_on = seconds is not None or (watchdog == "auto" and place.size > 1)
    dog.start([process for process, _ in told], told[0][1], is_on=is_on)
    return mesh, dog


def _leave_loudly(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Exception hook: with several ranks, print this rank's traceback and exit without cleanup.

    A regular interpreter exit would first wait for collectives that the other ranks never join.
    Exiting once what is being saved is written lets the launcher stop them within seconds, with the
    traceback of the failed rank printed first. The other ranks find the error's first line in the
    store.
    """
    world = _PROCESS.world
    if world is None or world.world_size == 1 or world.is_guest:
        sys.__excepthook__(kind, error, trace)
        return
    if threading.current_thread() is threading.main_thread():
        # torchrun passes on the Ctrl-C that this process has had already
        signal.signal(signal.SIGINT, lambda *_: None)
    sys.stdout.flush()
    world.watchdog.let_speak()
    summary = "".join(traceback.format_exception_only(kind, error)).strip()
    calls = process.calls_of_program(traceback.extract_tb(trace))
    lines, others = traceback.format_exception(kind, error, trace), ""
    words, code = f"has failed: {summary.splitlines()[0]}", Exit.FAILED
    if isinstance(error, KeyboardInterrupt):
        words, code = _INTERRUPTED, Exit.INTERRUPTED
        # Ctrl-C reaches all ranks: one of them says so
        if world.watchdog.is_first(_INTERRUPTED):
            say(
                f"[rank {world.rank}] interrupted at {calls[-1].filename}:{calls[-1].lineno} in "
                f"{calls[-1].name}.\n"
            )
    else:
        if isinstance(error, RanksDivergedError):
            # what matters is where the ranks are in the program, not how they found out
            lines, code = traceback.format_list(calls), Exit.PARTED
        else:
            gone = world.watchdog.whereabouts({*range(world.world_size)} - {world.rank})
            others = "".join(f" rank {number} {why}." for number, why in sorted(gone.items()))
        say(
            f"[rank {world.rank}] this rank failed; the run ends.{others} {summary}\n"
            + "".join(lines)
        )
    # a checkpoint that is being written in the background
    ending = threading.Thread(target=world.at_end.close, daemon=True)
    ending.start()
    ending.join(_LAST_S)
    world.watchdog.take_store_down(words)
    os._exit(code)


def num_cores() -> int:
    """Number of CPU cores this process may run on."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
