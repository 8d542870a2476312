"""What launchers' variables mean, case by case."""

from __future__ import annotations

import os
import zlib

import pytest

from bmtrain.errors import ConfigurationError
from bmtrain.runtime import world
from bmtrain.runtime.launchers import (
    FOREIGN,
    Environment,
    Launch,
    expand_counts,
    first_host,
    local_rank_hint,
    meeting_place,
    read_launch,
)


def torch(rank: int, size: int, **more: object) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": str(size), **texts(more)}


def texts(values: dict[str, object]) -> dict[str, str]:
    return {name: str(value) for name, value in values.items()}


def srun(rank: int, size: int, **more: object) -> dict[str, str]:
    """A task of a step on hosts of two tasks each."""
    own: dict[str, object] = {
        "SLURM_JOB_ID": 4711,
        "SLURM_STEP_ID": 3,
        "SLURM_PROCID": rank,
        "SLURM_LOCALID": rank % 2,
        "SLURM_NODEID": rank // 2,
        "SLURM_NTASKS": 99,
        "SLURM_STEP_NUM_TASKS": size,
        "SLURM_STEP_NUM_NODES": (size + 1) // 2,
        "SLURM_STEP_TASKS_PER_NODE": f"2(x{size // 2})" + (",1" if size % 2 else ""),
        "SLURM_STEP_NODELIST": "gpu[07-08]",
        "SLURM_JOB_NODELIST": "gpu[01-08]",
    }
    return texts({**own, **more})


def openmpi(rank: int, size: int, local: int, here: int, **more: object) -> dict[str, str]:
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    values = zip(names, (rank, size, local, here), strict=True)
    return {**{f"OMPI_COMM_WORLD_{name}": str(value) for name, value in values}, **texts(more)}


SLURM_PORT = 15000 + (4711 * 16 + 3) % 15000
MPI_RUN = 15000 + zlib.crc32(b"Open MPI prte-7@1") % 15000
# environment: rank, size, local rank, local size, where they meet
PLACES: dict[str, tuple[Environment, tuple[object, ...]]] = {
    "nothing": ({}, (0, 1, None, None, "env://")),
    "torchrun": (
        torch(3, 4, LOCAL_RANK=1, LOCAL_WORLD_SIZE=2, TORCHELASTIC_RUN_ID="x"),
        (3, 4, 1, 2, "env://"),
    ),
    "one pod a rank": (torch(3, 4, MASTER_ADDR="pod-0"), (3, 4, None, None, "env://")),
    "one of one": (torch(0, 1), (0, 1, 0, 1, "env://")),
    "a size of one": ({"WORLD_SIZE": "1"}, (0, 1, None, None, "env://")),
    "torchrun under srun": (
        {**srun(1, 2), **torch(11, 16, LOCAL_RANK=3, LOCAL_WORLD_SIZE=8, TORCHELASTIC_RUN_ID=1)},
        (11, 16, 3, 8, "env://"),
    ),
    "a launcher of ranks under srun": ({**srun(1, 2), **torch(11, 16)}, (11, 16, None, None, "env://")),
    "ranks exported from srun's": ({**srun(1, 2), **torch(1, 2)}, (1, 2, None, None, "env://")),
    "local rank exported from srun's": (
        {**srun(1, 2), "LOCAL_RANK": "1"},
        (1, 2, 1, 2, f"tcp://127.0.0.1:{SLURM_PORT}"),
    ),
    "srun": (srun(2, 4), (2, 4, 0, 2, f"tcp://gpu07:{SLURM_PORT}")),
    "srun, the last host": (srun(4, 5), (4, 5, 0, 1, f"tcp://gpu07:{SLURM_PORT}")),
    "srun on one host": (srun(1, 2), (1, 2, 1, 2, f"tcp://127.0.0.1:{SLURM_PORT}")),
    "srun of one": (srun(0, 1), (0, 1, 0, 1, "env://")),
    "srun with a meeting of one's own": (
        srun(2, 4, MASTER_ADDR="fd00::1", MASTER_PORT=1234),
        (2, 4, 0, 2, "tcp://[fd00::1]:1234"),
    ),
    "srun, of another step": (
        srun(2, 4, SLURM_STEP_ID=4),
        (2, 4, 0, 2, f"tcp://gpu07:{SLURM_PORT + 1}"),
    ),
    "srun's least": (
        texts(
            {
                "SLURM_JOB_ID": 4711,
                "SLURM_PROCID": 0,
                "SLURM_NTASKS": 4,
                "SLURM_LOCALID": 0,
                "SLURM_NTASKS_PER_NODE": 2,
                "SLURM_JOB_NODELIST": "a1,a2",
            }
        ),
        (0, 4, 0, 2, f"tcp://a1:{15000 + 4711 * 16 % 15000}"),
    ),
    "srun, hosts unknown": (
        texts({"SLURM_JOB_ID": 1, "SLURM_STEP_ID": 0, "SLURM_PROCID": 1, "SLURM_NPROCS": 2, "SLURM_NODELIST": "b[3,5]"}),
        (1, 2, None, None, "tcp://b3:15016"),
    ),
    "srun --mpi=pmi2": ({**srun(2, 4), "PMI_RANK": "2", "PMI_SIZE": "4"}, (2, 4, 0, 2, f"tcp://gpu07:{SLURM_PORT}")),
    "mpirun on one host": (
        openmpi(1, 2, 1, 2, PMIX_NAMESPACE="prte-7@1"),
        (1, 2, 1, 2, f"tcp://127.0.0.1:{MPI_RUN}"),
    ),
    "mpirun on several": (
        openmpi(2, 4, 0, 2, MASTER_ADDR="head", MASTER_PORT=4000),
        (2, 4, 0, 2, "tcp://head:4000"),
    ),
    "mpirun in a Slurm job": (
        {**srun(1, 3), **openmpi(5, 8, 1, 4, MASTER_ADDR="head", MASTER_PORT=4000)},
        (5, 8, 1, 4, "tcp://head:4000"),
    ),
    "mpirun of one": (openmpi(0, 1, 0, 1), (0, 1, 0, 1, "env://")),
    "mpiexec": (
        {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
        (1, 2, 1, 2, "tcp://127.0.0.1:29500"),
    ),
    "mpiexec that does not know hosts": (
        {"PMI_RANK": "1", "PMI_SIZE": "2", "MASTER_ADDR": "head"},
        (1, 2, None, None, "tcp://head:29500"),
    ),
    "mvapich": (
        {"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_LOCAL_RANK": "1", "MV2_COMM_WORLD_LOCAL_SIZE": "2"},
        (1, 2, 1, 2, "tcp://127.0.0.1:29500"),
    ),
    "a batch script of one task": (
        {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_JOB_NUM_NODES": "1", "ENVIRONMENT": "BATCH"},
        (0, 1, None, None, "env://"),
    ),
    "one process in a batch script": (
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "ENVIRONMENT": "BATCH", **torch(0, 1)},
        (0, 1, 0, 1, "env://"),
    ),
    "torchrun in a batch script": (
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "ENVIRONMENT": "BATCH", **torch(3, 8, LOCAL_RANK=3, LOCAL_WORLD_SIZE=8)},
        (3, 8, 3, 8, "env://"),
    ),
    "all devices": ({"PET_NNODES": "1", "PET_NPROC_PER_NODE": "gpu", "SKYPILOT_NUM_NODES": "1"}, (0, 1, None, None, "env://")),
}  # fmt: skip


