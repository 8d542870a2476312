"""Tables of parameters and of their precision, equal layers folded into one line."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, TextIO

import torch

from bmtrain.errors import ConfigurationError
from bmtrain.inspect.parameters import matching_parameters, whole_shape
from bmtrain.runtime import world
from bmtrain.runtime.log import rich
from bmtrain.shard.parameter import DistributedParameter
from bmtrain.shard.slices import local_of

_MASTERS = ("master", "remainder")  # names in an optimizer's state
LOG_WIDTH = 160  # columns, if the output is not a terminal


def fold(named: Iterable[tuple[str, Hashable]]) -> list[tuple[str, int, Any]]:
    """Fold dotted names of equal settings that differ only in numbers, in order of appearance.

    Inner numbers are folded before outer ones, so the members of an outer range are equal at all
    inner levels. Returns each folded name, how many names it stands for, and their settings.
    """
    rows = [(name.split("."), 1, settings) for name, settings in named]
    for place in reversed(range(max((len(words) for words, _, _ in rows), default=0))):
        groups: dict[Hashable, list[tuple[list[str], int, Hashable]]] = {}
        for row in rows:
            key: list[str | None] = [*row[0]]
            if place < len(key) and row[0][place].isdecimal():
                key[place] = None
            groups.setdefault((*key, row[2]), []).append(row)
        rows = []
        for members in groups.values():
            words, _, settings = members[0]
            if len(members) > 1:
                words[place] = f"[{ranges(int(own[place]) for own, _, _ in members)}]"
            rows.append((words, sum(count for _, count, _ in members), settings))
    return [(".".join(words), count, settings) for words, count, settings in rows]


def ranges(numbers: Iterable[int]) -> str:
    """`0-3,7` for 0, 1, 2, 3 and 7."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][-1] + 1:
            spans[-1][1:] = [number]
        else:
            spans.append([number])
    return ",".join("-".join(map(str, span)) for span in spans)


def print_table(
    title: str, lines: Sequence[Mapping[str, object]], caption: str, file: TextIO | None
) -> None:
    """Print a table to stdout or `file`, on rank 0: first column left-aligned, others right.

    Args:
        title, caption: above and below it.
        lines: cells by column, the same columns in all.
        file: see there.
    """
    if world.rank() != 0:
        return
    text = rich("text").Text
    table = rich("table").Table(title=text(title), caption=text(caption))
    for place, column in enumerate(lines[0] if lines else ()):
        table.add_column(column, justify="right" if place else "left", overflow="fold")
    for cells in lines:
        table.add_row(*(text(_text(cell)) for cell in cells.values()))
    console = rich("console").Console(file=file)
    if not console.is_terminal:
        console = rich("console").Console(file=file, width=LOG_WIDTH)
    console.print(table)


def _text(cell: object) -> str:
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, int):
        return f"{cell:,}"
    return "-" if cell is None else str(cell).removeprefix("torch.")


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
    named = [
        (
            name,
            ParameterRow(
                shape=whole_shape(param),
                dtype=param.dtype,
                num_local=local_of(param).numel(),
                sharded=isinstance(param, DistributedParameter),
                trainable=param.requires_grad,
                group=param.group if isinstance(param, DistributedParameter) else None,
            ),
        )
        for name, param in matching_parameters(model, pattern, what="print_inspect").items()
    ]
    rows = [dataclasses.replace(row, name=name, count=count) for name, count, row in fold(named)]
    rank = f"on rank {world.rank()}"
    lines = [
        {
            "parameter": row.name,
            "shape": f"{row.count} x {row.shape}" if row.count > 1 else row.shape,
            "dtype": row.dtype,
            "elements": row.num_elements,
            rank: row.count * row.num_local,
            "sharded": row.sharded,
            "trainable": row.trainable,
            "group": row.group or "",
        }
        for row in rows
    ]
    total, local, trainable, count = (
        sum(numbers)
        for numbers in (
            (row.num_elements for row in rows),
            (row.count * row.num_local for row in rows),
            (row.num_elements for row in rows if row.trainable),
            (row.count for row in rows),
        )
    )
    caption = (
        f"{count:,} parameters of {total:,} elements, {trainable:,} trainable; {local:,} {rank}"
    )
    print_table(model.__class__.__name__, lines, caption, file)
    return rows


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
        moments: the dtypes of the optimizer's other state; empty if it keeps none, None before it
            has any, as those of torch before their first step.
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
    given = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else optimizers
    owners: dict[torch.nn.Parameter, tuple[torch.optim.Optimizer, Mapping[str, Any]]] = {}
    for optimizer in given if isinstance(given, Iterable) else [given]:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigurationError(
                f"precision_report got {type(optimizer).__name__} among the "
                "optimizers: expected torch.optim.Optimizers; of an "
                "OptimManager, pass manager.optimizers."
            )
        states = optimizer.state_dict()["state"]
        members = [param for group in optimizer.param_groups for param in group["params"]]
        for index, param in enumerate(members):
            owners[param] = optimizer, states.get(index, {})
    groups: dict[PrecisionRow, dict[str, torch.nn.Parameter]] = {}
    for name, param in found.items():
        groups.setdefault(_precision_of(param, *owners.get(param, (None, {}))), {})[name] = param
    rows, lines = [], []
    for row, own in groups.items():
        names = tuple(name for name, _, _ in fold((name, None) for name in own))
        elements = sum(math.prod(whole_shape(param)) for param in own.values())
        rows.append(
            dataclasses.replace(row, names=names, num_parameters=len(own), num_elements=elements)
        )
        more = f" and {len(own) - 1} more" if len(names) > 1 else ""
        moments = ", ".join(map(_text, row.moments or ())) or "-"
        kinds = ("stored", "computed", "reduced", "accumulated", "optimizer", "master")
        lines.append(
            {
                "parameters": f"{names[0]}{more}{'' if row.trainable else ' (frozen)'}",
                "elements": elements,
                **{kind: vars(row)[kind] for kind in kinds},
                "moments": "at first step" if row.moments is None else moments,
            }
        )
    print_table(f"Precision of {model.__class__.__name__}", lines, "", file)
    return rows


def _precision_of(
    param: torch.nn.Parameter, optimizer: torch.optim.Optimizer | None, state: Mapping[str, Any]
) -> PrecisionRow:
    dtypes = {name: x.dtype for name, x in state.items() if isinstance(x, torch.Tensor)}
    others = [name for name in dtypes if name not in ("step", *_MASTERS)]
    moments = {dtypes[name] for name in others if not name.endswith("_scales")}
    keeps_none = isinstance(optimizer, torch.optim.SGD) and not optimizer.defaults["momentum"]
    is_unknown = optimizer and param.requires_grad and not state and not keeps_none
    computed = accumulated = param.dtype
    reduced = None if optimizer is None else param.dtype
    if isinstance(param, DistributedParameter):
        computed, policy = param.storage_of.dtype, param.storage_of.gradient.policy
        reduced, accumulated = policy.reduce_dtype, policy.accumulate_dtype
    return PrecisionRow(
        sharded=isinstance(param, DistributedParameter),
        trainable=param.requires_grad,
        stored=param.dtype,
        computed=computed,
        reduced=reduced if param.requires_grad else None,
        accumulated=accumulated if param.requires_grad else None,
        optimizer=None if optimizer is None else type(optimizer).__name__,
        master=next((dtypes[name] for name in _MASTERS if name in dtypes), None),
        moments=None if is_unknown else tuple(sorted(moments, key=str)),
    )
