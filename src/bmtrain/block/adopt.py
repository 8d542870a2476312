"""Moves the parameters of a module into storages and rebinds the module to them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from bmtrain.block.batch_norm import share_statistics
from bmtrain.distributed import collectives
from bmtrain.distributed.agreement import attempt
from bmtrain.errors import ParameterError
from bmtrain.runtime.mesh import Axis
from bmtrain.shard.engine import Engine
from bmtrain.shard.gradient import ShardPolicy
from bmtrain.shard.parameter import DistributedParameter
from bmtrain.shard.placement import EVERYWHERE, Placement
from bmtrain.shard.storage import Storage
from bmtrain.torch_internals import compiled_script, has_extra_state, map_tensors


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a module holds a parameter: the module, the name there and the path in the block."""

    module: torch.nn.Module
    name: str
    path: str

    @property
    def value(self) -> torch.nn.Parameter:
        found = self.module._parameters[self.name]
        if found is None:
            raise ParameterError(f"parameter {self.path!r} has been removed from its module")
        return found


def places_of(modules: Sequence[tuple[str, torch.nn.Module]]) -> Iterator[Place]:
    """All places in `modules` of parameters to shard; a tied parameter has several places."""
    for path, module in modules:
        for name, param in module._parameters.items():
            if param is not None and not stays_whole(param):
                yield Place(module, name, path + name)


def stays_whole(param: torch.nn.Parameter) -> bool:
    """Whether every rank keeps a full replica: frozen, and not a plain floating-point tensor."""
    if isinstance(param, DistributedParameter) or param.requires_grad:
        return False
    return not param.dtype.is_floating_point or type(param.detach()) is not torch.Tensor


def adopt(places: Sequence[Place], policy: ShardPolicy, engine: Engine) -> None:
    """Move the parameters at `places` into storages, one per dtype, trainability and placement.

    A parameter that another block already owns stays in its storage: both blocks gather it.
    Parameters frozen from the start get a storage of their own, whose gradient is never reduced.
    """
    for place in places:
        known = engine.replicated.successor(place.value)
        if known is not None:
            place.module._parameters[place.name] = known
    groups: dict[tuple[torch.dtype, bool, Placement], dict[torch.nn.Parameter, str]] = {}
    for place in places:
        param = place.value
        placement = EVERYWHERE
        if isinstance(param, DistributedParameter):
            if "storage_of" not in vars(param):
                raise ParameterError(
                    f"{place.path!r} is a {type(param).__name__} with a tensor of its own: make it "
                    "by DistributedParameter.__new__, or register_buffer what is not trained."
                )
            if not param.storage_of.adoptable:
                continue
            placement = param.storage_of.placement
        key = param.dtype, param.requires_grad, placement
        groups.setdefault(key, {}).setdefault(param, place.path)
    for (dtype, _, placement), members in groups.items():
        _build(members, dtype, placement, policy, engine, places)


def move_to_stage(places: Sequence[Place], stage: int, policy: ShardPolicy) -> None:
    """Keep the distributed parameters at `places` on one pipeline stage only. Collective.

    Raises:
        ParameterError: for parameters that are also used outside of `places`.
    """
    members = {place.value: place.path for place in places}
    sharded = [param for param in members if isinstance(param, DistributedParameter)]
    for storage in dict.fromkeys([param.storage_of for param in sharded]):
        params = storage.params
        strangers = [param for param in params if param is not None and param not in members]
        if strangers or storage.placement.stage not in (None, stage):
            name = next(
                path for param, path in members.items() if any(param is other for other in params)
            )
            raise ParameterError(
                f"parameter {name!r} is shared with another pipeline stage or with the "
                "rest of the model: tie only inside a "
                "layer, or use TransformerBlockList."
            )
        if storage.placement.stage == stage:
            continue
        placement = dataclasses.replace(storage.placement, stage=stage)
        new = storage.new_like(policy, placement)
        views = storage.views(storage.gather())
        for index, param in enumerate(params):
            new.fill(index, views[index])
            if isinstance(param, DistributedParameter):
                param.move_to(new, index)
        # The program may have dropped a parameter. Its slot gets a new one, because `attach`
        # expects one parameter per slot.
        new.attach(
            [
                DistributedParameter.at(new, index, False) if param is None else param
                for index, param in enumerate(params)
            ]
        )


