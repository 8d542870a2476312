"""Running a function on several ranks: `run_ranks(fn, world_size, *args)`, the one way tests start
processes.

Every call gets fresh processes, so that a test that hangs, dies or leaves state behind spoils
nothing else. They are forked from a server that has imported torch and bmtrain already
(multiprocessing's "forkserver"), which makes a rank cost some hundredths of a second instead of the
seconds of an import.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import functools
import multiprocessing
import os
import pathlib
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.context import ForkServerProcess
from typing import Any

import torch
import torch.distributed as dist
from tests.cores import share_cores

import bmtrain
from bmtrain.runtime import world
from bmtrain.shard import gradient

ROOT = pathlib.Path(__file__).parents[2]
TIMEOUT_S = 60.0
# What ranks would else import themselves, some of it at the first optimizer step or meta tensor,
# seconds each.
PRELOADED = [
    "pytest",
    "torch",
    "torch._dynamo",
    "torch._meta_registrations",
    "safetensors.torch",
    "transformers",
    "peft",  # and bitsandbytes, which it imports where it makes layers
    "peft.tuners.lora.bnb",
    "model_center.commands.generate",
    "tests.ranks.runner",
]
GRACE_S = 2.0  # how long the other ranks may go on after one has failed


class RankFailure(RuntimeError):
    """A rank raised, died or hung; the message holds what it left behind."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Outcome:
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
    def rank(self) -> int:
        return int(self.environment["RANK"])


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = TIMEOUT_S,
    device: str | None = "cpu",
    init: dict[str, Any] | None = None,
    join: bool = True,
) -> list[Any]:
    """Run `fn(*args)` on `world_size` ranks, each a process of its own inside
    `bmtrain.init_distributed(**init)`.

    Args:
        fn: a function at the top of a module. Its arguments and result must pickle (tensors do).
        timeout: seconds for all; then every rank prints its stack and is killed.
        device: where the ranks compute; None for their GPUs.
        init: arguments of `init_distributed`, `zero_level` for example.
        join: False leaves the call of `init_distributed` to `fn`; the environment is set all the
            same.

    Returns the ranks' results in rank order. If a rank raises, the exception of the first one is
    raised here (if it pickles), with the rank's traceback as its cause; a rank that hangs or dies
    is a RankFailure with all that the ranks printed. Warnings are errors on the ranks too.
    """
    __tracebackhide__ = True
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        jobs = [
            _Job(
                call=pickle.dumps((fn, args)),
                environment=_environment(rank, world_size, store.port),
                log=str(pathlib.Path(folder, f"rank{rank}.log")),
                timeout=timeout,
                init={"device": device, "timeout": timeout, **(init or {})} if join else None,
            )
            for rank in range(world_size)
        ]
        running = [_start(job) for job in jobs]
        outcomes: list[_Outcome] = []
        try:
            outcomes = _collect(running, time.monotonic() + timeout + GRACE_S)
        finally:
            all_well = len(outcomes) == world_size and not any(
                outcome.trace for outcome in outcomes
            )
            codes = [_end(process, timeout if all_well else GRACE_S) for process, _ in running]
            for _, pipe in running:
                pipe.close()
        printed = "".join(_read_log(job) for job in jobs)
    if all_well and any(codes):
        raise RankFailure(
            f"the ranks returned, but their processes ended with exit codes {codes}:\n{printed}"
        )
    return _results(outcomes, world_size, printed)


def _environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What torchrun would set.

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
    }


@functools.cache
def fork_server() -> multiprocessing.context.ForkServerContext:
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
    return context


def _start(job: _Job) -> tuple[ForkServerProcess, connection.Connection]:
    context = fork_server()
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(job, there), name=f"rank {job.rank}", daemon=False)
    process.start()
    there.close()
    return process, here


def _collect(
    running: Sequence[tuple[ForkServerProcess, connection.Connection]], deadline: float
) -> list[_Outcome]:
    """The outcomes that arrive before the deadline, which the first failure brings forward."""
    waiting: dict[Any, int] = {pipe: rank for rank, (_, pipe) in enumerate(running)}
    outcomes: list[_Outcome] = []
    while waiting and time.monotonic() < deadline:
        for pipe in connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic())):
            rank = waiting.pop(pipe)
            try:
                outcome: _Outcome = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                running[rank][0].join(GRACE_S)
                code = running[rank][0].exitcode
                outcome = _Outcome(
                    rank=rank,
                    trace=f"the process ended with exit code {code}\n",
                    when=time.monotonic(),
                )
            outcomes.append(outcome)
            if outcome.trace:
                deadline = min(deadline, time.monotonic() + GRACE_S)
    return outcomes


def _end(process: ForkServerProcess, patience: float) -> int | None:
    """Wait for an orderly end, then kill. Returns the exit code."""
    process.join(patience)
    if process.is_alive():
        process.kill()
        process.join()
    return process.exitcode


def _results(outcomes: Sequence[_Outcome], world_size: int, printed: str) -> list[Any]:
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


def _read_log(job: _Job) -> str:
    path = pathlib.Path(job.log)
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    return f"-- rank {job.rank} printed:\n{text.rstrip()}\n" if text.strip() else ""


def _run(job: _Job, pipe: connection.Connection) -> None:
    """The life of a rank's process."""
    log = os.open(job.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False, encoding="utf-8")  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False, encoding="utf-8")  # noqa: SIM115
    faulthandler.enable(file=sys.stderr)  # a crash in native code leaves the stack in the log
    faulthandler.dump_traceback_later(job.timeout, exit=True, file=sys.stderr)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # pytest, which gets it too, ends the ranks
    os.environ.update(job.environment)
    torch.set_num_threads(1)
    gradient.LEAST_FREED = 0  # models of tests are small
    warnings.simplefilter("error")
    # The compiler asks gathered views for `.grad` and hides torch's answer from users itself, but
    # not from an "error" filter.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")
    warnings.filterwarnings(
        "ignore", message=".*torch.autograd.function.Function.* should not be instantiated"
    )
    try:
        fn, args = pickle.loads(job.call)
        if job.init is not None:
            bmtrain.init_distributed(**job.init)
        outcome = _Outcome(rank=job.rank, value=pickle.dumps(fn(*args)))
    except BaseException as error:
        outcome = _Outcome(
            rank=job.rank,
            error=_pickled(error),
            trace=traceback.format_exc(),
            when=time.monotonic(),
        )
    pipe.send_bytes(pickle.dumps(outcome))
    pipe.close()
    if not outcome.trace:
        world.shutdown()


def _pickled(error: BaseException) -> bytes:
    """The exception, if it survives the journey."""
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:
        return b""
    return data
