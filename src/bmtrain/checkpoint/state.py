"""What a rank keeps of a model and of an OptimManager, and how it is put back."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from bmtrain.checkpoint.entries import entries, extra_states, selected
from bmtrain.checkpoint.image import Part
from bmtrain.checkpoint.loading import read_of
from bmtrain.checkpoint.reading import Read, read_all
from bmtrain.checkpoint.shards import MODEL, OPTIMIZER, ShardedCheckpoint
from bmtrain.distributed import collectives
from bmtrain.distributed.agreement import attempt
from bmtrain.errors import CheckpointError
from bmtrain.kernels.blockwise import num_blocks
from bmtrain.optim.adam import AdamBase
from bmtrain.optim.flat import parameters_of
from bmtrain.optim.form import NAMES, SCALES, cut_of
from bmtrain.optim.manager import OptimManager
from bmtrain.optim.saved import problem_of_schedules, problem_of_settings
from bmtrain.runtime import world
from bmtrain.runtime.mesh import Axis
from bmtrain.shard.module import DistributedModule
from bmtrain.shard.parameter import DistributedParameter
from bmtrain.shard.sharded import Sharded

_OF_ADAM = {*NAMES, "step"}


def model_parts(
    model: torch.nn.Module, only: Collection[str] | None
) -> tuple[list[Part], dict[str, str]]:
    """This rank's parts of the parameters and persistent buffers, and the names of tied ones.

    Rank 0 writes what is not sharded, from a copy. Collective.
    """
    for module in model.modules():
        if isinstance(module, DistributedModule):
            module.settle_buffers()
    parts: list[Part] = []
    ties: dict[str, str] = {}
    for entry in selected(entries(model), only):
        ties.update(dict.fromkeys(entry.names[1:], entry.name))
        if isinstance(entry.tensor, DistributedParameter):
            parts.append(Part(MODEL, entry.name, entry.tensor.local, entry.tensor.cut))
        elif world.rank() == 0:
            parts.append(_whole(MODEL, entry.name, entry.tensor))
    return parts, ties


def own_part(
    model: torch.nn.Module, only: Collection[str] | None, axis: Axis
) -> dict[str, dict[str, Any]]:
    """What a rank has for itself: extra states, and buffers that are not equal to those of rank 0,
    such as a maximum over its own rows. Collective.
    """

    def look() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        held = {
            entry.name: _whole(MODEL, entry.name, entry.tensor).values
            for entry in selected(entries(model), only)
            if not isinstance(entry.tensor, torch.nn.Parameter)
        }
        modules = extra_states(model) if only is None else {}
        return held, {name: module.get_extra_state() for name, module in modules.items()}

    held, extra = attempt(look, axis)
    sums = {name: zlib.crc32(x.view(torch.uint8).numpy().data) for name, x in held.items()}
    first = collectives.broadcast_object(sums, 0, axis, "checksums of buffers")
    own = {name: held[name] for name in held if first.get(name) != sums[name]}
    return {"extra": extra, "buffers": own}


def put_back_own(model: torch.nn.Module, own: Mapping[str, Mapping[str, Any]]) -> None:
    """Put back an `own_part` into a model that is loaded."""
    modules = extra_states(model)
    for name, value in own["extra"].items():
        modules[name].set_extra_state(value)
    for entry in entries(model):
        if entry.name in own["buffers"]:
            entry.tensor.detach().copy_(own["buffers"][entry.name].view(entry.shape))


def optimizer_parts(manager: OptimManager) -> tuple[list[Part], dict[str, Any]]:
    """This rank's parts of all optimizers' states, and the rest of the manager's state."""
    rest = manager.sharded_state_dict()
    parts: list[Part] = []
    for number, (optimizer, state) in enumerate(
        zip(manager.optimizers, rest["optimizers"], strict=True)
    ):
        params = parameters_of(optimizer.param_groups)
        numbers: dict[int, dict[str, Any]] = {}
        for index, values in state["state"].items():
            numbers[index] = {}
            for name, value in values.items():
                full = f"{number}.{index}.{name}"
                if isinstance(value, Sharded):
                    parts.append(Part(OPTIMIZER, full, value.local, value.cut))
                elif not isinstance(value, torch.Tensor):
                    numbers[index][name] = value
                elif _is_writer(params[index]):
                    parts.append(_whole(OPTIMIZER, full, value))
        state["state"] = numbers
        state["written"] = [index for index in numbers if _is_writer(params[index])]
    return parts, rest