@pytest.mark.parametrize("case", PLACES)
def test_a_place_is_read(case: str) -> None:
    environment, expected = PLACES[case]
    found = read_launch(environment)
    where = meeting_place(found, environment)
    assert (found.rank, found.size, found.local_rank, found.local_size, where) == expected
    assert not found.warning


REFUSED: dict[str, tuple[Environment, str]] = {
    "a size without a rank": ({"WORLD_SIZE": "4"}, "WORLD_SIZE is 4 but RANK is not set"),
    "a rank without a size": ({"RANK": "0"}, "RANK is 0 but WORLD_SIZE is not set"),
    "a local rank alone": ({"LOCAL_RANK": "1"}, "LOCAL_RANK is 1 but RANK and WORLD_SIZE are not"),
    "local ranks alone": ({"LOCAL_WORLD_SIZE": "2"}, "LOCAL_WORLD_SIZE is 2"),
    "no number": (torch(0, 2, LOCAL_RANK="first"), "LOCAL_RANK is 'first': expected a whole"),
    "a rank too high": (torch(4, 4), "RANK is 4 and WORLD_SIZE is 4"),
    "a local rank too high": (torch(3, 4, LOCAL_RANK=2, LOCAL_WORLD_SIZE=2), "local rank 2 of 2"),
    "one rank for all tasks": ({**srun(1, 4), **torch(0, 4)}, "contradict srun"),
    "worlds of one under srun": ({**srun(0, 4), **torch(0, 1)}, "contradict srun"),
    "worlds of one under mpirun": ({**openmpi(1, 2, 1, 2), **torch(0, 1)}, "contradict Open MPI"),
    "tasks without a number": ({"SLURM_NTASKS": "4"}, "SLURM_NTASKS is 4.*with srun"),
    "a shell on several hosts": ({"SLURM_JOB_NUM_NODES": "2"}, "SLURM_JOB_NUM_NODES is 2.*srun"),
    "a batch script of several tasks": (
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_TASK_PID": "77"},
        "SLURM_NTASKS is 4.*RANK=0 and WORLD_SIZE=1",
    ),
    "a batch script, by its step": (
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_STEP_ID": "4294967291"},
        "SLURM_NTASKS is 4",
    ),
    "salloc's shell": (
        {"SLURM_PROCID": "0", "SLURM_JOB_NUM_NODES": "4", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_ID": "4294967290"},
        "SLURM_JOB_NUM_NODES is 4",
    ),
    "a task without their number": ({"SLURM_PROCID": "2"}, "SLURM_PROCID is 2 but neither"),
    "a number of MPI without a rank": ({"OMPI_COMM_WORLD_SIZE": "4"}, "_RANK is not set"),
    "PMIx alone": ({"PMIX_RANK": "1"}, "PMIX_RANK is 1, but the number"),
    "a TrainJob without torchrun": ({"PET_NNODES": "2"}, "PET_NNODES is 2.*torchrun"),
    "a range of hosts": ({"PET_NNODES": "1:4"}, "PET_NNODES is 1:4"),
    "SkyPilot without torchrun": ({"SKYPILOT_NUM_NODES": "2"}, "--nnodes .SKYPILOT_NUM_NODES"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_no_silent_world_of_one(case: str) -> None:
    environment, words = REFUSED[case]
    with pytest.raises(ConfigurationError, match=words):
        read_launch(environment)


def without(environment: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in names}


NOWHERE: dict[str, tuple[Environment, str]] = {
    "mpirun": (openmpi(2, 4, 0, 2), "mpirun -x MASTER_ADDR"),
    "mpiexec": ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "does not say where the first"),
    "a list that is none": (srun(2, 4, SLURM_STEP_NODELIST="gpu[1"), "list of hosts is 'gpu.1'"),
    "no list": (
        without(srun(2, 4), "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"),
        "SLURM_STEP_NODELIST nor",
    ),
    "no job": (without(srun(2, 4), "SLURM_JOB_ID"), "SLURM_JOB_ID is not set"),
    "hosts in any order": (srun(2, 4, SLURM_DISTRIBUTION="arbitrary"), "arbitrary"),
    "parts of a job": (srun(2, 4, SLURM_HET_SIZE=2), "heterogeneous"),
    "no port": (srun(2, 4, MASTER_PORT=70000), "1 to 65535"),
}


@pytest.mark.parametrize("case", NOWHERE)
def test_where_to_meet_must_be_known(case: str) -> None:
    environment, words = NOWHERE[case]
    with pytest.raises(ConfigurationError, match=words):
        meeting_place(read_launch(environment), environment)


def test_a_torchrun_of_its_own_in_each_task_is_told() -> None:
    environment = {**srun(1, 2), **torch(0, 8, TORCHELASTIC_RUN_ID="x", GROUP_WORLD_SIZE=1)}
    assert "--nnodes 2" in read_launch(environment).warning
    alone = {**srun(0, 1), **torch(0, 8, TORCHELASTIC_RUN_ID="x", GROUP_WORLD_SIZE=1)}
    assert not read_launch(alone).warning


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("a", "a"),
        ("a,b", "a"),
        ("gpu[03-05,9],login", "gpu03"),
        ("gpu[7]", "gpu7"),
        ("rack[1-2]node[3-4]", "rack1node3"),
        ("n[1,3]-ib.cluster.org,n7", "n1-ib.cluster.org"),
    ],
)
def test_the_first_of_hosts(text: str, host: str) -> None:
    assert first_host(text) == host


