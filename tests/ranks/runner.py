"""Running a function on several ranks: `run_ranks(fn, world_size, *args)`, the one way tests start
processes.

Rank processes outlive the calls of a pytest worker: a call costs the work of its ranks, not their
birth and torch's first steps. After each call a rank must be as it was before: no run, no thread
and no open file left. A call that fails, hangs or leaves something behind replaces the processes,
so that it spoils nothing else.

Tests marked `fresh` or `compiler`, and calls with `join=False`, get processes of their own. All are
forked from a server that has imported torch and bmtrain already (multiprocessing's "forkserver").
"""

import atexit
import contextlib
import dataclasses
import faulthandler
import functools
import gc
import importlib
import inspect
import multiprocessing
import os
import pathlib
import pickle
import random
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import warnings
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.context import ForkServerProcess
from typing import Any

import numpy
import psutil
import torch
import torch.distributed as dist
from tests.cores import share_cores
from tests.ranks.file_peers import in_files

import bmtrain
from bmtrain.runtime import world

ROOT = pathlib.Path(__file__).parents[2]
TIMEOUT_S = 60.0
# What ranks would else import themselves, some of it at the first optimizer step, meta tensor or
# compilation, seconds each.
PRELOADED = [
    "pytest",
    "torch",
    "torch._dynamo",
    # Where there is a GPU it initialises CUDA, which a forked process cannot use then.
    *([] if torch.cuda.device_count() else ["torch._inductor.compile_fx"]),
    "torch._meta_registrations",
    "safetensors.torch",
    "transformers",
    "model_center.commands.generate",
    "tests.ranks.runner",
]
GRACE_S = 2.0  # how long the other ranks may go on after one has failed


class RankFailure(RuntimeError):
    """A rank raised, died or hung; the message holds what it left behind."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one rank says at its end; `value` and `error` are pickled."""

    rank: int
    value: bytes = b""
    error: bytes = b""
    trace: str = ""
    when: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Job:
    """What a rank is told at its start; `call` is the pickled (fn, args)."""

    call: bytes
    environment: dict[str, str]
    log: str
    timeout: float
    init: dict[str, Any] | None

    @property
    def rank(self):
        return int(self.environment["RANK"])


@dataclasses.dataclass(frozen=True)
class _Member:
    """A rank's process, and the pipe on which it gets jobs and says outcomes."""

    process: ForkServerProcess
    pipe: connection.Connection


class Pool:
    """The ranks of this process, started when they are needed first.

    Attributes:
        is_fresh: whether the test that runs now wants processes of its own.
    """

    def __init__(self):
        self.is_fresh = False
        self._members = []
        self._store = None

    def outcomes(self, jobs, deadline):
        """Perform a job on each rank; those that arrive before the deadline."""
        while len(self._members) < len(jobs):
            self._members.append(_started(len(self._members), None))
        members = self._members[: len(jobs)]
        try:
            for job, member in zip(jobs, members, strict=True):
                member.pipe.send(job)
            outcomes = _collect(members, deadline)
        except BaseException:  # an interrupt: nobody knows what the ranks are in
            self.close()
            raise
        if len(outcomes) < len(jobs) or any(outcome.trace for outcome in outcomes):
            self.close()
        return outcomes

    @property
    def port(self):
        """Of the store in which all runs of these processes meet.

        One per call would be gone while ranks that were told so late still speak to it.
        """
        if self._store is None:
            self._store = new_store()
        return int(self._store.port)

    def close(self):
        """Kill the ranks; the next call starts others."""
        members, self._members, self._store = self._members, [], None
        for member in members:
            member.process.kill()
        for member in members:
            member.process.join()
            member.pipe.close()

    def processor_time(self):
        """Seconds of the fork server and of all ranks so far, dead ones included."""
        server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
        pids = [server, *(member.process.pid for member in self._members)]
        return sum(
            sum(psutil.Process(pid).cpu_times()[:4]) for pid in pids if psutil.pid_exists(pid or -1)
        )


POOL = Pool()


def run_ranks(fn, world_size, *args, timeout=TIMEOUT_S, device="cpu", init=None, join=True):
    """Run `fn(*args)` on `world_size` ranks, inside `bmtrain.init_distributed(**init)`.

    Args:
        fn: a function at the top of a module. Its arguments and result must pickle (tensors do).
        timeout: seconds for all; then every rank prints its stack and is killed.
        device: where the ranks compute; None for their GPUs.
        init: arguments of `init_distributed`, `zero_level` for example. Ranks draw the same random
            numbers then, as one process does for the rows that they all have. "copy_engine" copies
            through files on CPUs, see file_peers.py.
        join: False leaves the call of `init_distributed` to `fn`, in processes of its own; the
            environment is set all the same.

    Returns the ranks' results in rank order. If a rank raises, the exception of the first one is
    raised here (if it pickles), with the rank's traceback as its cause; a rank that hangs or dies
    is a RankFailure with all that the ranks printed. Warnings are errors on the ranks too.
    """
    __tracebackhide__ = True
    given = {"device": device, "timeout": timeout, **(init or {})} if join else None
    is_fresh = POOL.is_fresh or not join
    outcomes, printed = perform(fn, world_size, *args, timeout=timeout, init=given, fresh=is_fresh)
    return _results(outcomes, world_size, printed)


