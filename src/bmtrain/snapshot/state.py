"""What a rank keeps of a model and of an OptimManager, and how it is put back."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from typing import Any

import torch

from bmtrain.checkpoint.entries import entries, selected
from bmtrain.checkpoint.loading import read_of
from bmtrain.checkpoint.manifest import MODEL, OPTIMIZER
from bmtrain.checkpoint.reading import Read, read_all
from bmtrain.checkpoint.shards import ShardedCheckpoint
from bmtrain.errors import CheckpointError
from bmtrain.optim.adam import AdamBase
from bmtrain.optim.flat import parameters_of
from bmtrain.optim.form import NAMES, cut_of
from bmtrain.optim.manager import OptimManager
from bmtrain.optim.saved import problem_of_schedules
from bmtrain.runtime import world
from bmtrain.shard.module import DistributedModule
from bmtrain.shard.parameter import DistributedParameter
from bmtrain.shard.sharded import Sharded
from bmtrain.shard.slices import Slices
from bmtrain.snapshot.image import Part

States = dict[int, dict[str, Any]]
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


def optimizer_parts(manager: OptimManager) -> tuple[list[Part], dict[str, Any]]:
    """This rank's parts of all optimizers' states, and the rest of the manager's state."""
    rest = manager.sharded_state_dict()
    parts: list[Part] = []
    for number, (optimizer, state) in enumerate(
        zip(manager.optimizers, rest["optimizers"], strict=True)
    ):
        params = parameters_of(optimizer.param_groups)
        for index, values in state["state"].items():
            is_writer = _is_writer(params[index])
            for name, value in values.items():
                full = f"{number}.{index}.{name}"
                if isinstance(value, Sharded):
                    parts.append(Part(OPTIMIZER, full, value.local, value.cut))
                elif isinstance(value, torch.Tensor) and is_writer:
                    parts.append(_whole(OPTIMIZER, full, value))
        state["state"] = {index: _numbers(values) for index, values in state["state"].items()}
        state["written"] = [index for index in state["state"] if _is_writer(params[index])]
    return parts, rest


def _numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if not isinstance(value, torch.Tensor)}


def _whole_shape(name: str, param: torch.Tensor) -> torch.Size:
    """Of a state of this name."""
    if isinstance(param, DistributedParameter):
        return cut_of(name, param.cut).whole_shape
    return param.shape


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


def check_optimizers(
    manager: OptimManager, source: ShardedCheckpoint, rest: Mapping[str, Any]
) -> None:
    """CheckpointError for a state of other optimizers; nothing is changed."""
    _saved(manager, source, rest)


def load_optimizers(
    manager: OptimManager, source: ShardedCheckpoint, rest: Mapping[str, Any]
) -> None:
    """Put back what `optimizer_parts` returned: each rank reads its own slices.

    Adam's state is read into the memory in which it stays.

    Raises:
        CheckpointError: for a state of other optimizers.
    """
    saved = _saved(manager, source, rest)
    for optimizer, one in zip(manager.optimizers, saved, strict=True):
        if isinstance(optimizer, AdamBase):
            one.read(optimizer.begin_restore(one.with_counts()))
        else:
            states = one.new_states(optimizer)
            one.read(states)
            optimizer.load_state_dict({**one.state, "state": one.with_numbers(states)})
    manager.load_rest(rest)


def _saved(
    manager: OptimManager, source: ShardedCheckpoint, rest: Mapping[str, Any]
) -> list[_Saved]:
    """The state of each optimizer, which fits it."""
    if len(rest["optimizers"]) != len(manager.optimizers):
        raise CheckpointError(
            f"{source.path} holds the state of {len(rest['optimizers'])} optimizers, this manager "
            f"has {len(manager.optimizers)}: add the same ones first."
        )
    problem = problem_of_schedules(rest["lr_schedulers"], manager.lr_schedulers)
    if problem is not None:
        raise CheckpointError(f"{source.path} holds {problem}.")
    saved = [_Saved(source, number, state) for number, state in enumerate(rest["optimizers"])]
    for optimizer, one in zip(manager.optimizers, saved, strict=True):
        one.check_groups(optimizer)
    return saved


