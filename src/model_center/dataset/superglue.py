"""The eight tasks of SuperGLUE (Wang et al. 2019): published JSON lines in, examples out.

A task's file is `<path>/<Task>/<split>.jsonl`, or `<path>/<split>.jsonl` where the path is the
task's own folder.
"""

from __future__ import annotations

import functools
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from model_center.dataset.line_file import LineFile
from model_center.dataset.protocols import Example
from model_center.errors import DataError

Row = Mapping[str, Any]

FILES = {"train": "train", "dev": "val", "val": "val", "test": "test"}

YES_NO = {False: 0, True: 1, "false": 0, "true": 1}
CB_LABELS = {"contradiction": 0, "entailment": 1, "neutral": 2}
RTE_LABELS = {"not_entailment": 0, "entailment": 1}


def examples(
    path: str | pathlib.Path, task: str, split: str, *, both_ways: bool = False
) -> LineFile:
    """The examples of a task's split; none, as in ModelCenter, of a "test" that is missing.

    Args:
        path: the folder that holds a folder for each task, or the task's own folder.
        task: a key of `TASKS`.
        split: "train", "dev" (or "val") or "test".
        both_ways: COPA only: each row twice, the second time with its choices swapped.

    Raises:
        DataError: for an unknown split, a missing or empty file, a line that is not of the task's
            format.
    """
    file = find(pathlib.Path(path), task, split)
    read = functools.partial(_read, copa_both_ways if both_ways else TASKS[task])
    return LineFile(file, read, labelled=split != "test", missing=not file.is_file())


def find(path: pathlib.Path, task: str, split: str) -> pathlib.Path:
    """The file of a task's split; of "test", which may be missing, where it would be.

    Raises:
        DataError: naming the files that were looked for.
    """
    if split not in FILES:
        raise DataError(f"{task} has no split {split!r}: expected one of {', '.join(FILES)}.")
    name = f"{FILES[split]}.jsonl"
    candidates = [path / task / name, path / name]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    if split == "test" and (path / task).is_dir():
        return candidates[0]
    looked_for = " nor ".join(str(candidate) for candidate in candidates)
    raise DataError(
        f"{task}, split {split!r}: there is neither {looked_for}. Unzip the task's folder "
        "of SuperGLUE there."
    )


def _read(task: Callable[[Row], list[Example]], line: str) -> list[Example]:
    """The examples of a task's line."""
    row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError(f"got {type(row).__name__}: expected a JSON object.")
    return task(row)


def texts(row: Row, names: Sequence[str], classes: Mapping[Any, int]) -> list[Example]:
    """A row that is an example of these fields."""
    return [Example(fields=_texts(row, *names), label=_label(row, classes))]


def _of(*names: str, classes: Mapping[Any, int]) -> Callable[[Row], list[Example]]:
    return functools.partial(texts, names=names, classes=classes)


def copa_both_ways(row: Row) -> list[Example]:
    """COPA's row, and the same with its choices swapped, which is another example."""
    (example,) = TASKS["COPA"](row)
    swapped = {
        **example.fields,
        "choice1": example.fields["choice2"],
        "choice2": example.fields["choice1"],
    }
    return [
        example,
        Example(fields=swapped, label=None if example.label is None else 1 - example.label),
    ]


def wsc(row: Row) -> list[Example]:
    """Winograd schemas: does the pronoun `span2_text` refer to the noun `span1_text`."""
    fields = _texts(row, "text") | _texts(_object(row, "target"), "span1_text", "span2_text")
    return [Example(fields=fields, label=_label(row, YES_NO))]


def multirc(row: Row) -> list[Example]:
    """An example for every answer of every question; the group is "row-question"."""
    passage = _object(row, "passage")
    text = _text(passage, "text")
    return [
        Example(
            fields={
                "text": text,
                "question": _text(question, "question"),
                "answer": _text(answer, "text"),
            },
            label=_label(answer, {0: 0, 1: 1}),
            group=f"{row['idx']}-{question['idx']}",
        )
        for question in _list(passage, "questions")
        for answer in _list(question, "answers")
    ]


def record(row: Row) -> list[Example]:
    """An example for every entity that may fill a query's placeholder: is it an answer?

    Entities are spans of the passage, their end included; one that is named several times is one
    candidate.
    """
    passage = _object(row, "passage")
    text = _text(passage, "text")
    entities = list(
        dict.fromkeys(text[span["start"] : span["end"] + 1] for span in _list(passage, "entities"))
    )
    return [
        Example(
            fields={
                "text": text.replace("@highlight\n", "- "),
                "query": _text(question, "query"),
                "entities": entities,
                "entity": entity,
            },
            label=int(entity in answers) if "answers" in question else None,
            group=f"{row['idx']}-{question['idx']}",
            answers=answers,
        )
        for question in _list(row, "qas")
        for answers in [tuple(_text(answer, "text") for answer in question.get("answers", ()))]
        for entity in entities
    ]


# Is a statement on a passage true; does a premise entail a hypothesis (CB, RTE); which choice is
# the cause or effect (`question` says which) of a premise; has a word one sense in two sentences.
TASKS: dict[str, Callable[[Row], list[Example]]] = {
    "BoolQ": _of("passage", "question", classes=YES_NO),
    "CB": _of("premise", "hypothesis", classes=CB_LABELS),
    "COPA": _of("premise", "choice1", "choice2", "question", classes={0: 0, 1: 1}),
    "MultiRC": multirc,
    "ReCoRD": record,
    "RTE": _of("premise", "hypothesis", classes=RTE_LABELS),
    "WiC": _of("word", "sentence1", "sentence2", classes=YES_NO),
    "WSC": wsc,
}


def _texts(row: Row, *names: str) -> dict[str, str]:
    return {name: _text(row, name) for name in names}


def _text(row: Row, name: str) -> str:
    value = row[name]
    if not isinstance(value, str):
        raise ValueError(f"field {name!r} is {value!r}: expected a text.")
    return value


def _object(row: Row, name: str) -> Row:
    value = row[name]
    if not isinstance(value, dict):
        raise ValueError(f"field {name!r} is {value!r}: expected an object.")
    return value


def _list(row: Row, name: str) -> list[Any]:
    value = row[name]
    if not isinstance(value, list):
        raise ValueError(f"field {name!r} is {value!r}: expected a list.")
    return value


def _label(row: Row, classes: Mapping[Any, int]) -> int | None:
    if "label" not in row:
        return None
    if row["label"] not in classes:
        raise ValueError(
            f"the label is {row['label']!r}: expected one of {', '.join(map(repr, classes))}."
        )
    return classes[row["label"]]
