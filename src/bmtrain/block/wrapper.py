"""BMTrainModelWrapper: any model, sharded."""

from __future__ import annotations

import types
from typing import TypeVar, cast

import torch

from bmtrain.block.adopt import Converted, move_buffers
from bmtrain.block.block import Block
from bmtrain.block.stack import plan_gathers
from bmtrain.errors import ConfigurationError
from bmtrain.runtime import world
from bmtrain.runtime.world import World
from bmtrain.shard import initialize
from bmtrain.shard.module import DistributedModule
from bmtrain.shard.parameter import DistributedParameter

Module = TypeVar("Module", bound=torch.nn.Module)


def BMTrainModelWrapper(model: Module) -> Module:
    """Shard every parameter of any nn.Module and return a module of the same class.

    Members of every nn.ModuleList become Blocks, in order, with the gather of the next overlapping the current; other
    parameters are gathered when a module reads them. Buffers move to the rank's device. Ties and frozen parameters are kept.
    Call it on all ranks, on equal models. The returned module replaces `model`, whose state it shares.
    """
    current = world.current("BMTrainModelWrapper")
    if not isinstance(model, torch.nn.Module):
        raise ConfigurationError(f"BMTrainModelWrapper got {type(model).__name__}: expected a torch.nn.Module.")
    return cast(Module, _Wrapping(current).wrap(model))


def init_parameters(module: torch.nn.Module) -> None:
    """Give every distributed parameter its first values; the same on any number of ranks.

    Runs each `init_method` on the full tensor and keeps this rank's slice. A plain module that is not sharded yet is sharded
    in place (see BMTrainModelWrapper) and initialised by its own `reset_parameters`.

    Raises:
        ParameterError: for a parameter on the meta device that nothing initialises.
        ConfigurationError: for a plain module with parameters of its own, which only BMTrainModelWrapper can replace.
    """
    current = world.current("init_parameters")
    if not any(isinstance(param, DistributedParameter) for param in module.parameters()) and any(True for _ in module.parameters()):
        if any(param is not None for param in module._parameters.values()):
            raise ConfigurationError(
                f"{type(module).__name__} has parameters of its own and is not sharded: wrap it first, "
                "model = bmtrain.BMTrainModelWrapper(model), then call init_parameters(model)."
            )
        _Wrapping(current).wrap_children(module)
        for param in module.parameters():
            if isinstance(param, DistributedParameter):
                param.mark_unset()
    initialize.initialize(module)


class _Wrapping:
    """One walk over a model; modules that occur twice are wrapped once."""

    def __init__(self, current: World) -> None:
        self._world = current
        self._converted = current.service(Converted)
        self._done: dict[int, torch.nn.Module] = {}

    def wrap(self, module: torch.nn.Module) -> torch.nn.Module:
        """The sharded stand-in for `module`."""
        if id(module) in self._done:
            return self._done[id(module)]
        self.wrap_children(module)
        out = module
        if any(param is not None for param in module._parameters.values()) and not isinstance(module, DistributedModule):
            out = _twin(module)
        self._done[id(module)] = out
        self._done[id(out)] = out
        self._shard(module)
        return out

    def wrap_children(self, module: torch.nn.Module) -> None:
        """Wrap everything below `module`."""
        if isinstance(module, Block):
            return
        if isinstance(module, torch.nn.ModuleList):
            self._wrap_list(module)
            return
        for name, child in module._modules.items():
            if child is not None:
                module._modules[name] = self.wrap(child)

    def _wrap_list(self, members: torch.nn.ModuleList) -> None:
        blocks = []
        for name, member in members._modules.items():
            if member is None:
                continue
            if id(member) not in self._done:
                nested = isinstance(member, torch.nn.ModuleList | torch.nn.ModuleDict)
                part = self.wrap(member) if nested or isinstance(member, Block) else Block(member)
                self._done[id(member)] = self._done[id(part)] = part
            members._modules[name] = self._done[id(member)]
            blocks.append(self._done[id(member)])
        plan_gathers(block for block in blocks if isinstance(block, Block))

    def _shard(self, module: torch.nn.Module) -> None:
        """Turn the module's own parameters into distributed ones and move its buffers."""
        for name, param in module._parameters.items():
            if param is None or isinstance(param, DistributedParameter):
                continue
            new = self._converted.find(param)
            if new is None:
                new = DistributedParameter(param.data, requires_grad=param.requires_grad)
                self._converted.remember(param, new)
            module._parameters[name] = new
        move_buffers(module, self._world.device)


def _twin(module: torch.nn.Module) -> torch.nn.Module:
    """A module over the same state whose class gathers parameters when they are read. `module` itself keeps its class."""
    kind = type(module)
    twin_kind = types.new_class(f"Distributed{kind.__name__}", (DistributedModule, kind))
    twin: torch.nn.Module = object.__new__(twin_kind)
    twin.__dict__ = module.__dict__
    return twin
