"""What launchers say in the environment: the rank of this process, of how many, where they meet.

Pure functions of a mapping. Sources: the manual pages of torchrun, srun (Slurm), mpirun (Open MPI)
and mpiexec (MPICH, Intel MPI, MVAPICH).
"""

from __future__ import annotations

import dataclasses
import re
import zlib
from collections.abc import Mapping
from typing import Final

from bmtrain.errors import ConfigurationError

Environment = Mapping[str, str]

TORCHRUN: Final = "TORCHELASTIC_RUN_ID"  # set by torchrun, and by what is built on it
LOOPBACK: Final = "127.0.0.1"
_SRUN: Final = "srun"
_PORT: Final = 29500  # torch's, where nothing tells one run from another
# Below the ports that systems hand out to clients (from 32768 on Linux).
_FIRST_PORT, _NUM_PORTS = 15000, 15000
_STEPS_PER_JOB = 16  # whose ports differ from those of the next job
# Numbers of Slurm's steps that srun has not started: `salloc`'s shell, the batch script.
_SHELLS = ("4294967290", "4294967291")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """The place of this process among those that were started together.

    Attributes:
        launcher: its name for messages; "" without one.
        rank, size: number of the process, and how many there are.
        local_rank, local_size: the same on this host; None where the launcher does not say.
        run: a name that other runs on the same hosts do not have; "" if there is none.
        warning: what is likely to be a mistake; "" if nothing is.
    """

    launcher: str = ""
    rank: int = 0
    size: int = 1
    local_rank: int | None = None
    local_size: int | None = None
    run: str = ""
    warning: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ConfigurationError(
                f"{self.launcher} says rank {self.rank} of {self.size}: expected a rank from 0 to "
                "the number of ranks - 1."
            )
        if self.local_rank is not None and (
            self.local_rank < 0
            or (self.local_size is not None and not self.local_rank < self.local_size)
        ):
            raise ConfigurationError(
                f"{self.launcher} says local rank {self.local_rank} of {self.local_size} on this "
                "host: expected one from 0 to their number - 1."
            )


@dataclasses.dataclass(frozen=True)
class _Names:
    """The variables in which a launcher says it."""

    launcher: str
    rank: str
    size: str
    local_rank: str
    local_size: str


