"""What launchers say in the environment: the rank of this process, of how many, where they meet.

Pure functions of a mapping. torchrun is read, with all that is built on it (Ray Train, Kubernetes'
training operators), `srun` of Slurm, and MPI with MASTER_ADDR. Sources: the manual pages of
torchrun, srun, mpirun (Open MPI) and mpiexec (MPICH, Intel MPI).
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
_SRUN: Final = "srun"
_PORT: Final = 29500  # torch's, where nothing tells one run from another
# Below the ports that systems hand out to clients (from 32768 on Linux).
_FIRST_PORT, _NUM_PORTS = 15000, 15000
_STEPS_PER_JOB = 16  # whose ports differ from those of the next job
_NODES: Final = ("SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES", "SLURM_NNODES")
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
                "the number of ranks - 1; start the program with torchrun, srun or mpirun."
            )
        most = self.size if self.local_size is None else self.local_size
        if self.local_rank is not None and not 0 <= self.local_rank < most:
            raise ConfigurationError(
                f"{self.launcher} says local rank {self.local_rank} of {most} on this host: "
                "expected one from 0 to their number - 1."
            )


# The variables of launchers that number processes alike: rank, size, local rank, local size.
_TORCH: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_MPI: Final = {
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}
# Set where several processes are meant, by what starts no program with a rank of its own.
_SEVERAL: Final = {
    "LOCAL_WORLD_SIZE": "start the program with torchrun",
    "PET_NNODES": "start the program with torchrun, which reads it",
    "PET_NPROC_PER_NODE": "start the program with torchrun, which reads it",
    "SKYPILOT_NUM_NODES": "start the program with torchrun --nnodes $SKYPILOT_NUM_NODES "
    "--node-rank $SKYPILOT_NODE_RANK",
    "SLURM_NTASKS": "start the program with srun",
    "SLURM_JOB_NUM_NODES": "start the program with srun",
}
_ALONE: Final = "for one process alone, set RANK=0 and WORLD_SIZE=1"

# What this module reads of launchers other than torch's.
FOREIGN: Final = (
    *(name for names in _MPI.values() for name in names),
    *(name for name in _SEVERAL if name != "LOCAL_WORLD_SIZE"),
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
    outer = _slurm(environment)
    for launcher, names in _MPI.items():
        found = _read(launcher, names, environment)
        # srun with Slurm's own PMI: both speak of the same ranks, and Slurm says more of them
        is_slurms = (
            found is not None
            and outer is not None
            and found.local_rank is None
            and (found.rank, found.size) == (outer.rank, outer.size)
        )
        if found is not None:
            outer = outer if is_slurms else found
            break
    own = _read("torchrun", _TORCH, environment)
    if own is None:
        if outer is not None:
            return outer
        _check_alone(environment)
        return Launch()
    if outer is None or outer.size == 1:
        return own
    if TORCHRUN not in environment:
        is_other = own.size == outer.size and own.rank != outer.rank
        if own.size < outer.size or is_other:
            raise ConfigurationError(
                f"RANK={own.rank} and WORLD_SIZE={own.size} contradict {outer.launcher}, which "
                f"has started this process as rank {outer.rank} of {outer.size}: unset RANK and "
                "WORLD_SIZE, or start the program with torchrun."
            )
    elif environment.get("GROUP_WORLD_SIZE") == "1":
        warning = (
            f"{outer.launcher} has started {outer.size} tasks, and the torchrun in each of them a "
            f"run of its own, of {own.size} rank(s): if they are meant to be one run, start "
            f"torchrun with --nnodes {outer.size}."
        )
        return dataclasses.replace(own, warning=warning)
    return own


def meeting_place(launch: Launch, environment: Environment) -> str:
    """Where the ranks meet, as a URL for torch.distributed; "env://" for one process alone.

    MASTER_ADDR and MASTER_PORT count before what Slurm says. MPI says nothing of it.

    Raises:
        ConfigurationError: if that is not known.
    """
    if launch.size == 1:
        return "env://"
    address, port = environment.get("MASTER_ADDR", ""), _PORT
    if launch.launcher == "torchrun":
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if not environment.get(name):
                raise ConfigurationError(
                    f"WORLD_SIZE is {launch.size} but {name} is not set: start the program with "
                    "torchrun, which sets it."
                )
    elif launch.launcher == _SRUN:
        address, port = _meeting_place_of_slurm(launch, environment)
    elif not address:
        raise ConfigurationError(
            f"{launch.launcher} has started {launch.size} ranks and does not say where the first "
            "one is: set MASTER_ADDR to its host on all of them (Open MPI: mpirun -x "
            "MASTER_ADDR=host; MPICH: mpiexec -env MASTER_ADDR host), and MASTER_PORT where "
            "several runs share a host."
        )
    if environment.get("MASTER_PORT"):
        port = number(environment, "MASTER_PORT")
        if not 0 < port < 2**16:
            raise ConfigurationError(
                f"the environment variable MASTER_PORT is {environment['MASTER_PORT']!r}: expected "
                "a port from 1 to 65535."
            )
    address = address.strip("[]")  # of IPv6, with brackets or without
    return f"tcp://{f'[{address}]' if ':' in address else address}:{port}"


def local_rank_hint(environment: Environment) -> int:
    """This process's local rank as any launcher says it; 0 if none does. Checks nothing else."""
    names = ("LOCAL_RANK", *(names[2] for names in _MPI.values()), "SLURM_LOCALID")
    return _first_number(environment, *names) or 0


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


