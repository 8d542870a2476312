"""What launchers' variables mean, case by case."""

import os
from typing import Any

import pytest

from bmtrain.errors import ConfigurationError
from bmtrain.runtime import world
from bmtrain.runtime.launchers import (
    FOREIGN,
    Launch,
    first_host,
    local_rank_hint,
    meeting_place,
    read_launch,
)


def torchrun(rank, size):
    return f"RANK={rank} WORLD_SIZE={size} MASTER_ADDR=pod-0 MASTER_PORT=4000"


def srun(rank, size):
    """A task of a step on hosts of two tasks each."""
    return (
        f"SLURM_JOB_ID=4711 SLURM_STEP_ID=3 SLURM_PROCID={rank} SLURM_LOCALID={rank % 2} "
        f"SLURM_NODEID={rank // 2} SLURM_NTASKS=99 SLURM_STEP_NUM_TASKS={size} "
        f"SLURM_STEP_NUM_NODES={(size + 1) // 2} "
        "SLURM_STEP_NODELIST=gpu[07-08] SLURM_JOB_NODELIST=gpu[01-08]"
    )


def openmpi(rank, size, local, here):
    name = "OMPI_COMM_WORLD"
    of_host = f"{name}_LOCAL_RANK={local} {name}_LOCAL_SIZE={here}"
    return f"{name}_RANK={rank} {name}_SIZE={size} {of_host}"


LAUNCHERS: dict[str, Any] = {"torchrun": torchrun, "srun": srun, "openmpi": openmpi}


def read(text):
    """An environment of words: NAME=value, NAME= to leave it out, or a launcher's with its numbers."""
    found = {}
    for word in text.split():
        kind, colon, numbers = word.partition(":")
        if colon and kind in LAUNCHERS:
            found |= read(LAUNCHERS[kind](*map(int, numbers.split(","))))
        else:
            name, _, value = word.partition("=")
            found[name] = value
    return {name: value for name, value in found.items() if value}


def rows(table):
    return [tuple(map(str.strip, line.split("|"))) for line in table.strip().splitlines()]


# rank, size, local rank, local size, where they meet
PLACES = """
| 0 1 None None env://
torchrun:3,4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 TORCHELASTIC_RUN_ID=x | 3 4 1 2 tcp://pod-0:4000
torchrun:3,4 MASTER_ADDR=fd00::1 | 3 4 None None tcp://[fd00::1]:4000
torchrun:0,1 | 0 1 0 1 env://
WORLD_SIZE=1 | 0 1 None None env://
srun:1,2 torchrun:11,16 LOCAL_RANK=3 LOCAL_WORLD_SIZE=8 TORCHELASTIC_RUN_ID=1 | 11 16 3 8 tcp://pod-0:4000
srun:1,2 torchrun:11,16 | 11 16 None None tcp://pod-0:4000
srun:1,2 torchrun:1,2 | 1 2 None None tcp://pod-0:4000
srun:1,2 LOCAL_RANK=1 | 1 2 1 2 tcp://127.0.0.1:15379
srun:2,4 | 2 4 0 None tcp://gpu07:15379
srun:4,5 | 4 5 0 None tcp://gpu07:15379
srun:1,2 | 1 2 1 2 tcp://127.0.0.1:15379
srun:0,1 | 0 1 0 1 env://
srun:2,4 MASTER_ADDR=fd00::1 MASTER_PORT=1234 | 2 4 0 None tcp://[fd00::1]:1234
srun:2,4 SLURM_STEP_ID=4 | 2 4 0 None tcp://gpu07:15380
SLURM_JOB_ID=4711 SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_LOCALID=0 SLURM_JOB_NODELIST=a1,a2 | 0 4 0 None tcp://a1:15376
SLURM_JOB_ID=1 SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_NPROCS=2 SLURM_NODELIST=b[3,5] | 1 2 None None tcp://b3:15016
srun:2,4 PMI_RANK=2 PMI_SIZE=4 | 2 4 0 None tcp://gpu07:15379
openmpi:2,4,0,2 MASTER_ADDR=head MASTER_PORT=4000 | 2 4 0 2 tcp://head:4000
srun:1,3 openmpi:5,8,1,4 MASTER_ADDR=head MASTER_PORT=4000 | 5 8 1 4 tcp://head:4000
openmpi:0,1,0,1 | 0 1 0 1 env://
PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2 MASTER_ADDR=::1 | 1 2 1 2 tcp://[::1]:29500
PMI_RANK=1 PMI_SIZE=2 MASTER_ADDR=head | 1 2 None None tcp://head:29500
srun:1,3 PMI_RANK=5 PMI_SIZE=8 MASTER_ADDR=head | 5 8 None None tcp://head:29500
SLURM_JOB_ID=1 SLURM_PROCID=0 SLURM_JOB_NUM_NODES=1 ENVIRONMENT=BATCH | 0 1 None None env://
SLURM_PROCID=0 SLURM_NTASKS=4 ENVIRONMENT=BATCH torchrun:0,1 | 0 1 0 1 env://
SLURM_PROCID=0 SLURM_NTASKS=8 ENVIRONMENT=BATCH torchrun:3,8 LOCAL_RANK=3 LOCAL_WORLD_SIZE=8 | 3 8 3 8 tcp://pod-0:4000
PET_NNODES=1 PET_NPROC_PER_NODE=gpu SKYPILOT_NUM_NODES=1 | 0 1 None None env://
"""


