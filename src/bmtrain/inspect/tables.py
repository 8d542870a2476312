"""A table of parameters, equal layers folded into one line."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Iterable
from typing import Any, TextIO

import torch

from bmtrain.inspect.parameters import matching_parameters, whole_shape
from bmtrain.runtime import world
from bmtrain.runtime.log import rich
from bmtrain.shard.parameter import DistributedParameter
from bmtrain.shard.slices import local_of

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


def _text(cell: object) -> str:
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, int):
        return f"{cell:,}"
    return str(cell).removeprefix("torch.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParameterRow:
    """One line of the table: `count` parameters with equal settings.

    Attributes:
        name: the folded name, `layers.[0-39].attention.weight` for 40 of them.
        count: the number of parameters.
        shape: the shape of each full tensor.
        dtype: the dtype in which each is stored.
        num_local: elements of each that this rank holds; all of them if it is not sharded.
        sharded: whether each rank holds a slice.
        trainable: whether they require grad.
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
    model: torch.nn.Module, param_name: str = "*", file: TextIO | None = None
) -> list[ParameterRow]:
    """Print on rank 0 the parameters whose name matches, with equal layers folded. Not collective.

    Args:
        model: any module, sharded or not.
        param_name: as in `inspect_model`.
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
        for name, param in matching_parameters(model, param_name, what="print_inspect").items()
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
    total, count = sum(row.num_elements for row in rows), sum(row.count for row in rows)
    trainable = sum(row.num_elements for row in rows if row.trainable)
    local = sum(row.count * row.num_local for row in rows)
    caption = (
        f"{count:,} parameters of {total:,} elements, {trainable:,} trainable; {local:,} {rank}"
    )
    if world.rank() == 0:
        text = rich("text").Text
        table = rich("table").Table(title=text(type(model).__name__), caption=text(caption))
        for place, column in enumerate(lines[0] if lines else ()):
            table.add_column(column, justify="right" if place else "left", overflow="fold")
        for cells in lines:
            table.add_row(*(text(_text(cell)) for cell in cells.values()))
        console = rich("console").Console(file=file)
        if not console.is_terminal:
            console.width = LOG_WIDTH
        console.print(table)
    return rows