def _read(launcher: str, names: tuple[str, ...], environment: Environment) -> Launch | None:
    """What the variables say; None if neither rank nor size is set."""
    given = {name: number(environment, name) for name in names if name in environment}
    rank, size, local_rank, local_size = (given.get(name) for name in names)
    if rank is None and size in (None, 1):  # one process needs no number
        return None
    if rank is None or size is None:
        known, missing = (names[1], names[0]) if rank is None else names[:2]
        raise ConfigurationError(
            f"{known} is {given[known]} but {missing} is not set: a process among several needs "
            f"both. Start the program with torchrun, srun or mpirun; {_ALONE}."
        )
    if size == 1:
        local_rank, local_size = local_rank or 0, local_size or 1
    return Launch(
        launcher=launcher,
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        # torchrun draws it, and no other user knows it
        run=environment.get(TORCHRUN, "") if names is _TORCH else "",
    )


def _slurm(environment: Environment) -> Launch | None:
    """The task of srun that this process is; None for a shell or script inside of a job.

    Slurm gives those a SLURM_PROCID of 0, too. Tasks of srun have the number of their step.
    """
    step = environment.get("SLURM_STEP_ID")
    if "SLURM_PROCID" not in environment or step in _SHELLS:
        return None
    rank = number(environment, "SLURM_PROCID")
    # A script has all that Slurm sets; an environment that was filtered or made by hand has not.
    is_script = environment.get("ENVIRONMENT") == "BATCH" or "SLURM_TASK_PID" in environment
    if step is None and "SLURM_STEP_NUM_TASKS" not in environment and rank == 0 and is_script:
        return None
    size = _first_number(environment, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    if size is None and rank == 0:
        return None  # `_check_alone` looks for others
    if size is None:
        raise ConfigurationError(
            f"SLURM_PROCID is {rank} but neither SLURM_STEP_NUM_TASKS nor SLURM_NTASKS is set: "
            "start the program with srun, and leave its variables in the environment."
        )
    return Launch(
        launcher=_SRUN,
        rank=rank,
        size=size,
        local_rank=0 if size == 1 else _first_number(environment, "SLURM_LOCALID"),
        local_size=size if size == 1 or _first_number(environment, *_NODES) == 1 else None,
        run=f"srun {environment.get('SLURM_JOB_ID', '')}.{environment.get('SLURM_STEP_ID', '0')}",
    )


def _first_number(environment: Environment, *names: str) -> int | None:
    """That in the first of these variables that is set; None if none is."""
    return next((number(environment, name) for name in names if name in environment), None)


def _meeting_place_of_slurm(launch: Launch, environment: Environment) -> tuple[str, int]:
    """The host of rank 0, and a port that other jobs and steps do not have."""
    if (_first_number(environment, "SLURM_HET_SIZE") or 1) > 1:
        raise ConfigurationError(
            "this is one part of a heterogeneous Slurm job, whose parts number their tasks each "
            "for itself: set RANK and WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each task."
        )
    job, step = environment.get("SLURM_JOB_ID", ""), environment.get("SLURM_STEP_ID", "0")
    if not job and not environment.get("MASTER_PORT"):
        raise ConfigurationError(
            f"srun has started {launch.size} ranks, but SLURM_JOB_ID is not set, from which they "
            "take the port where they meet: leave it in the environment, or set MASTER_PORT."
        )
    numbers = [int(part) if part.isdigit() else zlib.crc32(part.encode()) for part in (job, step)]
    port = _FIRST_PORT + (numbers[0] * _STEPS_PER_JOB + numbers[1]) % _NUM_PORTS
    if environment.get("MASTER_ADDR"):
        return environment["MASTER_ADDR"], port
    if _first_number(environment, *_NODES) == 1:
        return "127.0.0.1", port
    if environment.get("SLURM_DISTRIBUTION", "").startswith("arbitrary"):
        raise ConfigurationError(
            "srun --distribution=arbitrary does not say on which host rank 0 is: set MASTER_ADDR."
        )
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if environment.get(name):
            return first_host(environment[name]), port
    raise ConfigurationError(
        f"srun has started {launch.size} ranks, but neither SLURM_STEP_NODELIST nor "
        "SLURM_JOB_NODELIST is set: leave them in the environment, or set MASTER_ADDR to the "
        "host of rank 0."
    )


def _check_alone(environment: Environment) -> None:
    """ConfigurationError where the environment speaks of several processes, but of no rank."""
    if environment.get("LOCAL_RANK", "0").strip() != "0":
        raise ConfigurationError(
            f"LOCAL_RANK is {environment['LOCAL_RANK']} but RANK and WORLD_SIZE are not "
            "set: start the program with torchrun, which sets all of them."
        )
    if "PMIX_RANK" in environment and "SLURM_PROCID" not in environment:
        raise ConfigurationError(
            f"PMIX_RANK is {environment['PMIX_RANK']}, but the number of ranks is not set: set "
            f"WORLD_SIZE and RANK, or start the program with torchrun; {_ALONE}."
        )
    for name, remedy in _SEVERAL.items():
        # torchrun's may be a range of hosts, or a word for all devices
        last = environment.get(name, "1").rpartition(":")[2].strip()
        if last.isdigit() and int(last) > 1:
            raise ConfigurationError(
                f"{name} is {environment[name]}, so several processes are meant, but this one has "
                f"no rank: {remedy}; {_ALONE}."
            )