def on_ranks(world_size, **options):
    """The test runs on so many ranks, with these options of `run_ranks`."""

    def decorate(test):
        @functools.wraps(test)
        def started(**given):
            run_ranks(_call, world_size, test.__module__, test.__name__, given, **options)

        return started

    return decorate


def _call(module, name, given):
    return inspect.unwrap(getattr(importlib.import_module(module), name))(**given)


def perform(fn, world_size, *args, timeout, init, fresh):
    """As `run_ranks`; the outcomes that arrive in time, in any order, and what the ranks print."""
    store = new_store() if fresh else None
    port = POOL.port if store is None else store.port
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        jobs = [
            _Job(
                call=pickle.dumps((fn, args)),
                environment=environment_of(rank, world_size, port),
                log=str(pathlib.Path(folder, f"rank{rank}.log")),
                timeout=timeout,
                init=init,
            )
            for rank in range(world_size)
        ]
        deadline = time.monotonic() + timeout + GRACE_S
        if not fresh:
            return POOL.outcomes(jobs, deadline), "".join(map(_read_log, jobs))
        outcomes = _on_fresh_processes(jobs, deadline, timeout)
        return outcomes, "".join(map(_read_log, jobs))


def _on_fresh_processes(jobs, deadline, timeout):
    members = [_started(job.rank, job) for job in jobs]
    outcomes = []
    try:
        outcomes = _collect(members, deadline)
    finally:
        all_well = len(outcomes) == len(jobs) and not any(outcome.trace for outcome in outcomes)
        codes = [_end(member.process, timeout if all_well else GRACE_S) for member in members]
        for member in members:
            member.pipe.close()
    if all_well and any(codes):
        raise RankFailure(
            f"the ranks returned, but their processes ended with exit codes {codes}:\n"
            + "".join(map(_read_log, jobs))
        )
    return outcomes


def free_port():
    """One that nobody listens to; another process may take it first."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def new_store():
    """Where ranks meet, as torchrun's agent has it."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]


def environment_of(rank, world_size, port):
    """What torchrun would set, and which test runs.

    The agent's store is ours: its port was free when it was opened, with no race for it.
    """
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "PYTEST_CURRENT_TEST": os.environ.get("PYTEST_CURRENT_TEST", ""),
    }


@functools.cache
def fork_server():
    """The fork server, started at the first call.

    It inherits the environment that this sets for it.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    changed = {
        "PYTHONPATH": os.pathsep.join(
            [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
        ),
        "OMP_NUM_THREADS": "1",
        # Threads that wait for one another, as the optimizer's on the host, leave cores to others.
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    share_cores()
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        resource_tracker.ensure_running()
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    # before multiprocessing waits for its children, which wait for their pipe to close
    atexit.register(POOL.close)
    return context


def _started(rank, job):
    """A process that performs this job and ends, or without one serves until its pipe closes."""
    context = fork_server()
    here, there = context.Pipe()
    target, args = (_serve, (there,)) if job is None else (_perform_alone, (job, there))
    process = context.Process(target=target, args=args, name=f"rank {rank}", daemon=False)
    process.start()
    there.close()
    return _Member(process, here)


def _collect(members, deadline):
    """The outcomes that arrive before the deadline, which the first failure brings forward."""
    waiting = {member.pipe: rank for rank, member in enumerate(members)}
    outcomes = []
    while waiting and time.monotonic() < deadline:
        for pipe in connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic())):
            rank = waiting.pop(pipe)
            try:
                outcome = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
            except (EOFError, ConnectionResetError):
                members[rank].process.join(GRACE_S)
                code = members[rank].process.exitcode
                outcome = Outcome(
                    rank=rank,
                    trace=f"the process ended with exit code {code}\n",
                    when=time.monotonic(),
                )
            outcomes.append(outcome)
            if outcome.trace:
                deadline = min(deadline, time.monotonic() + GRACE_S)
    return outcomes


def _end(process, patience):
    """Wait for an orderly end, then kill. Returns the exit code."""
    process.join(patience)
    if process.is_alive():
        process.kill()
        process.join()
    return process.exitcode


def _results(outcomes, world_size, printed):
    __tracebackhide__ = True
    failed = sorted(
        (outcome for outcome in outcomes if outcome.trace), key=lambda outcome: outcome.when
    )
    if failed:
        first = failed[0]
        cause = RankFailure(f"rank {first.rank} of {world_size} failed:\n{first.trace}{printed}")
        if first.error:
            raise pickle.loads(first.error) from cause
        raise cause
    late = sorted(set(range(world_size)) - {outcome.rank for outcome in outcomes})
    if late:
        raise RankFailure(
            f"ranks {late} of {world_size} did not end in time; the stacks of those that "
            f"hang:\n{printed}"
        )
    if printed:
        sys.stdout.write(printed)
    return [
        pickle.loads(outcome.value)
        for outcome in sorted(outcomes, key=lambda outcome: outcome.rank)
    ]


def _read_log(job):
    path = pathlib.Path(job.log)
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    return f"-- rank {job.rank} printed:\n{text.rstrip()}\n" if text.strip() else ""


def _perform_alone(job, pipe):
    """The life of a process of one job."""
    _settle()
    outcome = _perform(job)
    pipe.send_bytes(pickle.dumps(outcome))
    pipe.close()
    if not outcome.trace:
        world.shutdown()


def _serve(pipe):
    """The life of a process of many jobs."""
    _settle()
    sizes = set()
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            os._exit(0)
        before = _held()
        size = job.environment["WORLD_SIZE"]
        if size not in sizes:  # the first run of this many ranks connects to the store for all
            sizes.add(size)
            before = before[0], before[1] + 1
        with _as_before():
            outcome = _perform(job)
            if not outcome.trace:
                outcome = _ended(outcome, before)
        faulthandler.cancel_dump_traceback_later()
        pipe.send_bytes(pickle.dumps(outcome))


def _settle():
    """What all rank processes have in common."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # pytest, which gets it too, ends the ranks
    gc.freeze()  # each collection would else walk the heap of torch and transformers: 0.4 s
    torch.set_num_threads(1)


