"""print_inspect: a table of a model's parameters, with equal layers folded into one line."""

from __future__ import annotations

import dataclasses
import math
from typing import TextIO

import torch

from bmtrain.inspect.folding import fold
from bmtrain.inspect.parameters import matching_parameters, whole_shape
from bmtrain.inspect.table import print_table
from bmtrain.runtime import world
from bmtrain.shard.parameter import DistributedParameter
from bmtrain.shard.slices import local_of


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