_TORCH: Final = _Names("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_MPI: Final = (
    _Names(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    _Names(
        "MVAPICH",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    _Names("MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
# In which mpirun names its run.
_MPI_RUNS: Final = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid")
# Set where several processes are meant, by what starts no program with a rank of its own.
_SEVERAL: Final = (
    ("LOCAL_WORLD_SIZE", "start the program with torchrun"),
    ("PET_NNODES", "start the program with torchrun, which reads it"),
    ("PET_NPROC_PER_NODE", "start the program with torchrun, which reads it"),
    (
        "SKYPILOT_NUM_NODES",
        "start the program with torchrun --nnodes $SKYPILOT_NUM_NODES --node-rank "
        "$SKYPILOT_NODE_RANK",
    ),
    ("SLURM_NTASKS", "start the program with srun"),
    ("SLURM_JOB_NUM_NODES", "start the program with srun"),
)
_ALONE: Final = "for one process alone, set RANK=0 and WORLD_SIZE=1"

# What this module reads of launchers other than torch's.
FOREIGN: Final = (
    *(name for names in _MPI for name in dataclasses.astuple(names)[1:]),
    *(name for name, _ in _SEVERAL if name != "LOCAL_WORLD_SIZE"),
    "PMIX_RANK",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NPROCS",
    "SLURM_STEP_ID",
    "SLURM_STEP_NUM_TASKS",
)


def read_launch(environment: Environment) -> Launch:
    """The place that the launcher has given this process; a world of one without a launcher.

    The innermost launcher counts: torch's variables before MPI's, MPI's before Slurm's.

    Raises:
        ConfigurationError: for variables that are malformed, contradict each other or speak of
            several processes without a rank for this one.
    """
    slurm = _slurm(environment)
    mpi = next((found for names in _MPI if (found := _mpi(names, environment))), None)
    if mpi is not None and slurm is not None and mpi.local_rank is None:
        # srun with Slurm's own PMI: both speak of the same ranks, Slurm says more of them
        mpi = None if (mpi.rank, mpi.size) == (slurm.rank, slurm.size) else mpi
    outer = mpi or slurm
    own = _torch(environment, outer)
    if own is not None:
        return own
    if outer is not None:
        return outer
    _check_alone(environment)
    return Launch()


def meeting_place(launch: Launch, environment: Environment) -> str:
    """Where the ranks meet, as a URL for torch.distributed; "env://" with torch's variables.

    MASTER_ADDR and MASTER_PORT count before what the launcher says.

    Raises:
        ConfigurationError: if that is not known.
    """
    if launch.size == 1 or launch.launcher == _TORCH.launcher:
        return "env://"
    return (
        _of_slurm(launch, environment) if launch.launcher == _SRUN else _of_mpi(launch, environment)
    )


def local_rank_hint(environment: Environment) -> int:
    """This process's local rank as any launcher says it; 0 if none does. Checks nothing else."""
    names = (_TORCH.local_rank, *(names.local_rank for names in _MPI), "SLURM_LOCALID")
    found = next((name for name in names if name in environment), None)
    return 0 if found is None else number(environment, found)


def number(environment: Environment, name: str) -> int:
    """The whole number in a variable that is set.

    Raises:
        ConfigurationError: if it is none.
    """
    text = environment[name]
    if not re.fullmatch(r"\s*-?[0-9]+\s*", text):
        raise ConfigurationError(
            f"the environment variable {name} is {text!r}: expected a whole number; start the "
            "program with torchrun, srun or mpirun."
        )
    return int(text)


def check_port(environment: Environment) -> int:
    """MASTER_PORT, which is set; ConfigurationError unless it is a port."""
    port = number(environment, "MASTER_PORT")
    if not 0 < port < 2**16:
        raise ConfigurationError(
            f"the environment variable MASTER_PORT is {environment['MASTER_PORT']!r}: expected a "
            "port from 1 to 65535."
        )
    return port


# torch
# --------------------------------------------------------------------------------------------------


def _torch(environment: Environment, outer: Launch | None) -> Launch | None:
    found = _read(_TORCH, environment)
    if found is None:
        if outer is None and environment.get(_TORCH.local_rank, "0").strip() != "0":
            raise ConfigurationError(
                f"LOCAL_RANK is {environment[_TORCH.local_rank]} but RANK and WORLD_SIZE are not "
                "set: start the program with torchrun, which sets all of them."
            )
        return None
    if outer is not None and outer.size > 1:
        if TORCHRUN not in environment:
            _check_against(found, outer)
        elif environment.get("GROUP_WORLD_SIZE") == "1":
            return dataclasses.replace(found, warning=_lonely(found, outer))
    return found


def _check_against(found: Launch, outer: Launch) -> None:
    """ConfigurationError if RANK and WORLD_SIZE cannot be meant for the outer launcher's tasks."""
    is_same = found.size == outer.size and found.rank != outer.rank
    if found.size < outer.size or is_same:
        raise ConfigurationError(
            f"RANK={found.rank} and WORLD_SIZE={found.size} contradict {outer.launcher}, which "
            f"has started this process as rank {outer.rank} of {outer.size}: unset RANK and "
            "WORLD_SIZE, or start the program with torchrun."
        )


def _lonely(found: Launch, outer: Launch) -> str:
    return (
        f"{outer.launcher} has started {outer.size} tasks, and the torchrun in each of them a run "
        f"of its own, of {found.size} rank(s): if they are meant to be one run, start torchrun "
        f"with --nnodes {outer.size}."
    )


# MPI
# --------------------------------------------------------------------------------------------------


def _mpi(names: _Names, environment: Environment) -> Launch | None:
    found = _read(names, environment)
    if found is None:
        return None
    run = next((environment[name] for name in _MPI_RUNS if name in environment), "")
    return dataclasses.replace(found, run=run and f"{names.launcher} {run}")


def _of_mpi(found: Launch, environment: Environment) -> str:
    address = environment.get("MASTER_ADDR")
    if not address:
        if found.local_size != found.size:
            raise ConfigurationError(
                f"{found.launcher} has started {found.size} ranks and does not say where the first "
                "one is: set MASTER_ADDR to its host on all of them (Open MPI: mpirun -x "
                "MASTER_ADDR=host; MPICH: mpiexec -env MASTER_ADDR host)."
            )
        address = LOOPBACK
    port = _derived_port(zlib.crc32(found.run.encode())) if found.run else _PORT
    return _url(address, port, environment)


# Slurm
# --------------------------------------------------------------------------------------------------


def _slurm(environment: Environment) -> Launch | None:
    """The task of srun that this process is; None for a shell or script inside of a job."""
    if "SLURM_PROCID" not in environment or _is_shell(environment):
        return None
    size = next(
        (
            number(environment, name)
            for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
            if name in environment
        ),
        None,
    )
    rank = number(environment, "SLURM_PROCID")
    if size is None:
        if rank == 0:
            return None  # `_check_alone` looks for others
        raise ConfigurationError(
            f"SLURM_PROCID is {rank} but neither SLURM_STEP_NUM_TASKS nor SLURM_NTASKS is set: "
            "start the program with srun, and leave its variables in the environment."
        )
    local_rank = number(environment, "SLURM_LOCALID") if "SLURM_LOCALID" in environment else None
    return Launch(
        launcher=_SRUN,
        rank=rank,
        size=size,
        local_rank=0 if size == 1 else local_rank,
        local_size=1 if size == 1 else _tasks_on_this_host(environment, size),
        run=f"srun {environment.get('SLURM_JOB_ID', '')}.{environment.get('SLURM_STEP_ID', '0')}",
    )


def _is_shell(environment: Environment) -> bool:
    """Whether this is the batch script or an interactive shell, not a task of srun.

    Slurm gives those a SLURM_PROCID of 0, too. Tasks of srun have the number of their step.
    """
    if "SLURM_STEP_ID" in environment:
        return environment["SLURM_STEP_ID"] in _SHELLS
    if "SLURM_STEP_NUM_TASKS" in environment or environment["SLURM_PROCID"].strip() != "0":
        return False
    # A script has all that Slurm sets; an environment that was filtered or made by hand has not.
    return environment.get("ENVIRONMENT") == "BATCH" or "SLURM_TASK_PID" in environment


def _tasks_on_this_host(environment: Environment, size: int) -> int | None:
    per_node = environment.get("SLURM_STEP_TASKS_PER_NODE")
    if per_node is not None:
        counts = expand_counts(per_node)
        node = number(environment, "SLURM_NODEID") if "SLURM_NODEID" in environment else 0
        if len(counts) == 1 or ("SLURM_NODEID" in environment and 0 <= node < len(counts)):
            return counts[node if len(counts) > 1 else 0]
    elif environment.get("SLURM_NTASKS_PER_NODE", "").isdigit():
        # the last node may have fewer
        return min(int(environment["SLURM_NTASKS_PER_NODE"]), size)
    return size if _num_nodes(environment) == 1 else None


def _num_nodes(environment: Environment) -> int | None:
    for name in ("SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES", "SLURM_NNODES"):
        if name in environment:
            return number(environment, name)
    return None


def expand_counts(text: str) -> list[int]:
    """Slurm's counts for each host, such as "2(x3),1": [2, 2, 2, 1].

    Raises:
        ConfigurationError: for any other form.
    """
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d+)(?:\(x(\d+)\))?\s*", part)
        if found is None:
            raise ConfigurationError(
                f"SLURM_STEP_TASKS_PER_NODE is {text!r}: expected counts such as '2(x3),1'."
            )
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def first_host(text: str) -> str:
    """The first of Slurm's list of hosts: "gpu[03-05,9],login" gives "gpu03".

    Raises:
        ConfigurationError: for a list that is empty or has other brackets.
    """
    first = re.match(r"\s*((?:[^,\[\]\s]|\[[^\[\]]*\])+)\s*(?:,|$)", text)
    host = "" if first is None else re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[1])
    if not host or "[" in host:
        raise ConfigurationError(
            f"Slurm's list of hosts is {text!r}: expected a form such as 'gpu[01-04,7]'; or set "
            "MASTER_ADDR to the host of rank 0."
        )
    return host


def _of_slurm(found: Launch, environment: Environment) -> str:
    if number({"SLURM_HET_SIZE": "1", **environment}, "SLURM_HET_SIZE") > 1:
        raise ConfigurationError(
            "this is one part of a heterogeneous Slurm job, whose parts number their tasks each "
            "for itself: set RANK and WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each task."
        )
    address = environment.get("MASTER_ADDR") or _address_of_slurm(found, environment)
    job, step = environment.get("SLURM_JOB_ID", ""), environment.get("SLURM_STEP_ID", "0")
    if not job and not environment.get("MASTER_PORT"):
        raise ConfigurationError(
            f"srun has started {found.size} ranks, but SLURM_JOB_ID is not set, from which they "
            "take the port where they meet: leave it in the environment, or set MASTER_PORT."
        )
    numbers = [int(part) if part.isdigit() else zlib.crc32(part.encode()) for part in (job, step)]
    port = _derived_port(numbers[0] * _STEPS_PER_JOB + numbers[1])
    return _url(address, port, environment)


def _address_of_slurm(found: Launch, environment: Environment) -> str:
    num_nodes = _num_nodes(environment)
    if num_nodes == 1 or (num_nodes is None and found.local_size == found.size):
        return LOOPBACK
    if environment.get("SLURM_DISTRIBUTION", "").startswith("arbitrary"):
        raise ConfigurationError(
            "srun --distribution=arbitrary does not say on which host rank 0 is: set MASTER_ADDR."
        )
    names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    hosts = next((environment[name] for name in names if environment.get(name)), None)
    if hosts is None:
        raise ConfigurationError(
            f"srun has started {found.size} ranks, but neither SLURM_STEP_NODELIST nor "
            "SLURM_JOB_NODELIST is set: leave them in the environment, or set MASTER_ADDR to the "
            "host of rank 0."
        )
    return first_host(hosts)


# All of them
# --------------------------------------------------------------------------------------------------


def _read(names: _Names, environment: Environment) -> Launch | None:
    """What the variables say; None if neither rank nor size is set."""
    given = {
        name: number(environment, name)
        for name in (names.rank, names.size, names.local_rank, names.local_size)
        if name in environment
    }
    if names.rank not in given and names.size not in given:
        return None
    for name, other in ((names.rank, names.size), (names.size, names.rank)):
        if name not in given:
            if other == names.size and given[other] == 1:
                return None  # one process needs no number
            raise ConfigurationError(
                f"{other} is {given[other]} but {name} is not set: a process among several needs "
                f"both. Start the program with torchrun, srun or mpirun; {_ALONE}."
            )
    rank, size = given[names.rank], given[names.size]
    if not 0 <= rank < size:
        raise ConfigurationError(
            f"the environment variable {names.rank} is {rank} and {names.size} is {size}: expected "
            f"a rank from 0 to {names.size} - 1; start the program with torchrun, srun or mpirun."
        )
    return Launch(
        launcher=names.launcher,
        rank=rank,
        size=size,
        local_rank=given.get(names.local_rank, 0 if size == 1 else None),
        local_size=given.get(names.local_size, 1 if size == 1 else None),
    )


def _check_alone(environment: Environment) -> None:
    """ConfigurationError where the environment speaks of several processes, but of no rank."""
    if "PMIX_RANK" in environment and "SLURM_PROCID" not in environment:
        raise ConfigurationError(
            f"PMIX_RANK is {environment['PMIX_RANK']}, but the number of ranks is not set: set "
            f"WORLD_SIZE and RANK, or start the program with torchrun; {_ALONE}."
        )
    for name, remedy in _SEVERAL:
        # torchrun's may be a range of hosts, or a word for all devices
        last = environment.get(name, "1").rpartition(":")[2].strip()
        if last.isdigit() and int(last) > 1:
            raise ConfigurationError(
                f"{name} is {environment[name]}, so several processes are meant, but this one has "
                f"no rank: {remedy}; {_ALONE}."
            )


def _derived_port(identity: int) -> int:
    return _FIRST_PORT + identity % _NUM_PORTS


def _url(address: str, port: int, environment: Environment) -> str:
    if environment.get("MASTER_PORT"):
        port = check_port(environment)
    return f"tcp://{f'[{address}]' if ':' in address else address}:{port}"