@contextlib.contextmanager
def _as_before():
    """Programs may change what is global; the next one starts from what the first one found."""
    environment, folder = dict(os.environ), pathlib.Path.cwd()
    dtype, hook = torch.get_default_dtype(), sys.excepthook
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        sys.excepthook = hook
        torch.set_default_dtype(dtype)
        torch.set_default_device(None)
        torch.use_deterministic_algorithms(False)
        torch.set_grad_enabled(True)
        torch.set_num_threads(1)
        torch.compiler.reset()  # else the limit of recompilations counts those of all programs
        torch.manual_seed(0)
        random.seed(0)
        numpy.random.seed(0)


def _held():
    """Numbers of Python's threads and of open files of this process."""
    return threading.active_count(), len(_files())


def _files():
    """What the descriptors of this process name, without shared libraries' own."""
    found = []
    for entry in pathlib.Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError):  # the one that lists them
            found.append(os.readlink(entry))
    return found


def _ended(outcome, before):
    """End the run; a failure if something is left of it."""
    try:
        world.shutdown()
        end = time.monotonic() + GRACE_S
        while not torch.cuda.is_initialized():  # CUDA and NCCL keep theirs
            gc.collect()  # more than once: what one collection frees may end another cycle
            if all(now <= then for now, then in zip(_held(), before, strict=True)):
                break
            if time.monotonic() > end:
                raise RankFailure(
                    f"threads and open files after the run are {_held()}, before it {before}: "
                    f"{threading.enumerate()}, {_files()}"
                )
            time.sleep(0.005)
        if torch.cuda.is_initialized():
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    except BaseException:
        return dataclasses.replace(outcome, trace=traceback.format_exc(), when=time.monotonic())
    return outcome


def print_into(path):
    """All that this process prints from now on is added to a file."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.stdout = open(1, "w", buffering=1, closefd=False, encoding="utf-8")  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False, encoding="utf-8")  # noqa: SIM115


def _perform(job):
    """Run the function of a job."""
    print_into(job.log)
    faulthandler.enable(file=sys.stderr)  # a crash in native code leaves the stack in the log
    faulthandler.dump_traceback_later(job.timeout, exit=True, file=sys.stderr)
    os.environ.update(job.environment)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # The compiler asks gathered views for `.grad` and hides torch's answer from users itself,
        # but not from an "error" filter.
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")
        warnings.filterwarnings(
            "ignore", message=".*torch.autograd.function.Function.* should not be instantiated"
        )
        try:
            fn, args = pickle.loads(job.call)
            init = job.init or {}
            with contextlib.ExitStack() as stack:
                if (init.get("transport"), init.get("device")) == ("copy_engine", "cpu"):
                    stack.enter_context(in_files())
                if job.init is not None:
                    bmtrain.init_distributed(**init)
                    # Most functions give all ranks the rows of one process, and compare with that.
                    world.current("a test").draws.same_rows = True
                return Outcome(rank=job.rank, value=pickle.dumps(fn(*args)))
        except BaseException as error:
            return Outcome(
                rank=job.rank,
                error=_pickled(error),
                trace=traceback.format_exc(),
                when=time.monotonic(),
            )


def _pickled(error):
    """The exception, if it survives the journey."""
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:
        return b""
    return data
