"""Several samples in one row, which do not see one another, so that little is padding."""

from __future__ import annotations

import bisect
import enum
from collections.abc import Sequence

import numpy as np
import torch

from model_center.dataset import padding
from model_center.dataset.instructions import InstructionDataset
from model_center.dataset.mixture import Mixture
from model_center.dataset.padding import Item, Overview
from model_center.errors import DataError


class Packing(enum.Enum):
    """How texts share rows.

    SEPARATE: in pieces that do not see one another. CONCATENATED: one after the other, cut into
    rows of which each token sees all before it, the end of another text perhaps.
    """

    SEPARATE = "separate"
    CONCATENATED = "concatenated"


class PackedSamples(torch.utils.data.Dataset[Item]):
    """Rows of at most `max_length` tokens, each made of whole samples.

    Items hold, int64 (length,): `input_ids`; `targets`, the next id where it is part of an answer
    of the same sample, -100 elsewhere; `position_ids`, which start at 0 in every sample;
    `segments`, the number of the sample in its row, from 1 on (0 is padding); and `input_length`.
    Attention must not cross samples: `segment_mask(segments)` is a model's `attention_mask`, and
    `segments` is CPM-1's `span`.

    The same samples always give the same rows.

    Attributes:
        rows: the numbers of the samples in each row; none of one that `fill_up` has added.
        num_without_answer: samples left out because none of their answer is within `max_length`.
    """

    def __init__(
        self,
        samples: InstructionDataset | Mixture,
        max_length: int,
        least: int = 1,
        *,
        alone: bool = False,
    ) -> None:
        """Pack samples into rows.

        Args:
            samples: of at most `max_length` tokens each.
            max_length: of a row.
            least: the fewest rows to make, if there are so many samples: one for each rank.
            alone: whether each sample has a row of its own, for models that mix what shares one.

        Raises:
            DataError: if the samples may be longer than a row, or none has an answer within its
                length.
        """
        if samples.max_length > max_length:
            raise DataError(
                f"samples have up to {samples.max_length} tokens, rows {max_length}: "
                "expected rows to hold any sample."
            )
        useful = np.flatnonzero(samples.num_loss_tokens).tolist()
        if not useful:
            raise DataError(
                f"no sample has an answer within its first {samples.max_length} tokens: "
                "raise max_length."
            )
        self.samples = samples
        self.num_without_answer = len(samples) - len(useful)
        rows = best_fit(samples.lengths[useful].tolist(), max_length)
        self.rows = [[useful[place] for place in row] for row in spread(rows, least)]
        if alone:
            self.rows = [[number] for number in useful]
        self._length, self._is_alone = max_length, alone

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.rows)

    def __getitem__(self, index: int) -> Item:
        """Row `index`."""
        row = self.rows[index]
        items = [self.samples[number] for number in row or self.rows[0]]
        lengths = [len(item["input_ids"]) for item in items]
        targets = torch.cat([item["targets"] for item in items])
        return {
            "input_ids": torch.cat([item["input_ids"] for item in items]),
            "targets": targets if row else torch.full_like(targets, -100),
            "position_ids": torch.cat([torch.arange(length) for length in lengths]),
            "segments": torch.repeat_interleave(
                torch.arange(1, len(items) + 1), torch.tensor(lengths)
            ),
            "input_length": torch.tensor(sum(lengths)),
        }

    def fill_up(self, least: int) -> None:
        """Add rows without a token in the loss until there are `least`: one for each rank."""
        self.rows += [[] for _ in range(least - len(self.rows))]

    def overview(self) -> Overview:
        """What there is to say of the rows."""
        samples, count = self.samples, len(self)
        used = sum(int(samples.lengths[row].sum()) for row in self.rows)
        how = (
            "one to a row (this model mixes what shares one):" if self._is_alone else "packed into"
        )
        padded = 1 - used / (count * self._length)
        layout = f"{how} {count:,} rows of {self._length}, {padded:.1%} padding"
        first = samples[self.rows[0][0]]
        return Overview(int(samples.num_loss_tokens.sum()), self.num_without_answer, layout, first)

    def num_bytes(self) -> int | None:
        """Bytes of the text in the loss of all rows; None where that is not known."""
        found = [self.samples.num_bytes(number) for row in self.rows for number in row]
        known = [size for size in found if size is not None]
        return sum(known) if len(known) == len(found) else None

    def collate(self, items: Sequence[Item]) -> Item:
        """A batch of B `items`: (B, longest) tensors, padded on the right, and (B,) lengths."""
        return padding.collate(items, self.samples.fill)


def best_fit(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Places of `lengths` in groups that sum to at most `room`: longest first, best fit.

    No length may exceed `room`. The groups are in the order of their first places, each sorted.
    """
    groups: list[list[int]] = []
    open_by_room: dict[int, list[int]] = {}  # room left -> groups
    rooms: list[int] = []  # the keys of it, sorted
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        fit = bisect.bisect_left(rooms, lengths[place])
        if fit == len(rooms):
            groups.append([])
            group, left = len(groups) - 1, room
        else:
            left = rooms[fit]
            group = open_by_room[left].pop()
            if not open_by_room[left]:
                del rooms[fit], open_by_room[left]
        groups[group].append(place)
        left -= lengths[place]
        if left not in open_by_room:
            bisect.insort(rooms, left)
        open_by_room.setdefault(left, []).append(group)
    return sorted(sorted(group) for group in groups)


def spread(groups: Sequence[list[int]], least: int) -> list[list[int]]:
    """The groups, halved one after the other, the longest first, until there are `least` of them or
    each has one member.
    """
    groups = list(groups)
    while len(groups) < least:
        longest = max(range(len(groups)), key=lambda place: len(groups[place]))
        members = groups[longest]
        if len(members) == 1:
            break
        half = len(members) // 2
        groups[longest : longest + 1] = [members[:half], members[half:]]
    return groups


def segment_mask(segments: torch.Tensor) -> torch.Tensor:
    """bool (B, S, S) from `segments` (B, S): a token sees its own sample up to itself."""
    same = segments[:, :, None] == segments[:, None, :]
    return same.tril()
