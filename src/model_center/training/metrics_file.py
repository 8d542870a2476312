"""The record of a run: a JSON object per line, one for each step and one for each evaluation."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

from model_center.training.files import write_whole

Record = dict[str, Any]


class MetricsFile:
    """A JSONL file with one record per step and per evaluation. One process writes it.

    A run that goes on from a checkpoint takes back what was written after it, so that no step is
    there twice.

    Args:
        path: of the file; its folder is made.
        is_kept: whether a record of an earlier part of the run stays.
    """

    def __init__(self, path: pathlib.Path, is_kept: Callable[[Record], bool]) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(
            path,
            "".join(json.dumps(record) + "\n" for record in read_metrics(path) if is_kept(record)),
        )

    def add(self, record: Record) -> None:
        """Append a record."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def read_metrics(path: pathlib.Path) -> list[Record]:
    """All records; lines that a killed run left half-written are passed over."""
    records: list[Record] = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records