class _Saved:
    """One optimizer's state in a checkpoint.

    Attributes:
        state: its state dict without tensors.
    """

    def __init__(self, source: ShardedCheckpoint, number: int, state: dict[str, Any]) -> None:
        self._source, self.state = source, state
        self._names: dict[int, dict[str, str]] = {}  # of tensors: by parameter, the full name
        for full in source.headers:
            owner, index, name = full.split(".", 2)
            if int(owner) == number:
                self._names.setdefault(int(index), {})[name] = full

    def check_groups(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise CheckpointError unless the optimizer has groups of as many parameters, of these
        shapes.
        """
        before = [len(group["params"]) for group in self.state["param_groups"]]
        now = [len(group["params"]) for group in optimizer.param_groups]
        if before != now:
            raise CheckpointError(
                f"{self._source.path} holds an optimizer with groups of {before} parameters, this "
                f"one has {now}: make the optimizer with the same groups."
            )
        params = parameters_of(optimizer.param_groups)
        for index, found in self._names.items():
            if isinstance(optimizer, AdamBase):
                self._check_names(index, set(found), optimizer, params[index])
            for name, full in found.items():
                if self._source.is_cut(full):
                    self._check_shape(index, name, full, _whole_shape(name, params[index]))

    def _check_names(
        self, index: int, found: Set[str], optimizer: AdamBase, param: torch.Tensor
    ) -> None:
        """Refuse states of other optimizers, and of Adam in another form: what a state in memory
        finds no name for would begin at zero.
        """
        needed, allowed = optimizer.state_names(param)
        if needed <= found <= {*needed, *allowed, "step"}:
            return
        what = (
            f"{self._source.path} holds {', '.join(sorted(found))} of parameter {index}, "
            f"{type(optimizer).__name__} has {', '.join(sorted(needed))}: it was saved with "
        )
        if found <= _OF_ADAM:
            raise CheckpointError(
                f"{what}other moments or master_weights. Make the optimizer with those; "
                "OptimManager.state_dict(gather_opt=True) moves a state to another form."
            )
        raise CheckpointError(f"{what}another optimizer. Load the weights alone (bmtrain.load).")

    def new_states(self, optimizer: torch.optim.Optimizer) -> States:
        """Empty tensors for one of torch's optimizers: sharded where they were saved so."""
        params = parameters_of(optimizer.param_groups)
        return {
            index: {name: self._empty(params[index], full) for name, full in found.items()}
            for index, found in self._names.items()
        }

    def _empty(self, param: torch.nn.Parameter, full: str) -> torch.Tensor:
        header = self._source.headers[full]
        if isinstance(param, DistributedParameter) and self._source.is_cut(full):
            return Sharded(torch.empty_like(param.local, dtype=header.dtype), param.cut)
        # torch keeps counts of steps on the CPU
        device = param.device if header.shape else torch.device("cpu")
        return torch.empty(header.shape, dtype=header.dtype, device=device)

    def with_numbers(self, states: States) -> States:
        """The states with what is no tensor."""
        numbers: Mapping[int, Mapping[str, Any]] = self.state["state"]
        return {
            index: {**states.get(index, {}), **numbers.get(index, {})}
            for index in sorted({*states, *numbers})
        }

    def with_counts(self) -> dict[str, Any]:
        """`state`, with counts of steps that torch's optimizers keep as tensors."""
        counts = {
            index: {"step": int(self._source.part(found["step"], 0, 1).item())}
            for index, found in self._names.items()
            if "step" in found
        }
        return {**self.state, "state": {**self.state["state"], **counts}}

    def read(self, states: States) -> None:
        """Fill the tensors that are there.

        An fp32 model has no master weights, though a checkpoint of a bf16 one has; Adam's counts of
        steps are no tensors.
        """
        targets = [
            (index, name, full, states[index][name])
            for index, found in self._names.items()
            for name, full in found.items()
            if isinstance(states.get(index, {}).get(name), torch.Tensor)
        ]
        for index, name, full, target in targets:
            shape = target.cut.whole_shape if isinstance(target, Slices) else target.shape
            self._check_shape(index, name, full, shape)
        reads = [self._read_of(full, target) for _, _, full, target in targets]
        read_all([read for read in reads if read is not None], self._source)

    def _check_shape(self, index: int, name: str, full: str, whole: torch.Size) -> None:
        if self._source.headers[full].shape != tuple(whole):
            raise CheckpointError(
                f"optimizer state {name!r} of parameter {index} has shape "
                f"{self._source.headers[full].shape} in {self._source.path}, the parameter "
                f"{tuple(whole)}: it belongs to another model."
            )

    def _read_of(self, full: str, target: torch.Tensor) -> Read | None:
        if isinstance(target, Sharded):
            return read_of(target.local, target.cut, self._source, full)
        return Read(target.view(-1), full, 0, target.numel())