@pytest.mark.parametrize("text", ["", "gpu[", "[]", "gpu[1-2", "a b", ","])
def test_lists_of_hosts_that_are_none(text: str) -> None:
    with pytest.raises(ConfigurationError, match="MASTER_ADDR"):
        first_host(text)


def test_counts_of_hosts() -> None:
    assert expand_counts("2(x3),1") == [2, 2, 2, 1]
    assert expand_counts("8") == [8]
    with pytest.raises(ConfigurationError, match=r"2\(x\)"):
        expand_counts("2(x)")


def test_jobs_beside_each_other_meet_apart() -> None:
    """No two of 900 jobs that follow each other, with the steps of each."""
    places = {
        meeting_place(read_launch(environment), environment)
        for job in range(1, 901)
        for step in range(16)
        for environment in [srun(0, 2, SLURM_JOB_ID=job, SLURM_STEP_ID=step)]
    }
    assert len(places) == 900 * 16


def test_the_hint_of_a_local_rank() -> None:
    assert local_rank_hint({}) == 0
    assert local_rank_hint(srun(1, 4)) == 1
    assert local_rank_hint({**srun(1, 4), "LOCAL_RANK": "3"}) == 3
    assert local_rank_hint(openmpi(5, 8, 1, 4)) == 1


def test_a_place_that_is_taken_overrides_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**srun(1, 4), **openmpi(1, 4, 1, 4), "PET_NNODES": "2"}.items():
        monkeypatch.setenv(name, value)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "7")
    for name in FOREIGN:
        monkeypatch.setenv(name, os.environ.get(name, "5"))
    world.take_place(1, 2)
    assert (world.launched_rank(), world.launched_size()) == (1, 2)


def test_places_are_checked() -> None:
    with pytest.raises(ConfigurationError, match="rank 2 of 2"):
        Launch(launcher="x", rank=2, size=2)