def _whole(section: str, name: str, tensor: torch.Tensor) -> Part:
    value = tensor.detach()
    copy = torch.empty(value.shape, dtype=value.dtype, device="cpu").copy_(value)
    return Part(section, name, copy.view(-1), shape=tuple(value.shape))


def _is_writer(param: torch.nn.Parameter) -> bool:
    """Whether this rank writes what all ranks have of a parameter's state.

    A rank without elements of a parameter may have none, or one of another step.
    """
    if not isinstance(param, DistributedParameter):
        return world.rank() == 0
    cut = param.cut
    if not cut.placement.is_here(cut.mesh):
        return False
    ranks = cut.axis.ranks
    owners = [rank for rank, piece in zip(ranks, cut.pieces, strict=True) if piece.numel]
    return world.rank() == min(owners, default=ranks[0])


def merged(rests: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The manager's state from those of all ranks: of each parameter, the numbers of its writer."""
    first: dict[str, Any] = {**rests[0]}
    for number, state in enumerate(first["optimizers"]):
        for rest in rests:
            own = rest["optimizers"][number]
            state["state"] |= {index: own["state"][index] for index in own["written"]}
    return first


def names_of(model: torch.nn.Module, optim_manager: OptimManager | None) -> list[list[str]]:
    """The names of each optimizer's parameters, in their order: "another" if not the model's."""
    names = {id(param): name for name, param in model.named_parameters()}
    optimizers = [] if optim_manager is None else optim_manager.optimizers
    params = [parameters_of(optimizer.param_groups) for optimizer in optimizers]
    return [[names.get(id(param), "another") for param in one] for one in params]


def check_names(
    saved: Sequence[Sequence[str]], own: Sequence[Sequence[str]], model: torch.nn.Module
) -> None:
    """CheckpointError for optimizers that have parameters of the model in other places than saved.

    States are kept by number: each parameter would go on with the state of another.
    """
    known = dict(model.named_parameters())  # a model whose parameters have new names may go on
    for number, (before, now) in enumerate(zip(saved, own, strict=False)):
        for at, (one, other) in enumerate(zip(before, now, strict=False)):
            if one != other and one in known:
                raise CheckpointError(
                    f"optimizer {number} was saved with other parameters, or its parameters in "
                    f"another order: number {at} was {one!r} and is {other!r}. Give each optimizer "
                    "the same ones in the same order."
                )


def fitting(
    manager: OptimManager, source: ShardedCheckpoint, rest: Mapping[str, Any]
) -> list[SavedOptimizer]:
    """The state of each optimizer.

    Raises:
        CheckpointError: for a state of other optimizers; nothing is changed.
    """
    if len(rest["optimizers"]) != len(manager.optimizers):
        raise CheckpointError(
            f"{source.path} holds the state of {len(rest['optimizers'])} optimizers, this manager "
            f"has {len(manager.optimizers)}: add the same ones first."
        )
    found = [
        SavedOptimizer(source, number, state, optimizer)
        for number, (state, optimizer) in enumerate(
            zip(rest["optimizers"], manager.optimizers, strict=True)
        )
    ]
    problem = problem_of_schedules(rest["lr_schedulers"], manager.lr_schedulers)
    problem = problem or problem_of_settings(rest["optimizers"], manager.optimizers)
    if problem is not None:
        raise CheckpointError(f"{source.path} holds {problem}.")
    return found


class SavedOptimizer:
    """The state in a checkpoint of an optimizer, which it fits.

    Args:
        source: of the tensors.
        number: of the optimizer.
        state: its state dict without tensors.
        optimizer: to be filled by `load`.

    Raises:
        CheckpointError: unless the optimizer has groups of as many parameters, of these shapes.
    """

    def __init__(
        self,
        source: ShardedCheckpoint,
        number: int,
        state: dict[str, Any],
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self._source, self._state, self._optimizer = source, state, optimizer
        self._params = parameters_of(optimizer.param_groups)
        self._names: dict[int, dict[str, str]] = {}  # of tensors: by parameter, the full name
        for full in source.headers:
            owner, place, name = full.split(".", 2)
            if int(owner) == number:
                self._names.setdefault(int(place), {})[name] = full
        before = [len(group["params"]) for group in state["param_groups"]]
        now = [len(group["params"]) for group in optimizer.param_groups]
        if before != now:
            raise CheckpointError(
                f"{source.path} holds an optimizer with groups of {before} parameters, this one "
                f"has {now}: make the optimizer with the same groups."
            )
        for index, found in self._names.items():
            param = self._params[index]
            if isinstance(optimizer, AdamBase):
                # What a state in memory finds no name for would begin at zero.
                held, (needed, allowed) = set(found), optimizer.form.names(param)
                if not needed <= held <= {*needed, *allowed, "step"}:
                    cure = "another optimizer. Load the weights alone (bmtrain.load)."
                    if held <= _OF_ADAM:
                        cure = (
                            "other moments or master_weights. Make the optimizer with those; "
                            "OptimManager.state_dict(gather_opt=True) moves a state to another "
                            "form."
                        )
                    raise CheckpointError(
                        f"{source.path} holds {', '.join(sorted(held))} of parameter {index}, "
                        f"{type(optimizer).__name__} has {', '.join(sorted(needed))}: it was "
                        f"saved with {cure}"
                    )
            for name, full in found.items():
                whole, shape = param.shape, source.headers[full].shape
                if isinstance(param, DistributedParameter):
                    whole = cut_of(name, param.cut).whole_shape
                elif name.endswith(SCALES):
                    whole = torch.Size((1, num_blocks(param.numel())))
                is_known = source.is_cut(full) or (
                    isinstance(optimizer, AdamBase) and name != "step"
                )
                # Adam's states of parameters that are not sharded are flat.
                if is_known and shape not in (tuple(whole), (whole.numel(),)):
                    raise CheckpointError(
                        f"optimizer state {name!r} of parameter {index} has shape {shape} in "
                        f"{source.path}, the parameter {tuple(whole)}: it belongs to another model."
                    )

    def load(self) -> None:
        """Put it back: each rank reads its own slices, those of Adam into the memory in which they
        stay.
        """
        numbers: dict[int, dict[str, Any]] = self._state["state"]
        if isinstance(self._optimizer, AdamBase):
            # torch's optimizers keep counts of steps as tensors
            counts = {
                index: {"step": int(self._source.part(found["step"], 0, 1).item())}
                for index, found in self._names.items()
                if "step" in found
            }
            self._read(
                self._optimizer.begin_restore({**self._state, "state": {**numbers, **counts}})
            )
            return
        states = {
            index: {name: self._empty(self._params[index], full) for name, full in found.items()}
            for index, found in self._names.items()
        }
        self._read(states)
        both = {
            index: {**states.get(index, {}), **numbers.get(index, {})}
            for index in sorted({*states, *numbers})
        }
        self._optimizer.load_state_dict({**self._state, "state": both})

    def _empty(self, param: torch.nn.Parameter, full: str) -> torch.Tensor:
        """Memory for a state of one of torch's optimizers: sharded where it was saved so."""
        header = self._source.headers[full]
        if isinstance(param, DistributedParameter) and self._source.is_cut(full):
            return Sharded(torch.empty_like(param.local, dtype=header.dtype), param.cut)
        # torch keeps counts of steps on the CPU
        device = param.device if header.shape else torch.device("cpu")
        return torch.empty(header.shape, dtype=header.dtype, device=device)

    def _read(self, states: Mapping[int, Mapping[str, Any]]) -> None:
        """Fill the tensors that are there.

        An fp32 model has no master weights, though a checkpoint of a bf16 one has; Adam's counts of
        steps are no tensors.
        """
        targets = [
            (full, states[index][name])
            for index, found in self._names.items()
            for name, full in found.items()
            if isinstance(states.get(index, {}).get(name), torch.Tensor)
        ]
        reads = [
            read_of(target.local, target.cut, self._source, full)
            if isinstance(target, Sharded)
            else Read(target.view(-1), full, 0, target.numel())
            for full, target in targets
        ]
        read_all(reads, self._source)
