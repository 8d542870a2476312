"""precision_report: the dtypes in use, read from the objects that own them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, TextIO

import torch

from bmtrain.errors import ConfigurationError
from bmtrain.inspect.folding import fold
from bmtrain.inspect.parameters import matching_parameters, whole_shape
from bmtrain.inspect.table import print_table
from bmtrain.shard.parameter import DistributedParameter


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrecisionRow:
    """A set of parameters with equal settings.

    Attributes:
        names: their names, folded: `layers.[0-39].attention.weight`.
        num_parameters: the number of parameters.
        num_elements: the number of elements of their full tensors.
        sharded, trainable: whether they are.
        stored: the dtype of the parameters between uses.
        computed: the dtype in which modules see them; autocast casts from it, operator by operator.
        reduced: the dtype in which gradients are summed over ranks; None if they are not: for
            frozen parameters, and for plain parameters that no optimizer has.
        accumulated: the dtype in which gradients of micro-batches add up; None for frozen ones.
        optimizer: the class of their optimizer; None if none of those given has them.
        master: the dtype of the optimizer's master copy; None if it updates the parameters
            themselves.
        moments: the dtypes of the optimizer's other state; empty if it keeps none, None if unknown
            before its first step.
        state_exists: whether `moments` was read from the optimizer's state. torch's optimizers have
            no state before their first step; `moments` is then the dtype of the parameter, in which
            they will create it.
    """

    names: tuple[str, ...] = ()
    num_parameters: int = 0
    num_elements: int = 0
    sharded: bool
    trainable: bool
    stored: torch.dtype
    computed: torch.dtype
    reduced: torch.dtype | None
    accumulated: torch.dtype | None
    optimizer: str | None
    master: torch.dtype | None
    moments: tuple[torch.dtype, ...] | None
    state_exists: bool


@dataclasses.dataclass(frozen=True)
class _Owner:
    """A parameter's optimizer, its parameter group and its optimizer state."""

    optimizer: torch.optim.Optimizer
    group: Mapping[str, Any]
    state: Mapping[str, Any]


def precision_report(
    model: torch.nn.Module,
    optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] = (),
    file: TextIO | None = None,
) -> list[PrecisionRow]:
    """Print on rank 0 the dtypes in which parameters are stored, used, reduced and updated.

    Not collective.

    Args:
        model: any module, sharded or not.
        optimizers: one or several, `manager.optimizers` for example. An optimizer of bmtrain
            allocates its state now, if it has not yet.
        file: where to print; stdout by default.

    Returns:
        On every rank, one row per set of parameters with equal settings, in the order of
        `model.named_parameters()`.

    Raises:
        ConfigurationError: for arguments of the wrong type.
    """
    found = matching_parameters(model, "*", what="precision_report")
    owners = _owners([optimizers] if isinstance(optimizers, torch.optim.Optimizer) else optimizers)
    groups: dict[PrecisionRow, dict[str, torch.nn.Parameter]] = {}
    for name, param in found.items():
        groups.setdefault(_settings(param, owners.get(param)), {})[name] = param
    rows = [_row(settings, members) for settings, members in groups.items()]
    columns = (
        "parameters",
        "elements",
        "stored",
        "computed",
        "reduced",
        "accumulated",
        "optimizer",
        "master",
        "moments",
    )
    caption = (
        "* as torch's optimizers make it at their first step"
        if any(_is_expected(row) for row in rows)
        else ""
    )
    print_table(
        f"Precision of {model.__class__.__name__}",
        columns,
        [_cells(row) for row in rows],
        caption,
        file,
    )
    return rows


def _owners(optimizers: Iterable[torch.optim.Optimizer]) -> dict[torch.nn.Parameter, _Owner]:
    """The optimizer, group and state of each parameter."""
    owners: dict[torch.nn.Parameter, _Owner] = {}
    for optimizer in optimizers if isinstance(optimizers, Iterable) else [optimizers]:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigurationError(
                f"precision_report got {type(optimizer).__name__} among the "
                "optimizers: expected torch.optim.Optimizers; of an "
                "OptimManager, pass manager.optimizers."
            )
        states = optimizer.state_dict()["state"]
        members = [(param, group) for group in optimizer.param_groups for param in group["params"]]
        for index, (param, group) in enumerate(members):
            owners[param] = _Owner(optimizer, group, states.get(index, {}))
    return owners


def _settings(param: torch.nn.Parameter, owner: _Owner | None) -> PrecisionRow:
    sharded, trainable = isinstance(param, DistributedParameter), param.requires_grad
    reduced, accumulated = _gradient_dtypes(param, owner) if trainable else (None, None)
    return PrecisionRow(
        sharded=sharded,
        trainable=trainable,
        stored=param.dtype,
        computed=param.storage_of.dtype if isinstance(param, DistributedParameter) else param.dtype,
        reduced=reduced,
        accumulated=accumulated,
        optimizer=None if owner is None else type(owner.optimizer).__name__,
        master=owner.state["master"].dtype
        if owner is not None and "master" in owner.state
        else None,
        moments=() if owner is None else _moments(param, owner),
        state_exists=owner is not None and bool(owner.state),
    )


def _gradient_dtypes(
    param: torch.nn.Parameter, owner: _Owner | None
) -> tuple[torch.dtype | None, torch.dtype]:
    """The dtypes of the sum over ranks and of the sum over micro-batches."""
    if isinstance(param, DistributedParameter):
        policy = param.storage_of.gradient.policy
        return policy.reduce_dtype, policy.accumulate_dtype
    return None if owner is None else param.dtype, param.dtype


def _moments(param: torch.nn.Parameter, owner: _Owner) -> tuple[torch.dtype, ...] | None:
    if owner.state:
        others = [value for name, value in owner.state.items() if name not in ("step", "master")]
        return tuple(
            sorted({value.dtype for value in others if isinstance(value, torch.Tensor)}, key=str)
        )
    if not param.requires_grad or (
        isinstance(owner.optimizer, torch.optim.SGD) and not owner.group["momentum"]
    ):
        return ()
    return (param.dtype,) if type(owner.optimizer).__module__.startswith("torch.optim.") else None


def _row(settings: PrecisionRow, members: Mapping[str, torch.nn.Parameter]) -> PrecisionRow:
    return dataclasses.replace(
        settings,
        names=tuple(line.name for line in fold((name, None) for name in members)),
        num_parameters=len(members),
        num_elements=sum(math.prod(whole_shape(param)) for param in members.values()),
    )


def _is_expected(row: PrecisionRow) -> bool:
    return bool(row.moments) and not row.state_exists


def _cells(row: PrecisionRow) -> tuple[str, ...]:
    names = (
        row.names[0] if len(row.names) == 1 else f"{row.names[0]} and {row.num_parameters - 1} more"
    )
    moments = "at first step" if row.moments is None else ", ".join(map(_text, row.moments)) or "-"
    dtypes = (row.stored, row.computed, row.reduced, row.accumulated)
    marked = f"{moments}*" if _is_expected(row) else moments
    frozen = "" if row.trainable else " (frozen)"
    return (
        names + frozen,
        f"{row.num_elements:,}",
        *map(_text, dtypes),
        row.optimizer or "-",
        _text(row.master),
        marked,
    )


def _text(dtype: torch.dtype | None) -> str:
    return "-" if dtype is None else str(dtype).removeprefix("torch.")
