"""What task datasets share: examples that become items when asked for, and batches.

Items are tokenised in `__getitem__`, on the CPU, by whoever loads them: use as many loader workers
as you like. Their rows are ModelCenter's, padded to the maximum length, so that torch's DataLoader
stacks them. `DistributedDataLoader` cuts what is padding in all rows of a batch, by `collate`,
which is a `collate_fn` for torch's DataLoader, too.

`rank` and `world_size` are arguments of the constructors for the sake of older programs and have no
effect: every dataset holds all rows, and the loader divides them among the ranks.
"""

from __future__ import annotations

import abc
import difflib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch.utils.data import default_collate

from model_center.dataset.line_file import UNLABELLED, LineFile
from model_center.dataset.padding import Item, shortened
from model_center.dataset.protocols import Example
from model_center.errors import DataError, IdentifierError


class Tokenizer(Protocol):
    """What the datasets ask of a tokenizer; ours and those of transformers have it."""

    vocab_size: int
    bos_token_id: int | None
    eos_token_id: int | None
    pad_token_id: int | None
    unk_token_id: int | None

    def __call__(
        self, text: str, text_pair: str | None = None, **options: Any
    ) -> Mapping[str, Any]:
        """`input_ids` of the text or pair, and what else `options` ask for."""
        ...

    def encode(self, text: str, **options: Any) -> list[int]:
        """The ids of a text."""
        ...

    def convert_tokens_to_ids(self, tokens: str) -> int:
        """The id of a token; that of the unknown token, or None, if there is none."""
        ...


class TaskTable(dict[str, type[Any]]):
    """Task name to dataset class; an unknown name is told which there are."""

    def __missing__(self, name: str) -> type[Any]:
        """Raises IdentifierError, naming the nearest tasks."""
        near = difflib.get_close_matches(name.lower(), {task.lower(): task for task in self}, n=1)
        hint = "".join(
            f" Did you mean {task!r}?" for task in self if near and task.lower() == near[0]
        )
        raise IdentifierError(
            f"there is no task {name!r} for this model: expected one of {', '.join(self)}.{hint}"
        )


class TaskDataset(torch.utils.data.Dataset[Item], abc.ABC):
    """Items made of the examples of a file.

    Attributes:
        examples: the examples behind the items.
        labelled: whether items hold labels. If they do not, as in a test split, they hold `idx`,
            their number.
        lengths: for each key of a row, the key that tells how much of it is not padding.

    Items of MultiRC and ReCoRD, whose questions have several items each, also hold `idx` and the
    number of their question, `group`, by which they are scored together.
    """

    target_key = "labels"
    lengths: ClassVar[Mapping[str, str]]

    def __init__(self, examples: LineFile, tokenizer: Tokenizer) -> None:
        """Items from `examples`, by `tokenizer`."""
        self.examples = examples
        self.tokenizer = tokenizer
        self.labelled = UNLABELLED not in examples.labels

    @abc.abstractmethod
    def encode(self, example: Example) -> Item:
        """The model's inputs for an example, padded."""

    def target(self, index: int, example: Example) -> Item:
        """The label of item `index`; its number if there is none; both and its group if grouped."""
        label = {self.target_key: torch.tensor(example.label)} if self.labelled else {}
        number = {} if self.labelled and not self.examples.grouped else {"idx": torch.tensor(index)}
        group = (
            {"group": torch.tensor(self.examples.groups[index])} if self.examples.grouped else {}
        )
        return label | number | group

    def __len__(self) -> int:
        """The number of items."""
        return len(self.examples)

    def __getitem__(self, index: int) -> Item:
        """Item `index`, tokenised now."""
        index = range(len(self))[index]
        example = self.examples[index]
        return self.encode(example) | self.target(index, example)

    def collate(self, items: Sequence[Item]) -> Item:
        """A batch: tensors (B, longest row), and (B,) labels."""
        return shortened(default_collate(list(items)), self.lengths)

    @property
    def may_be_empty(self) -> bool:
        """Whether it holds no rows, as there is no test split; a loader has no batches then."""
        return len(self) == 0

    @property
    def qids(self) -> list[str]:
        """The question of each item, "row-question" (MultiRC, ReCoRD); else empty."""
        return [self.examples.group_names[group] for group in self.examples.groups]


def at_least(length: int, least: int, name: str) -> None:
    """DataError if the maximum length called `name` cannot hold what every row needs."""
    if length < least:
        raise DataError(
            f"{name} is {length}: expected at least {least}, the room that every row needs."
        )


def word_ids(tokenizer: Tokenizer, words: Sequence[str]) -> list[int]:
    """The id that tells each word from the others: of its first token, where these differ.

    Tokens that all words begin with are passed over (LLaMA writes "1" and "2" as "▁1" and "▁2" with
    "▁" a token of its own), and so are special tokens. For classification, logits at these ids are
    compared with one another.

    Raises:
        DataError: if the vocabulary does not tell the words apart.
    """
    rows = [tokenizer.encode(word, add_special_tokens=False) for word in words]
    shared = sum(
        1
        for _ in itertools.takewhile(lambda column: len(set(column)) == 1, zip(*rows, strict=False))
    )
    ids = [row[shared] for row in rows if len(row) > shared]
    if len(set(ids) - {tokenizer.unk_token_id}) < len(words):
        got = ", ".join(f"{word!r}: {row}" for word, row in zip(words, rows, strict=True))
        raise DataError(
            f"the words of the classes begin with the same token in this vocabulary ({got}): "
            "expected distinct first ids."
        )
    return ids


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that the vocabulary must have.

    Raises:
        DataError: if it is missing.
    """
    number = tokenizer.convert_tokens_to_ids(token)
    if number is None or number == tokenizer.unk_token_id:
        raise DataError(f"the tokenizer has no token {token}: expected that of a T5 model.")
    return number
