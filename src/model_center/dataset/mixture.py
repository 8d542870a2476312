"""Rows of several files as one data set, in shares, and parts of it set aside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from model_center.dataset.instructions import InstructionDataset
from model_center.dataset.padding import Item
from model_center.dataset.sampler import permutation
from model_center.errors import DataError


class MixturePart(NamedTuple):
    """Some rows of a data set, by number; one may be there several times."""

    samples: InstructionDataset
    numbers: Sequence[int]


class Mixture(torch.utils.data.Dataset[Item]):
    """The samples of the parts one after the other; all have one tokenizer and `max_length`.

    Attributes:
        lengths, num_loss_tokens: as of `InstructionDataset`.

    Raises:
        DataError: without a sample.
    """

    def __init__(self, parts: Sequence[MixturePart]) -> None:
        self._parts = [part.samples for part in parts]
        numbers = [
            np.array([n for row in part.numbers for n in part.samples.samples_of(row)], np.int64)
            for part in parts
        ]
        self._ends = np.cumsum([len(some) for some in numbers])
        if not len(self):
            raise DataError("no training data: all data sets are empty.")
        self._numbers = np.concatenate(numbers)
        pairs = list(zip(self._parts, numbers, strict=True))
        self.lengths = np.concatenate([samples.lengths[some] for samples, some in pairs])
        self.num_loss_tokens = np.concatenate(
            [samples.num_loss_tokens[some] for samples, some in pairs]
        )
        first = self._parts[0]
        self.max_length, self.fill, self.collate = first.max_length, first.fill, first.collate

    def __len__(self) -> int:
        """The number of samples."""
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> Item:
        """Sample `index`."""
        samples, number = self.origin(range(len(self))[index])
        return samples[number]

    def is_text(self, index: int) -> bool:
        """Whether sample `index` is one of a text."""
        samples, number = self.origin(index)
        return samples.is_text(number)

    def begins(self, index: int) -> bool:
        """Whether sample `index` is the beginning of its row."""
        samples, number = self.origin(index)
        return samples.row_and_start(number)[1] == 0

    def num_bytes(self, index: int) -> int | None:
        """Bytes of the text in the loss of sample `index`; None where that is not known."""
        samples, number = self.origin(index)
        return samples.num_bytes(number)

    def origin(self, index: int) -> tuple[InstructionDataset, int]:
        """The data set that sample `index` is of, and its number there."""
        part = int(np.searchsorted(self._ends, index, "right"))
        return self._parts[part], int(self._numbers[index])


def weighted(part: MixturePart, weight: float, *key: int) -> MixturePart:
    """The part `weight` times over; of what is left of it below 1, so large a share by chance.

    Args:
        part: what is repeated.
        weight: above 0.
        key: of the chance: the same part and key give the same rows.

    Raises:
        DataError: for a share of which no row is left.
    """
    count = len(part.numbers)
    if round(weight * count) == 0:
        raise DataError(
            f"{part.samples.source.name}: a weight of {weight:g} leaves none of {count} rows: "
            "give a larger one, or leave these data out."
        )
    some = permutation(count, *key)[: round(weight % 1 * count)]
    numbers = [part.numbers[place] for place in sorted(some.tolist())]
    return MixturePart(part.samples, [*list(part.numbers) * int(weight), *numbers])


def set_aside(part: MixturePart, share: float, *key: int) -> tuple[MixturePart, MixturePart]:
    """The part without a share of it, drawn by `key`, and that share: at least one row if
    `share` is above 0. Of a single text it is the end.

    Raises:
        DataError: for a single row that is no text.
    """
    count = len(part.numbers)
    if share and count == 1:
        part.samples.divide(share)
        return MixturePart(part.samples, [0]), MixturePart(part.samples, [1])
    size = max(round(share * count), 1) if share else 0
    order = permutation(count, *key).tolist()
    rest, aside = sorted(order[size:]), sorted(order[:size])
    return (
        MixturePart(part.samples, [part.numbers[place] for place in rest]),
        MixturePart(part.samples, [part.numbers[place] for place in aside]),
    )
