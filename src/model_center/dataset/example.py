"""One example of a task, before any tokenizer has seen it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
    """What a task's prompt is made of, and what the answer is.

    `fields` are texts by name (ReCoRD's `entities` is a list of texts). `label` is None where the
    file holds none, as in the test split. `group` names the question that several examples belong
    to (MultiRC, ReCoRD), `answers` are the texts that count as right for it (ReCoRD).
    """

    fields: Mapping[str, Any]
    label: int | None
    group: str = ""
    answers: tuple[str, ...] = ()


# The examples that one line of a file holds. Raises KeyError for a missing field, ValueError for a
# wrong one.
Reader = Callable[[str], list[Example]]
