"""Samples of several files as one data set, in shares, and parts of it set aside."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from model_center.dataset.instructions import InstructionDataset
from model_center.dataset.order import permutation
from model_center.dataset.padding import Item
from model_center.errors import DataError


class Part(NamedTuple):
    """Some samples of a data set, by number; one may be there several times."""

    samples: InstructionDataset
    numbers: Sequence[int]


class Mixture(torch.utils.data.Dataset[Item]):
    """The parts one after the other; all have one tokenizer and `max_length`.

    Raises:
        DataError: without a sample.
    """

    def __init__(self, parts: Iterable[Part]) -> None:
        parts = list(parts)
        self._places = [(part.samples, number) for part in parts for number in part.numbers]
        if not self._places:
            raise DataError("there is nothing to learn from: all parts of the data are empty.")
        first = parts[0].samples
        self.max_length, self.fill, self.collate = first.max_length, first.fill, first.collate

    def __len__(self) -> int:
        """The number of samples."""
        return len(self._places)

    def __getitem__(self, index: int) -> Item:
        """Sample `index`, tokenised now."""
        samples, number = self._places[index]
        return samples[number]


def weighted(part: Part, weight: float, *key: int) -> Part:
    """The part `weight` times over; of what is left of it below 1, so large a share by chance.

    Args:
        part: what is repeated.
        weight: above 0.
        key: of the chance: the same part and key give the same samples.
    """
    count = len(part.numbers)
    some = permutation(count, *key)[: round(weight % 1 * count)]
    numbers = [part.numbers[place] for place in sorted(some.tolist())]
    return Part(part.samples, [*list(part.numbers) * int(weight), *numbers])


def set_aside(part: Part, share: float, *key: int) -> tuple[Part, Part]:
    """The part without a share of it, drawn by `key`, and that share: at least one sample if
    `share` is above 0.
    """
    count = len(part.numbers)
    size = max(round(share * count), 1) if share else 0
    order = permutation(count, *key).tolist()
    rest, aside = sorted(order[size:]), sorted(order[:size])
    return (
        Part(part.samples, [part.numbers[place] for place in rest]),
        Part(part.samples, [part.numbers[place] for place in aside]),
    )
