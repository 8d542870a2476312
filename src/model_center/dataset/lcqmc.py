"""LCQMC (Liu et al. 2018): do two Chinese questions ask the same? `<path>/LCQMC/<split>.tsv`.

A header names the columns: text_a, text_b and label, which the test split may lack.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import ClassVar

from model_center.dataset.line_file import LineFile
from model_center.dataset.protocols import Example
from model_center.dataset.task_dataset import TaskDataset, Tokenizer, word_ids
from model_center.errors import DataError

FILES = {"train": "train.tsv", "dev": "dev.tsv", "test": "test.tsv"}
COLUMNS = ["text_a", "text_b", "label"]
WORDS = ("有关", "无关")  # "related" and "unrelated", in ModelCenter's order


class PairTask(TaskDataset):
    """LCQMC for one family of models.

    Attributes:
        PUBLISHED_VERBALIZER: the ids that ModelCenter takes for `WORDS`, those of the published
            vocabulary.
    """

    target_key = "targets"
    PUBLISHED_VERBALIZER: ClassVar[tuple[int, int]]

    @classmethod
    def get_verbalizer(cls, tokenizer: Tokenizer) -> list[int]:
        """The ids that stand for the classes, in the order of the labels; those of `WORDS` where a
        vocabulary is too small to be the published one.
        """
        if tokenizer.vocab_size > max(cls.PUBLISHED_VERBALIZER):
            return list(cls.PUBLISHED_VERBALIZER)
        return word_ids(tokenizer, WORDS)


def examples(path: str | pathlib.Path, split: str) -> LineFile:
    """The pairs of a split, below `path` or in it.

    Raises:
        DataError: for an unknown split, a missing or empty file, a line that is not of the format.
    """
    if split not in FILES:
        raise DataError(f"LCQMC has no split {split!r}: expected one of {', '.join(FILES)}.")
    candidates = [pathlib.Path(path, "LCQMC", FILES[split]), pathlib.Path(path, FILES[split])]
    file = next((candidate for candidate in candidates if candidate.is_file()), None)
    if file is None:
        raise DataError(
            f"LCQMC, split {split!r}: there is neither {candidates[0]} nor {candidates[1]}."
        )
    with file.open(encoding="utf-8") as lines:
        header = lines.readline().split()
    if header[:2] != COLUMNS[:2]:
        raise DataError(f"{file} begins with {header[:3]}: expected the header {COLUMNS}.")
    return LineFile(file, read, labelled=split != "test", header=True)


def read(line: str) -> list[Example]:
    """The pair of a line."""
    cells = line.rstrip("\r\n").split("\t")
    if len(cells) not in (2, 3) or cells[2:] not in ([], ["0"], ["1"]):
        raise ValueError(
            f"got {cells}: expected two texts and the label 0 or 1, with tabs between them."
        )
    return [
        Example(fields={"a": cells[0], "b": cells[1]}, label=int(cells[2]) if cells[2:] else None)
    ]


def truncated(
    encode: Callable[[str, str], list[int]], a: str, b: str, max_length: int
) -> list[int]:
    """`encode(a, b)`, the end of the longer text, then of both, cut to at most `max_length` ids."""
    ids = encode(a, b)
    while len(ids) > max_length and (a or b):
        # a token has a character or more: this is never too few
        kept = max(0, len(a) + len(b) - (len(ids) - max_length))
        short = min(len(a), len(b), kept // 2)
        a, b = (
            (a[: kept - short], b[:short]) if len(a) >= len(b) else (a[:short], b[: kept - short])
        )
        ids = encode(a, b)
    return ids
