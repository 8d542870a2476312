"""The tensors of a model that a checkpoint holds: parameters and persistent buffers, by name.

Nothing that is not finite goes into a checkpoint of a run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Sequence

import torch

from bmtrain.distributed.agreement import attempt, everyone
from bmtrain.errors import CheckpointError
from bmtrain.inspect.parameters import whole_shape
from bmtrain.kernels.squares import sum_of_squares
from bmtrain.runtime import world
from bmtrain.runtime.arguments import NUMBER
from bmtrain.runtime.log import warn
from bmtrain.shard.slices import local_of
from bmtrain.torch_internals import changes_state_dict, has_extra_state

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclasses.dataclass(frozen=True)
class Entry:
    """One tensor of the model and its names: more than one if the tensor is tied."""

    names: tuple[str, ...]
    tensor: torch.Tensor

    @property
    def name(self) -> str:
        """The first name."""
        return self.names[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the full tensor, before ZeRO sharding and the tensor-parallel split."""
        return whole_shape(self.tensor)


def entries(model: torch.nn.Module) -> list[Entry]:
    """Every parameter and persistent buffer in state dict order, each tied tensor once."""
    found: dict[int, tuple[torch.Tensor, list[str]]] = {}
    for name, tensor in named_tensors(model):
        found.setdefault(id(tensor), (tensor, []))[1].append(name)
    return [Entry(tuple(names), tensor) for tensor, names in found.values()]


def selected(found: Sequence[Entry], only: Collection[str] | None) -> list[Entry]:
    """The entries whose first name is in `only`; all if that is None.

    Raises:
        CheckpointError: for a name that is no entry's first.
    """
    if only is None:
        return list(found)
    unknown = sorted(set(only) - {entry.name for entry in found})
    if unknown:
        raise CheckpointError(
            f"no tensor of the model has the name {unknown[0]!r}: expected names of parameters and "
            "persistent buffers, of tied ones the first."
        )
    return [entry for entry in found if entry.name in only]


def named_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every name in state dict order, all names of a tied tensor included."""
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = path + "." if path else ""
        for name, param in module._parameters.items():
            if param is not None:
                yield prefix + name, param
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield prefix + name, buffer


def extra_states(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The modules that have a state beside tensors, `get_extra_state`, by torch's name of that.

    Warns of what `state_dict()` alone holds.
    """
    modules = list(model.named_modules(remove_duplicate=False))
    for _, module in modules:
        if changes_state_dict(module):
            warn(
                f"{type(module).__name__} changes its state dict: checkpoints hold its parameters "
                "and persistent buffers by their own names, and what get_extra_state returns. Save "
                "model.state_dict() with torch.save if a file needs the rest."
            )
    return {
        f"{path}._extra_state".removeprefix("."): module
        for path, module in modules
        if has_extra_state(module)
    }


def check_finite(
    model: torch.nn.Module,
    optimizers: Iterable[torch.optim.Optimizer],
    only: Collection[str] | None = None,
    outcome: str = "the checkpoint is not written",
) -> None:
    """Refuse weights, states of optimizers and learning rates that are NaN or infinite. Collective.

    `CheckpointManager` calls it when it saves and when it has restored. Reads each value once, on
    its device, and waits for one number. Of what is not trained (frozen parameters, buffers) only
    NaN is refused: masks hold -inf.

    Args:
        only: as of `CheckpointManager.save`.
        outcome: how the message begins.

    Raises:
        CheckpointError: on every rank, naming the first.
    """
    optimizers = list(optimizers)

    def look() -> None:
        name = _not_finite(model, optimizers, only)
        if name is not None:
            raise CheckpointError(
                f"{outcome}: {name} is no longer finite. Earlier checkpoints are kept. Remedy: "
                "resume from one of them with another learning rate, or without the batches of "
                "these steps."
            )

    attempt(look, everyone())


def _not_finite(
    model: torch.nn.Module,
    optimizers: Iterable[torch.optim.Optimizer],
    only: Collection[str] | None,
) -> str | None:
    """What is not; None if all is finite."""
    held: list[tuple[str, torch.Tensor, bool]] = []  # name, values, whether it is trained
    names: dict[int, str] = {}
    for entry in entries(model):
        trained = isinstance(entry.tensor, torch.nn.Parameter) and entry.tensor.requires_grad
        names[id(entry.tensor)] = entry.name
        if only is None or entry.name in only:
            held.append((f"parameter or buffer {entry.name}", entry.tensor, trained))
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            if not NUMBER.holds(group.get("lr", 0.0)):
                return f"the learning rate of group {number}, {group['lr']},"
        for param, state in optimizer.state.items():
            what = names.get(id(param), f"a parameter of shape {tuple(param.shape)}")
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    held.append((f"state {key!r} of the optimizer for {what}", value, True))
    own = [
        (name, local_of(x).detach(), trained)
        for name, x, trained in held
        if x.dtype in _DTYPES and x.layout is torch.strided
    ]
    # Finite if all are: squares are summed in fp64.
    if not bool(sum_of_squares((x for _, x, _ in own), world.device()).isfinite()):
        for name, x, trained in own:
            if bool(x.isnan().any()) or (trained and not bool(x.isfinite().all())):
                return name
    return None
