"""BMTrainModelWrapper: shards any model."""

from __future__ import annotations

import inspect
from typing import TypeVar, cast

import torch
from torch.nn.utils.parametrize import ParametrizationList

from bmtrain.block.adopt import move_buffers, open_slots, replace, stays_whole
from bmtrain.block.batch_norm import share_statistics
from bmtrain.block.block import Block
from bmtrain.block.choices import chosen_lists
from bmtrain.block.kinds import become_distributed, has_methods_of_whole_models, is_made_distributed
from bmtrain.block.shardable import check_shardable
from bmtrain.block.stack import plan_gathers
from bmtrain.block.whole_model import as_whole
from bmtrain.errors import ConfigurationError
from bmtrain.recompute.level import Level, level_of
from bmtrain.runtime import world
from bmtrain.runtime.log import warn
from bmtrain.runtime.world import World
from bmtrain.shard import initialize
from bmtrain.shard.engine import Engine
from bmtrain.shard.module import DistributedModule
from bmtrain.shard.parameter import DistributedParameter
from bmtrain.shard.parting import Sameness, watch_calls
from bmtrain.shard.storage import Storage
from bmtrain.torch_internals import Dropouts

Module = TypeVar("Module", bound=torch.nn.Module)


def BMTrainModelWrapper(model: Module, *, use_checkpoint: bool | str | Level = "auto") -> Module:
    """Shard every parameter of any nn.Module, in place, and return it.

    Members of every nn.ModuleList that have a forward method become Blocks, in order, and the
    gather of the next overlaps the current one; other parameters are gathered when a module reads
    them. A module that calls some members of its lists and others not, by its rows, as a mixture of
    experts does, becomes one Block instead. Buffers move to the rank's
    device. Ties and frozen parameters are kept. All modules keep their identity and pass
    `isinstance` of their classes. Call it on all ranks, on equal models. Call it again after adding
    modules: it shards those and changes nothing else.

    From then on call `save_pretrained` and `generate` of transformers' and peft's models on all
    ranks too: rank 0 writes, and ranks that have finished generating keep joining the gathers of
    the others.

    Non-persistent buffers on the meta device, which no checkpoint contains, become NaN (0 for
    integers), with a warning.

    Args:
        model: the model to shard, on the CPU, the meta device or the rank's device; parameters of
            any floating dtype.
        use_checkpoint: for the Blocks that are made (see Block).

    Raises:
        NotInitializedError: before `init_distributed`.
        ConfigurationError: for anything but an nn.Module, or an unknown `use_checkpoint`.
        ParameterError: for a parameter that cannot be sharded (not floating point, lazy, or of a
            tensor subclass). The model is unchanged then.
        RanksDivergedError: on all ranks, if names, shapes, dtypes or values of parameters differ
            between them. The model is unchanged then. Values are compared by checksum, for large
            tensors of a sample.
    """
    current = world.current("BMTrainModelWrapper")
    if not isinstance(model, torch.nn.Module):
        raise ConfigurationError(
            f"BMTrainModelWrapper got {type(model).__name__}: expected a torch.nn.Module."
        )
    level_of(use_checkpoint)
    check_shardable(
        ((name, x) for name, x in model.named_parameters() if not stays_whole(x)),
        current.service(Engine),
    )
    unset = [
        f"{path}.{name}".lstrip(".")
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.is_meta and name in module._non_persistent_buffers_set
    ]
    if unset:
        warn(
            "no file has these buffers, which are on the meta device: "
            f"{', '.join(unset)}. They are NaN (0 for integers) until you "
            "fill them, as in model.get_buffer(name).copy_(values), and answers are "
            "wrong, not always NaN. Building the model on "
            "the CPU avoids that."
        )
    sameness = current.service(Sameness)
    sameness.check(
        (name, param)
        for name, param in model.named_parameters()
        if not isinstance(param, DistributedParameter)
    )
    with sameness.known():
        out = _Wrapping(current, use_checkpoint).wrap(model)
    if not isinstance(out, DistributedModule) or is_made_distributed(out):
        is_compiled = isinstance(out, torch.jit.ScriptModule)
        become_distributed(out, None if is_compiled else as_whole)
    _name_storages(out)
    if not isinstance(out, Block):  # a Block gathers on every call, whatever its module does
        watch_calls(out)
    return cast(Module, out)


