"""Tables for a terminal or a log, printed on rank 0."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TextIO

import rich.console
import rich.table
import rich.text

from bmtrain.runtime import world

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
    table = rich.table.Table(title=rich.text.Text(title), caption=rich.text.Text(caption))
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left", overflow="fold")
    for cells in lines:
        table.add_row(*(rich.text.Text(cell) for cell in cells))
    console = rich.console.Console(file=file)
    if not console.is_terminal:
        console = rich.console.Console(file=file, width=LOG_WIDTH)
    console.print(table)
