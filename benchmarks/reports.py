"""Files of results: what all of them say of themselves, and how they are written."""

from __future__ import annotations

import datetime
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

LEFT_OUT = "of --within were over"  # how the reasons end of runs that were not begun


def report_of(
    records: Sequence[dict[str, Any]],
    *,
    commit: str,
    command: str,
    machine: Mapping[str, object],
    **others: object,
) -> dict[str, Any]:
    """What is written: when, of what, by which command and on what the records were measured.

    The list itself is in it.
    """
    now = datetime.datetime.now(datetime.timezone.utc)
    return {
        "date": now.date().isoformat(),
        "time": now.strftime("%H:%M:%S"),
        "commit": commit,
        "command": command,
        "machine": machine,
        **others,
        "records": records,
    }


def write(report: dict[str, Any], path: pathlib.Path) -> None:
    """The numbers, from which all else can be made again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