def init_parameters(model: torch.nn.Module) -> None:
    """Give every distributed parameter its initial values, the same on any number of ranks.

    Runs each `init_method` on the full tensor and keeps this rank's slice. Other parameters keep
    their values; those on the meta device get some from `reset_parameters`. Shards a plain module
    first, in place (see BMTrainModelWrapper).

    Raises:
        ParameterError: for a parameter on the meta device that nothing initialises.
        ConfigurationError: for a plain module with parameters of its own, which only
            BMTrainModelWrapper can replace.
        RanksDivergedError: for a plain module whose values differ between ranks.
    """
    current = world.current("init_parameters")
    are_sharded = {isinstance(param, DistributedParameter) for param in model.parameters()}
    if are_sharded == {False}:
        if any(param is not None for param in model._parameters.values()):
            raise ConfigurationError(
                f"{type(model).__name__} has parameters of its own and is not "
                "sharded: wrap it first, "
                "model = bmtrain.BMTrainModelWrapper(model), then call init_parameters(model)."
            )
        sameness = current.service(Sameness)
        sameness.check(model.named_parameters())
        with sameness.known():
            _Wrapping(current).wrap_children(model)
    initialize.initialize(model)


def _name_storages(model: torch.nn.Module) -> None:
    """Label storages with the parameter names of the whole model, for error messages."""
    names: dict[Storage, list[str]] = {}
    for name, param in model.named_parameters():
        if isinstance(param, DistributedParameter):
            names.setdefault(param.storage_of, []).append(name)
    for storage, own in names.items():
        storage.residence.label.rename(own)


class _Wrapping:
    """One walk over a model. A module that occurs twice is wrapped once."""

    def __init__(self, current: World, use_checkpoint: bool | str | Level = "auto") -> None:
        self._world, self._use_checkpoint = current, use_checkpoint
        self._engine = current.service(Engine)
        self._done: dict[int, torch.nn.Module] = {}

    def wrap(self, module: torch.nn.Module) -> torch.nn.Module:
        """The sharded module: `module` itself, unless it must become a Block."""
        if id(module) not in self._done:
            out = self._wrap(module)
            self._done[id(module)] = self._done[id(out)] = out
        return self._done[id(module)]

    def _wrap(self, module: torch.nn.Module) -> torch.nn.Module:
        if isinstance(module, Block):
            for part in module.modules():
                if isinstance(part, Block):
                    part.shard()
            return module
        if isinstance(module, torch.jit.ScriptModule):
            open_slots(module)
        # A recurrent module passes its own list of weights to the kernels: no attribute is read,
        # and reading attributes is what gathers parameters outside of blocks.
        if isinstance(module, torch.nn.RNNBase):
            return Block(module, use_checkpoint=False, compile=False)
        share_statistics(module)
        chosen = chosen_lists(module)
        if chosen and not has_methods_of_whole_models(module):
            return self._make_chooser(module, chosen)
        self.wrap_children(module)
        is_distributed = isinstance(module, Dropouts) or any(
            param is not None for param in module._parameters.values()
        )
        if (is_distributed or has_methods_of_whole_models(module)) and not isinstance(
            module, DistributedModule
        ):
            become_distributed(module)
        self._shard(module)
        return module

    def wrap_children(self, module: torch.nn.Module) -> None:
        """Wrap all descendants of `module`."""
        # The members of a ParametrizationList are functions of one weight, not layers.
        if isinstance(module, torch.nn.ModuleList) and not isinstance(module, ParametrizationList):
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
                # Static: a scripted module's class has none to read.
                forward = inspect.getattr_static(type(member), "forward")
                is_called = forward is not torch.nn.Module.forward
                part = (
                    Block(member, use_checkpoint=self._use_checkpoint)
                    if is_called and not isinstance(member, Block)
                    else self.wrap(member)
                )
                self._done[id(member)] = self._done[id(part)] = part
            members._modules[name] = self._done[id(member)]
            blocks.append(self._done[id(member)])
        plan_gathers(block for block in blocks if isinstance(block, Block))

    def _make_chooser(self, module: torch.nn.Module, chosen: frozenset[str]) -> Block:
        """One Block with the members of the lists `chosen`; lists elsewhere below it are Blocks."""
        for name, child in module._modules.items():
            parts = [] if child is None or name in chosen else child.modules()
            if child is not None and any(isinstance(x, torch.nn.ModuleList) for x in parts):
                module._modules[name] = self.wrap(child)
        has_blocks = any(isinstance(part, Block) for part in module.modules())
        return Block(module, use_checkpoint=False if has_blocks else self._use_checkpoint)

    def _shard(self, module: torch.nn.Module) -> None:
        """Replace the module's own parameters by distributed ones and move its buffers."""
        for name, param in module._parameters.items():
            if param is None or isinstance(param, DistributedParameter):
                continue
            if stays_whole(param):
                continue
            new = self._engine.replicated.successor(param)
            if new is None:
                new = replace(
                    param,
                    DistributedParameter.unattached(param.data, param.requires_grad),
                    self._engine,
                )
                new.storage_of.attach([new])
            module._parameters[name] = new
        move_buffers(module, self._world.device)
