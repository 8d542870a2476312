"""`bmtrain.config`: a read-only mapping over the current world, kept for BMTrain programs."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch

from bmtrain.runtime import world
from bmtrain.runtime.topology import Topology
from bmtrain.runtime.world import World


class Config(Mapping[str, Any]):
    """`config["rank"]` and so on: looked up in the running world; before it exists, the values of one process.

    Communicators (`comm`, `zero_comm`, ...) are `Axis` objects, None before `init_distributed`; streams are None on a
    CPU.

    Raises:
        KeyError: for a name that is not there, naming the nearest one.
        TypeError: on assignment; arguments of `init_distributed` are the way to change anything.
    """

    def __getitem__(self, key: str) -> Any:
        if key not in _VALUES:
            near = difflib.get_close_matches(str(key), _VALUES, n=1, cutoff=0.0)
            raise KeyError(f"config has no {key!r}: the nearest name is {near[0]!r}; all are {', '.join(_VALUES)}.")
        if world.is_initialized():
            return _VALUES[key](world.current("config"))
        return _BEFORE.get(key)

    def __setitem__(self, key: str, value: object) -> NoReturn:
        raise TypeError(f"config is read-only: pass what {key!r} should be to init_distributed().")

    def __iter__(self) -> Iterator[str]:
        return iter(_VALUES)

    def __len__(self) -> int:
        return len(_VALUES)

    def __repr__(self) -> str:
        return f"Config({dict(self)})"


class _LoadStream:
    """The stream beside the compute stream on which a program may load data; one per run."""

    def __init__(self, current: World) -> None:
        self.stream = None if current.device.type == "cpu" else torch.cuda.Stream(current.device, priority=-1)


def _calc_stream(current: World) -> torch.cuda.Stream | None:
    return None if current.device.type == "cpu" else torch.cuda.current_stream(current.device)


_VALUES: dict[str, Callable[[World], Any]] = {
    "rank": lambda current: current.rank,
    "local_rank": lambda current: current.local_rank,
    "world_size": lambda current: current.world_size,
    "local_size": lambda current: current.local_size,
    "initialized": lambda current: True,
    "pipe_size": lambda current: current.mesh.topology.pipe_size,
    "pipe_enabled": lambda current: current.pipe_enabled,
    "tp_size": lambda current: current.mesh.topology.tp_size,
    "tp_rank": lambda current: current.mesh.tp.index,
    "tp_zero_rank": lambda current: current.mesh.tp_zero.index,
    "tp_zero_size": lambda current: current.mesh.tp_zero.size,
    "zero_rank": lambda current: current.mesh.world.index,
    "zero_size": lambda current: current.mesh.world.size,
    "micros": lambda current: current.num_micro_batches,
    "topology": lambda current: current.mesh.topology,
    "comm": lambda current: current.mesh.world,
    "zero_comm": lambda current: current.mesh.world,
    "tp_comm": lambda current: current.mesh.tp,
    "tp_zero_comm": lambda current: current.mesh.tp_zero,
    "pipe_comm": lambda current: current.mesh.pipe,
    "pp_zero_comm": lambda current: current.mesh.pp_zero,
    "pp_tp_zero_comm": lambda current: current.mesh.pp_tp_zero,
    "load_stream": lambda current: current.service(_LoadStream).stream,
    "calc_stream": _calc_stream,
}

# What one process is before it joins a run; communicators and streams are None.
_BEFORE: dict[str, Any] = {
    "rank": 0,
    "local_rank": 0,
    "world_size": 1,
    "local_size": 1,
    "initialized": False,
    "pipe_size": 1,
    "pipe_enabled": False,
    "tp_size": 1,
    "tp_rank": 0,
    "tp_zero_rank": 0,
    "tp_zero_size": 1,
    "zero_rank": 0,
    "zero_size": 1,
    "micros": 1,
    "topology": Topology(rank=0, world_size=1),
}

config = Config()
