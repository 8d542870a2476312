"""Processes that have what launchers give them, and nothing else, find each other and compute what
one process computes.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence

from tests.launching import program
from tests.ranks.runner import fork_server
from tests.ranks.test_again import free_port

from bmtrain.runtime import world
from bmtrain.runtime.launchers import FOREIGN

ROOT = pathlib.Path(__file__).parents[2]
LAUNCHERS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "GROUP_",
    "MASTER_",
    "TORCHELASTIC_",
    "SLURM_",
    "OMPI_",
)


def clean(more: Mapping[str, object]) -> dict[str, str]:
    """The environment without a launcher, and `more`."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(LAUNCHERS) and name not in FOREIGN
    }
    return {
        **kept,
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        **{name: str(value) for name, value in more.items()},
    }


def launch(
    commands: Sequence[tuple[Sequence[str], Mapping[str, object]]], timeout: float = 180
) -> list[tuple[int, str]]:
    """Run commands beside each other; exit code and output of each."""
    processes = [
        subprocess.Popen(
            command,
            env=clean(more),
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for command, more in commands
    ]
    try:
        printed = [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [(process.returncode, text) for process, text in zip(processes, printed, strict=True)]


def tasks(environments: Sequence[Mapping[str, object]]) -> list[tuple[int, str]]:
    """Run the program in processes with these environments; exit code and output of each.

    They are forked from the server of the tests, which spares each its imports.
    """
    with tempfile.TemporaryDirectory() as folder:
        logs = [pathlib.Path(folder, str(number)) for number in range(len(environments))]
        processes = [
            fork_server().Process(target=task, args=(clean(more), str(log)))
            for more, log in zip(environments, logs, strict=True)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(180)
            process.kill()
            process.join()
        codes = [process.exitcode for process in processes]
        assert None not in codes
        return [(code or 0, log.read_text()) for code, log in zip(codes, logs, strict=True)]


def task(where: dict[str, str], log: str) -> None:
    """In a process of its own: nothing but this environment, as a launcher leaves it."""
    os.environ.clear()
    os.environ.update(where)
    printed = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    sys.stdout = open(1, "w", closefd=False, encoding="utf-8")  # noqa: SIM115
    program.main()
    sys.stdout.flush()
    world.shutdown()  # at the exit of a program of its own


def places(found: Sequence[tuple[int, str]]) -> list[list[int]]:
    """Rank, size, local rank, local size of every rank, sorted; all have compared well."""
    assert [code for code, _ in found] == [0] * len(found), found
    text = "".join(text for _, text in found)
    return sorted(json.loads(place) for place in re.findall(r"PLACE (\[.*?\])", text))


def agent(port: int, hosts: int, per_host: int) -> list[str]:
    """torchrun on one of several hosts, which are all this one."""
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes", str(hosts), "--nproc-per-node", str(per_host)),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "test"),
        *("--local-addr", "127.0.0.1"),
    ]


def test_two_agents_of_torchrun() -> None:
    command = [*agent(free_port(), 2, 1), "-m", "tests.launching.program"]
    assert places(launch([(command, {})] * 2)) == [[0, 2, 0, 1], [1, 2, 0, 1]]


def step(rank: int, size: int, **more: object) -> dict[str, object]:
    """What srun sets for a task on this host, in a job of its own."""
    return {
        "SLURM_JOB_ID": os.getpid(),
        "SLURM_STEP_ID": 0,
        "SLURM_PROCID": rank,
        "SLURM_LOCALID": rank,
        "SLURM_NODEID": 0,
        "SLURM_NTASKS": size,
        "SLURM_STEP_NUM_TASKS": size,
        "SLURM_STEP_NUM_NODES": 1,
        "SLURM_STEP_TASKS_PER_NODE": size,
        "SLURM_STEP_NODELIST": socket.gethostname(),
        **more,
    }


def test_tasks_of_srun() -> None:
    found = tasks([step(rank, 2) for rank in range(2)])
    assert places(found) == [[0, 2, 0, 2], [1, 2, 1, 2]]


def test_tasks_of_srun_on_several_hosts() -> None:
    """The first host of the list is met by its name: here all names are this host's."""
    environments = [
        step(
            rank,
            2,
            SLURM_STEP_ID=1,
            SLURM_LOCALID=0,
            SLURM_NODEID=rank,
            SLURM_STEP_NUM_NODES=2,
            SLURM_STEP_TASKS_PER_NODE="1(x2)",
            SLURM_STEP_NODELIST="localhost,localhost[2-3]",
        )
        for rank in range(2)
    ]
    assert places(tasks(environments)) == [[0, 2, 0, 1], [1, 2, 0, 1]]


def test_ranks_of_mpirun() -> None:
    environments = [
        {
            "OMPI_COMM_WORLD_RANK": rank,
            "OMPI_COMM_WORLD_SIZE": 2,
            "OMPI_COMM_WORLD_LOCAL_RANK": rank,
            "OMPI_COMM_WORLD_LOCAL_SIZE": 2,
            "PMIX_NAMESPACE": f"prterun-{os.getpid()}@1",
        }
        for rank in range(2)
    ]
    assert places(tasks(environments)) == [[0, 2, 0, 2], [1, 2, 1, 2]]


def test_ranks_whose_hosts_nobody_has_said() -> None:
    """RANK, WORLD_SIZE and the place to meet are enough: hosts are told among the ranks."""
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    environments = [{"RANK": rank, "WORLD_SIZE": 2, **where} for rank in range(2)]
    assert places(tasks(environments)) == [[0, 2, 0, 2], [1, 2, 1, 2]]


def test_several_processes_without_ranks_end() -> None:
    cases: list[tuple[dict[str, object], str]] = [
        ({"SLURM_NTASKS": 2}, "start the program with srun"),
        ({"WORLD_SIZE": 2}, "RANK is not set"),
        ({**step(1, 2), "RANK": 0, "WORLD_SIZE": 1}, "contradict srun"),
    ]
    found = tasks([environment for environment, _ in cases])
    for (code, printed), (_, words) in zip(found, cases, strict=True):
        assert code == 1 and "ConfigurationError" in printed and words in printed
