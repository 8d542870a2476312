"""Tables of parameters and of their precision, equal layers folded into one line."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Generic, TextIO, TypeVar

import torch

from bmtrain.errors import ConfigurationError
from bmtrain.inspect.parameters import matching_parameters, whole_shape
from bmtrain.runtime import world
from bmtrain.runtime.log import rich
from bmtrain.shard.parameter import DistributedParameter
from bmtrain.shard.slices import local_of

Settings = TypeVar("Settings", bound=Hashable)
_MASTERS = ("master", "remainder")  # names in an optimizer's state


@dataclasses.dataclass(frozen=True)
class Folded(Generic[Settings]):
    """A folded name, the number of names that it stands for, and their common settings."""

    name: str
    count: int
    settings: Settings


def fold(named: Iterable[tuple[str, Settings]]) -> list[Folded[Settings]]:
    """Fold dotted names of equal settings that differ only in numbers, in order of appearance.

    Inner numbers are folded before outer ones, so the members of an outer range are equal at all
    inner levels.
    """
    rows = [Folded(name, 1, settings) for name, settings in named]
    depth = max((row.name.count(".") + 1 for row in rows), default=0)
    for place in reversed(range(depth)):
        groups: dict[Hashable, list[Folded[Settings]]] = {}
        for row in rows:
            words = row.name.split(".")
            is_number = place < len(words) and words[place].isdecimal()
            key = (*words[:place], None, *words[place + 1 :]) if is_number else row.name
            groups.setdefault((key, row.settings), []).append(row)
        rows = [_merged(members, place) for members in groups.values()]
    return rows


def _merged(members: Sequence[Folded[Settings]], place: int) -> Folded[Settings]:
    """Merge members that differ only in the number at `place` into one row."""
    first = members[0]
    if len(members) == 1:
        return first
    words = first.name.split(".")
    words[place] = f"[{ranges(int(row.name.split('.')[place]) for row in members)}]"
    return Folded(".".join(words), sum(row.count for row in members), first.settings)


def ranges(numbers: Iterable[int]) -> str:
    """`0-3,7` for 0, 1, 2, 3 and 7."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


LOG_WIDTH = 160  # columns, if the output is not a terminal


def print_table(
    title: str,
    columns: Sequence[str],
    lines: Iterable[Sequence[str]],
    caption: str,
    file: TextIO | None,
) -> None:
    """Print a table to stdout or `file`, on rank 0: first column left-aligned, others right."""
    if world.rank() != 0:
        return
    table = rich("table").Table(title=rich("text").Text(title), caption=rich("text").Text(caption))
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left", overflow="fold")
    for cells in lines:
        table.add_row(*(rich("text").Text(cell) for cell in cells))
    console = rich("console").Console(file=file)
    if not console.is_terminal:
        console = rich("console").Console(file=file, width=LOG_WIDTH)
    console.print(table)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParameterRow:
    """One line of the table: `count` parameters with equal settings.

    Attributes:
        name: the folded name, `layers.[0-39].attention.weight` for 40 of them.
        count: the number of parameters.
        shape: the shape of each full tensor.
        dtype: the dtype in which each is stored.
        num_local: elements of each that this rank holds; all of them if it is not sharded.
        sharded, trainable: whether they are.
        group: as given to DistributedParameter.
    """

    name: str = ""
    count: int = 1
    shape: tuple[int, ...]
    dtype: torch.dtype
    num_local: int
    sharded: bool
    trainable: bool
    group: str | None

    @property
    def num_elements(self) -> int:
        """The number of elements of all `count` full tensors."""
        return self.count * math.prod(self.shape)


def print_inspect(
    model: torch.nn.Module, pattern: str = "*", file: TextIO | None = None
) -> list[ParameterRow]:
    """Print on rank 0 the parameters whose name matches, with equal layers folded. Not collective.

    Args:
        model: any module, sharded or not.
        pattern: as in `inspect_model`.
        file: where to print; stdout by default.

    Returns:
        The lines of the table, on every rank.

    Raises:
        ConfigurationError: for arguments of the wrong type.
    """
    found = matching_parameters(model, pattern, what="print_inspect")
    folded = fold((name, _settings(param)) for name, param in found.items())
    rows = [dataclasses.replace(line.settings, name=line.name, count=line.count) for line in folded]
    columns = (
        "parameter",
        "shape",
        "dtype",
        "elements",
        f"on rank {world.rank()}",
        "sharded",
        "trainable",
        "group",
    )
    print_table(
        model.__class__.__name__, columns, [_cells(row) for row in rows], _totals(rows), file
    )
    return rows


def _settings(param: torch.nn.Parameter) -> ParameterRow:
    """The settings that must be equal for parameters to be folded."""
    return ParameterRow(
        shape=whole_shape(param),
        dtype=param.dtype,
        num_local=local_of(param).numel(),
        sharded=isinstance(param, DistributedParameter),
        trainable=param.requires_grad,
        group=param.group if isinstance(param, DistributedParameter) else None,
    )


def _cells(row: ParameterRow) -> tuple[str, ...]:
    times = f"{row.count} x " if row.count > 1 else ""
    dtype = str(row.dtype).removeprefix("torch.")
    flags = ("yes" if flag else "no" for flag in (row.sharded, row.trainable))
    return (
        row.name,
        f"{times}{row.shape}",
        dtype,
        f"{row.num_elements:,}",
        f"{row.count * row.num_local:,}",
        *flags,
        row.group or "",
    )


def _totals(rows: list[ParameterRow]) -> str:
    total, local = (
        sum(row.num_elements for row in rows),
        sum(row.count * row.num_local for row in rows),
    )
    trainable = sum(row.num_elements for row in rows if row.trainable)
    count = sum(row.count for row in rows)
    return (
        f"{count:,} parameters of {total:,} elements, {trainable:,} trainable; {local:,} "
        f"on rank {world.rank()}"
    )


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
        master: the dtype of the optimizer's master copy, int16 for remainders beside bf16
            parameters; None if it updates the parameters themselves.
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
        groups.setdefault(_precision_of(param, owners.get(param)), {})[name] = param
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
        [_precision_cells(row) for row in rows],
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


def _precision_of(param: torch.nn.Parameter, owner: _Owner | None) -> PrecisionRow:
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
        master=None if owner is None else _master(owner.state),
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


def _master(state: Mapping[str, Any]) -> torch.dtype | None:
    return next((state[name].dtype for name in _MASTERS if name in state), None)


def _moments(param: torch.nn.Parameter, owner: _Owner) -> tuple[torch.dtype, ...] | None:
    if owner.state:
        others = [
            value
            for name, value in owner.state.items()
            if name not in ("step", *_MASTERS) and not name.endswith("_scales")
        ]
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


def _precision_cells(row: PrecisionRow) -> tuple[str, ...]:
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
