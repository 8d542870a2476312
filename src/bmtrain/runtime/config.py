"""`bmtrain.config`: a mapping over the current world, kept for programs written for BMTrain."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from bmtrain.errors import ConfigurationError, UnknownNameError
from bmtrain.runtime import world
from bmtrain.runtime.arguments import unknown
from bmtrain.runtime.topology import Topology
from bmtrain.runtime.world import World


class Config(Mapping[str, Any]):
    """`config["rank"]` and so on, read from the current world.

    Before `init_distributed` it holds the values of a single process. Communicators (`comm`,
    `zero_comm`, ...) are `Axis` objects, None before `init_distributed`; streams and events are
    None on a CPU. `config["save_param_to_cpu"] = False` makes `state_dict()` of sharded modules
    leave full tensors on the rank's device. Keys that it does not have are the program's: in a run
    they can be assigned and read.

    Raises:
        UnknownNameError: for a name that it does not have; a KeyError too.
        ConfigurationError: on assignment to any other key, which is an argument of
            `init_distributed` instead, or of anything but a bool.
        NotInitializedError: on assignment before `init_distributed`.
    """

    def _now(self) -> Mapping[str, Any]:
        return _values(world.current("config")) if world.is_initialized() else _BEFORE

    def __getitem__(self, key: str) -> Any:
        values = self._now()
        if key not in values:
            raise UnknownNameError(unknown("config", [str(key)], values))
        return values[key]

    def __setitem__(self, key: str, value: object) -> None:
        if key in _BEFORE and not (key == "save_param_to_cpu" and isinstance(value, bool)):
            raise ConfigurationError(
                f"config[{key!r}] = {value!r} would have no effect: give settings to "
                "init_distributed(); config['save_param_to_cpu'] can be True or False."
            )
        world.current(f"config[{key!r}]").service(_written)[key] = value

    def __iter__(self) -> Iterator[str]:
        return iter(self._now())

    def __len__(self) -> int:
        return len(self._now())

    def __repr__(self) -> str:
        return f"Config({dict(self)})"


def _written(current: World) -> dict[str, Any]:
    """What the program has written. One per run."""
    return {"save_param_to_cpu": True}


def device_of_state_dicts() -> torch.device:
    """The device on which `state_dict()` of sharded modules puts full tensors."""
    current = world.current("state_dict")
    return torch.device("cpu") if current.service(_written)["save_param_to_cpu"] else current.device


class _Streams:
    """Side streams and one event for the program's own use; None on a CPU. One set per run."""

    def __init__(self, current: World) -> None:
        is_gpu = current.device.type != "cpu"
        self.load, self.tensor_parallel, self.pipeline, self.barrier = (
            torch.cuda.Stream(current.device, priority=priority) if is_gpu else None
            for priority in (-1, -1, -1, 0)
        )
        self.event = torch.cuda.Event() if is_gpu else None


def _values(current: World) -> dict[str, Any]:
    streams, mesh, defaults = current.service(_Streams), current.mesh, current.defaults
    topology = mesh.topology
    return {
        "rank": current.rank,
        "local_rank": current.local_rank,
        "world_size": current.world_size,
        "local_size": current.local_size,
        "initialized": True,
        "pipe_size": topology.pipe_size,
        "pipe_enabled": current.pipe_enabled,
        "tp_size": topology.tp_size,
        "tp_rank": mesh.tp.index,
        "tp_zero_rank": mesh.tp_zero.index,
        "tp_zero_size": mesh.tp_zero.size,
        "zero_rank": mesh.world.index,
        "zero_size": mesh.world.size,
        "micros": current.num_micro_batches,
        "topology": topology,
        "comm": mesh.world,
        "zero_comm": mesh.world,
        "tp_comm": mesh.tp,
        "tp_zero_comm": mesh.tp_zero,
        "pipe_comm": mesh.pipe,
        "pp_zero_comm": mesh.pp_zero,
        "pp_tp_zero_comm": mesh.pp_tp_zero,
        "calc_stream": (
            None if current.device.type == "cpu" else torch.cuda.current_stream(current.device)
        ),
        "load_stream": streams.load,
        "tp_comm_stream": streams.tensor_parallel,
        "pp_comm_stream": streams.pipeline,
        "barrier_stream": streams.barrier,
        "load_event": streams.event,
        "zero_level": defaults.zero_level,
        "num_micro_batches": current.num_micro_batches,
        "loss_scale_factor": defaults.loss_scale_factor,
        "loss_scale_steps": defaults.loss_scale_steps,
        **current.service(_written),
    }


_NONE = """comm zero_comm tp_comm tp_zero_comm pipe_comm pp_zero_comm pp_tp_zero_comm
calc_stream load_stream tp_comm_stream pp_comm_stream barrier_stream load_event"""
# All keys of the library, with the values of a single process before `init_distributed`.
_BEFORE: dict[str, Any] = {
    **dict.fromkeys(_NONE.split()),
    **dict.fromkeys(("rank", "local_rank", "tp_rank", "tp_zero_rank", "zero_rank"), 0),
    **dict.fromkeys(("world_size", "local_size", "pipe_size", "tp_size", "tp_zero_size"), 1),
    **dict.fromkeys(("zero_size", "micros", "num_micro_batches"), 1),
    **dict.fromkeys(("initialized", "pipe_enabled"), False),
    "zero_level": 3,
    "save_param_to_cpu": True,
    "loss_scale_factor": 2,
    "loss_scale_steps": 1024,
    "topology": Topology(rank=0, world_size=1),
}

config = Config()
