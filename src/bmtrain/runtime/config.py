"""`bmtrain.config`: a mapping over the current world, kept for programs written for BMTrain."""

from __future__ import annotations

import ast
import difflib
import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from bmtrain.errors import ConfigurationError, UnknownNameError
from bmtrain.runtime import world
from bmtrain.runtime.topology import Topology
from bmtrain.runtime.world import World


class Config(Mapping[str, Any]):
    """`config["rank"]` and so on, read from the current world.

    Before `init_distributed` it holds the values of a single process. Communicators (`comm`,
    `zero_comm`, ...) are `Axis` objects, None before `init_distributed`; streams and events are
    None on a CPU. One key can be assigned: `config["save_param_to_cpu"] = False` makes
    `state_dict()` of sharded modules leave full tensors on the rank's device.

    Raises:
        UnknownNameError: for a name that it does not have; a KeyError too.
        ConfigurationError: on assignment to any other key, which is an argument of
            `init_distributed` instead, or of anything but a bool.
        NotInitializedError: on assignment before `init_distributed`.
    """

    def __getitem__(self, key: str) -> Any:
        if key not in _KEYS:
            near = difflib.get_close_matches(str(key), _KEYS, n=1, cutoff=0.0)
            raise UnknownNameError(f"config has no {key!r}: the nearest name is {near[0]!r}.")
        path, before = _KEYS[key]
        if not world.is_initialized():
            return before
        return operator.attrgetter(path)(world.current("config").service(_Shown))

    def __setitem__(self, key: str, value: object) -> None:
        if key != "save_param_to_cpu":
            raise ConfigurationError(
                f"config[{key!r}] cannot be written: it would have no effect. Give settings to "
                'init_distributed(); only config["save_param_to_cpu"] can be written.'
            )
        if not isinstance(value, bool):
            raise ConfigurationError(
                f"config['save_param_to_cpu'] got {value!r}: expected True or False."
            )
        world.current("config['save_param_to_cpu']").service(_Shown).save_param_to_cpu = value

    def __iter__(self) -> Iterator[str]:
        return iter(_KEYS)

    def __len__(self) -> int:
        return len(_KEYS)

    def __repr__(self) -> str:
        return f"Config({dict(self)})"


class _Shown:
    """What `config` shows of a run. One per run.

    Attributes:
        world: the run.
        load, tensor_parallel, pipeline, barrier, event: side streams and an event for the program's
            own use; None on a CPU.
        save_param_to_cpu: whether state dicts are moved to the CPU.
    """

    def __init__(self, current: World) -> None:
        self.world, self.initialized, self.save_param_to_cpu = current, True, True
        is_gpu = current.device.type != "cpu"
        self.load, self.tensor_parallel, self.pipeline, self.barrier = (
            torch.cuda.Stream(current.device, priority=priority) if is_gpu else None
            for priority in (-1, -1, -1, 0)
        )
        self.event = torch.cuda.Event() if is_gpu else None

    @property
    def compute(self) -> torch.cuda.Stream | None:
        """The current stream."""
        device = self.world.device
        return None if device.type == "cpu" else torch.cuda.current_stream(device)


def device_of_state_dicts() -> torch.device:
    """The device on which `state_dict()` of sharded modules puts full tensors."""
    current = world.current("state_dict")
    to_cpu = current.service(_Shown).save_param_to_cpu
    return torch.device("cpu") if to_cpu else current.device


# All keys, where in _Shown their values are, and the values before `init_distributed`.
_TABLE = """
rank                world.rank                        0
local_rank          world.local_rank                  0
world_size          world.world_size                  1
local_size          world.local_size                  1
initialized         initialized                       False
pipe_size           world.mesh.topology.pipe_size     1
pipe_enabled        world.pipe_enabled                False
tp_size             world.mesh.topology.tp_size       1
tp_rank             world.mesh.tp.index               0
tp_zero_rank        world.mesh.tp_zero.index          0
tp_zero_size        world.mesh.tp_zero.size           1
zero_rank           world.mesh.world.index            0
zero_size           world.mesh.world.size             1
micros              world.num_micro_batches           1
num_micro_batches   world.num_micro_batches           1
comm                world.mesh.world                  None
zero_comm           world.mesh.world                  None
tp_comm             world.mesh.tp                     None
tp_zero_comm        world.mesh.tp_zero                None
pipe_comm           world.mesh.pipe                   None
pp_zero_comm        world.mesh.pp_zero                None
pp_tp_zero_comm     world.mesh.pp_tp_zero             None
calc_stream         compute                           None
load_stream         load                              None
tp_comm_stream      tensor_parallel                   None
pp_comm_stream      pipeline                          None
barrier_stream      barrier                           None
load_event          event                             None
zero_level          world.defaults.zero_level         3
loss_scale_factor   world.defaults.loss_scale_factor  2
loss_scale_steps    world.defaults.loss_scale_steps   1024
save_param_to_cpu   save_param_to_cpu                 True
"""
_KEYS: dict[str, tuple[str, Any]] = {
    key: (path, ast.literal_eval(before))
    for key, path, before in map(str.split, _TABLE.strip().splitlines())
}
_KEYS["topology"] = ("world.mesh.topology", Topology(rank=0, world_size=1))

config = Config()