def _build(
    members: dict[torch.nn.Parameter, str],
    dtype: torch.dtype,
    placement: Placement,
    policy: ShardPolicy,
    engine: Engine,
    places: Sequence[Place],
) -> None:
    """Build one storage for `members`.

    Fills slot by slot and frees each old value before the next copy where possible, so that the
    peak is one storage and one parameter, not two copies of everything.
    """
    shapes = [(path, param.shape) for param, path in members.items()]
    splits = [p.cut.split if isinstance(p, DistributedParameter) else None for p in members]
    storage = Storage(engine, shapes, dtype, policy, placement=placement, splits=splits)
    replaced: dict[torch.nn.Parameter, DistributedParameter] = {}
    params: list[torch.nn.Parameter] = []
    for index, param in enumerate(members):
        if isinstance(param, DistributedParameter):
            if param.never_set:
                storage.fill(index, torch.empty(0, device="meta"))
            else:
                storage.fill(index, param.storage_of.views(param.storage_of.gather())[0])
            param.move_to(storage, index)
            params.append(param)
            continue
        storage.fill(index, param)
        new = replace(param, DistributedParameter.at(storage, index, param.requires_grad), engine)
        if new is not param:
            replaced[param] = new
        params.append(new)
    storage.attach(params)
    for place in places:
        if place.value in replaced:
            place.module._parameters[place.name] = replaced[place.value]


def replace(
    old: torch.nn.Parameter, new: DistributedParameter, engine: Engine
) -> DistributedParameter:
    """Replace the ordinary parameter `old`; returns `old` itself where it can become the new."""
    if old.is_meta:
        new.never_set = True
    used = new.take_the_place_of(old)
    if used is not old:
        engine.replicated.retire(old, new)
    return used


def move_buffers(module: torch.nn.Module, device: torch.device) -> None:
    """Move `module`'s own buffers and replicated parameters to the rank's device.

    A floating-point buffer on meta becomes NaN there, so that results show it if nothing fills it;
    an integer buffer becomes 0. Statistics of a BatchNorm become those of all ranks' rows.
    """
    share_statistics(module)
    for param in module._parameters.values():
        if (
            param is not None
            and not isinstance(param, DistributedParameter)
            and stays_whole(param)
            and not param.is_meta
        ):
            param.data = param.data.to(device)
    for name, buffer in module._buffers.items():
        if buffer is None or buffer.device == device:
            continue
        if buffer.is_meta:
            value = float("nan") if buffer.is_floating_point() else 0
            module._buffers[name] = torch.full_like(buffer, value, device=device)
        else:
            module._buffers[name] = buffer.to(device)


def share_buffers(modules: Sequence[torch.nn.Module], source: int, axis: Axis) -> None:
    """Broadcast the persistent buffers of `modules` from the rank at index `source`. Collective.

    Includes buffers that are None there and buffers that only exist there.
    """
    own = [
        {
            name: buffer
            for name, buffer in module._buffers.items()
            if name not in module._non_persistent_buffers_set
        }
        for module in modules
    ]
    found = collectives.broadcast_object(
        [{n: None if b is None else b.cpu() for n, b in each.items()} for each in own],
        source,
        axis,
        "buffers",
    )
    if axis.index == source:
        return
    for module, before, after in zip(modules, own, found, strict=True):
        for name, value in after.items():
            buffer = before.get(name)
            if (
                buffer is None
                or value is None
                or buffer.shape != value.shape
                or buffer.dtype != value.dtype
            ):
                module._buffers[name] = (
                    value if value is None or buffer is None else value.to(buffer.device)
                )
            else:  # in place: modules may share the buffer
                buffer.copy_(value)


def share_extra_states(modules: Sequence[torch.nn.Module], source: int, axis: Axis) -> None:
    """Give `modules` what `get_extra_state` returns on the rank at index `source`. Collective."""
    having = [module for module in modules if has_extra_state(module)]
    if not having:
        return
    own = attempt(lambda: [module.get_extra_state() for module in having], axis)
    found = collectives.broadcast_object(
        map_tensors(lambda x: x.detach().cpu(), own), source, axis, "extra states"
    )
    if axis.index != source:
        for module, state in zip(having, found, strict=True):
            module.set_extra_state(state)


class Slots(dict[str, Any]):
    """The parameters or buffers of a compiled module, which live outside of Python's dicts.

    It writes its tensors through to the module.
    """

    def __init__(self, module: torch.jit.ScriptModule, entries: Iterable[tuple[str, Any]]) -> None:
        super().__init__(entries)
        self._compiled = compiled_script(module)

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        if value is not None:
            self._compiled.setattr(name, value)

    def update(self, other: Mapping[str, Any]) -> None:  # type: ignore[override]  # the form used here
        for name, value in other.items():
            self[name] = value


def open_slots(module: torch.nn.Module) -> None:
    """Give `module` and its descendants dicts that can be written to, as plain modules have."""
    for found in list(module.modules()):
        part = found.__dict__.get("_actual_script_module", found)  # set by torch.jit.trace
        if isinstance(part, torch.jit.ScriptModule) and not isinstance(
            part.__dict__.get("_parameters"), dict
        ):
            own = part.__dict__
            own["_modules"] = dict(own["_modules"].items())
            own["_parameters"] = Slots(part, own["_parameters"].items())
            own["_buffers"] = Slots(part, own["_buffers"].items())