@pytest.mark.parametrize(("words", "expected"), rows(PLACES))
def test_a_place_is_read(words, expected):
    environment = read(words)
    found = read_launch(environment)
    place = (found.rank, found.size, found.local_rank, found.local_size)
    assert " ".join(map(str, (*place, meeting_place(found, environment)))) == expected
    assert not found.warning


# There is no silent world of one, and where to meet must be known.
REFUSED = """
WORLD_SIZE=4 | WORLD_SIZE is 4 but RANK is not set
RANK=0 | RANK is 0 but WORLD_SIZE is not set
LOCAL_RANK=1 | LOCAL_RANK is 1 but RANK and WORLD_SIZE are not
LOCAL_WORLD_SIZE=2 | LOCAL_WORLD_SIZE is 2
torchrun:0,2 LOCAL_RANK=first | LOCAL_RANK is 'first': expected a whole
torchrun:4,4 | torchrun says rank 4 of 4
torchrun:3,4 LOCAL_RANK=2 LOCAL_WORLD_SIZE=2 | local rank 2 of 2
srun:1,4 torchrun:0,4 | contradict srun
srun:0,4 torchrun:0,1 | contradict srun
openmpi:1,2,1,2 torchrun:0,1 | contradict Open MPI
SLURM_NTASKS=4 | SLURM_NTASKS is 4.*with srun
SLURM_JOB_NUM_NODES=2 | SLURM_JOB_NUM_NODES is 2.*srun
SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_TASK_PID=77 | SLURM_NTASKS is 4.*RANK=0 and WORLD_SIZE=1
SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_STEP_ID=4294967291 | SLURM_NTASKS is 4
SLURM_PROCID=0 SLURM_JOB_NUM_NODES=4 SLURM_STEP_NUM_TASKS=1 SLURM_STEP_ID=4294967290 | SLURM_JOB_NUM_NODES is 4
SLURM_PROCID=2 | SLURM_PROCID is 2 but neither
OMPI_COMM_WORLD_SIZE=4 | _RANK is not set
PMIX_RANK=1 | PMIX_RANK is 1, but the number
PET_NNODES=2 | PET_NNODES is 2.*torchrun
PET_NNODES=1:4 | PET_NNODES is 1:4
SKYPILOT_NUM_NODES=2 | --nnodes .SKYPILOT_NUM_NODES
"""
NOWHERE = """
openmpi:1,2,1,2 | mpirun -x MASTER_ADDR
torchrun:1,2 MASTER_PORT= | WORLD_SIZE is 2 but MASTER_PORT is not set
PMI_RANK=0 PMI_SIZE=2 | does not say where the first
srun:2,4 SLURM_STEP_NODELIST=gpu[1 | list of hosts is 'gpu.1'
srun:2,4 SLURM_STEP_NODELIST= SLURM_JOB_NODELIST= | SLURM_STEP_NODELIST nor
srun:2,4 SLURM_JOB_ID= | SLURM_JOB_ID is not set
srun:2,4 SLURM_DISTRIBUTION=arbitrary | arbitrary
srun:2,4 SLURM_HET_SIZE=2 | heterogeneous
srun:2,4 MASTER_PORT=70000 | 1 to 65535
"""


@pytest.mark.parametrize(("words", "said"), [*rows(REFUSED), *rows(NOWHERE)])
def test_what_is_refused(words, said):
    environment = read(words)
    if (words, said) in rows(REFUSED):
        with pytest.raises(ConfigurationError, match=said):
            read_launch(environment)
        return
    found = read_launch(environment)
    with pytest.raises(ConfigurationError, match=said):
        meeting_place(found, environment)


def test_a_torchrun_of_its_own_in_each_task_is_told():
    own = "torchrun:0,8 TORCHELASTIC_RUN_ID=x GROUP_WORLD_SIZE=1"
    assert "--nnodes 2" in read_launch(read(f"srun:1,2 {own}")).warning
    assert not read_launch(read(f"srun:0,1 {own}")).warning


def test_lists_of_hosts():
    texts = "a a,b gpu[03-05,9],login gpu[7] rack[1-2]node[3-4] n[1,3]-ib.cluster.org,n7"
    hosts = "a a gpu03 gpu7 rack1node3 n1-ib.cluster.org"
    assert " ".join(map(first_host, texts.split())) == hosts
    for text in ("", "gpu[", "[]", "gpu[1-2", "a b", ","):
        with pytest.raises(ConfigurationError, match="MASTER_ADDR"):
            first_host(text)


def test_jobs_beside_each_other_meet_apart():
    """No two of 900 jobs that follow each other, with the steps of each."""
    environment, places = read("srun:0,2"), set()
    for job in range(1, 901):
        for step in range(16):
            environment |= {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}
            places.add(meeting_place(read_launch(environment), environment))
    assert len(places) == 900 * 16


def test_the_hint_of_a_local_rank():
    for words, rank in (
        ("", 0),
        ("srun:1,4", 1),
        ("srun:1,4 LOCAL_RANK=3", 3),
        ("openmpi:5,8,1,4", 1),
    ):
        assert local_rank_hint(read(words)) == rank


def test_a_place_that_is_taken_overrides_launchers(monkeypatch):
    for name, value in read("srun:1,4 openmpi:1,4,1,4 PET_NNODES=2").items():
        monkeypatch.setenv(name, value)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "7")
    for name in FOREIGN:
        monkeypatch.setenv(name, os.environ.get(name, "5"))
    world.take_place(1, 2)
    assert (world.launched().rank, world.launched().size) == (1, 2)
    with pytest.raises(ConfigurationError, match="rank 2 of 2"):
        Launch(launcher="x", rank=2, size=2)
