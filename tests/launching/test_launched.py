"""Processes that have what launchers give them, and nothing else, find each other and compute what
one process computes.
"""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.faults.ranks import run_in
from tests.launching import program

from bmtrain.runtime.launchers import FOREIGN

ROOT = Path(__file__).parents[2]
LAUNCHERS = tuple(
    f"{name}_" for name in ("LOCAL", "GROUP", "MASTER", "TORCHELASTIC", "SLURM", "OMPI")
)


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port


def clean(more):
    """The environment without a launcher, and `more`."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("RANK", "WORLD_SIZE", *LAUNCHERS)) and name not in FOREIGN
    }
    return {
        **kept,
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        **{name: str(value) for name, value in more.items()},
    }


def launch(commands, timeout=180):
    """Run commands beside each other; exit code and output of each."""
    how: Any = {"cwd": ROOT, "text": True, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    processes = [subprocess.Popen(command, env=clean(more), **how) for command, more in commands]
    try:
        printed = [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [(process.returncode, text) for process, text in zip(processes, printed, strict=True)]


def tasks(environments, folder):
    """Run the program in processes with these environments; exit code and output of each.

    They are forked from the server of the tests, which spares each its imports.
    """
    cleaned = [clean(more) for more in environments]
    left = run_in(cleaned, program.main, folder=folder, timeout=180, grace=180)
    found = zip(left.codes, left.printed, strict=True)
    return [(-1 if code is None else code, text) for code, text in found]


def places(found):
    """Rank, size, local rank, local size of every rank, sorted; all have compared well."""
    assert [code for code, _ in found] == [0] * len(found), found
    text = "".join(text for _, text in found)
    return sorted(json.loads(place) for place in re.findall(r"PLACE (\[.*?\])", text))


def agent(port, hosts, per_host):
    """torchrun on one of several hosts, which are all this one."""
    options = f"--nnodes {hosts} --nproc-per-node {per_host} --local-addr 127.0.0.1"
    meeting = f"--rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{port} --rdzv-id test"
    return [sys.executable, "-m", "torch.distributed.run", *options.split(), *meeting.split()]


@pytest.mark.long
def test_torchs_launchers():
    """Two agents of torchrun; the older one, as BMTrain's documents have it; and none."""
    module = ["-m", "tests.launching.program"]
    old = f"-m torch.distributed.launch --master_port {free_port()} --nnodes 1 --node_rank 0"
    one_host = [sys.executable, *old.split(), "--nproc_per_node", "2", *module]
    for command, count, expected in (
        ([*agent(free_port(), 2, 1), *module], 2, [[0, 2, 0, 1], [1, 2, 0, 1]]),
        (one_host, 1, [[0, 2, 0, 2], [1, 2, 1, 2]]),
        ([sys.executable, *module], 1, [[0, 1, 0, 1]]),
    ):
        assert places(launch([(command, {})] * count)) == expected


def step(rank, size, **more):
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
        "SLURM_STEP_NODELIST": socket.gethostname(),
        **more,
    }


def several_hosts(rank):
    """A task on a host of its own; the first host of the list is met by its name: here all names
    are this host's.
    """
    hosts = {"SLURM_NODEID": rank, "SLURM_STEP_NUM_NODES": 2}
    where = {"SLURM_STEP_NODELIST": "localhost,localhost[2-3]"}
    return step(rank, 2, SLURM_STEP_ID=1, SLURM_LOCALID=0, **hosts, **where)


def of_mpirun(rank):
    numbers = {"RANK": rank, "SIZE": 2, "LOCAL_RANK": rank, "LOCAL_SIZE": 2}
    return {f"OMPI_COMM_WORLD_{name}": n for name, n in numbers.items()}


@pytest.mark.parametrize(
    ("environment", "local_ranks"),
    [
        (lambda rank: step(rank, 2), (0, 1)),
        # how many a host has, the ranks tell each other: all hosts are this one
        pytest.param(several_hosts, (0, 0), marks=pytest.mark.long),
        pytest.param(of_mpirun, (0, 1), marks=pytest.mark.long),
        # enough: hosts are told among the ranks
        pytest.param(lambda rank: {"RANK": rank, "WORLD_SIZE": 2}, (0, 1), marks=pytest.mark.long),
    ],
    ids=["srun", "srun on several hosts", "mpirun", "nobody says the hosts"],
)
def test_ranks_find_each_other(environment, local_ranks, tmp_path):
    where = [environment(rank) for rank in range(2)]
    if "SLURM_JOB_ID" not in where[0]:
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        where = [one | meeting for one in where]
    expected = [[rank, 2, local_ranks[rank], 2] for rank in range(2)]
    assert places(tasks(where, tmp_path)) == expected


@pytest.mark.long
def test_several_processes_without_ranks_end(tmp_path):
    cases: list[tuple[dict[str, object], str]] = [
        ({"SLURM_NTASKS": 2}, "start the program with srun"),
        ({"WORLD_SIZE": 2}, "RANK is not set"),
        ({**step(1, 2), "RANK": 0, "WORLD_SIZE": 1}, "contradict srun"),
    ]
    found = tasks([environment for environment, _ in cases], tmp_path)
    for (code, printed), (_, words) in zip(found, cases, strict=True):
        assert code == 1 and "ConfigurationError" in printed and words in printed
