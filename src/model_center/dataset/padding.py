"""Rows of one length, and batches that are as long as their longest row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

Item = dict[str, torch.Tensor]


class Overview(NamedTuple):
    """What there is to say of rows before a run.

    Attributes:
        num_loss_tokens: tokens that are targets in an epoch.
        num_left_out: samples without a token in the loss.
        layout: how samples share rows, in words.
        first: the first row or sample.
    """

    num_loss_tokens: int
    num_left_out: int
    layout: str
    first: Item


def padded(ids: Sequence[int], length: int, fill: int = 0) -> torch.Tensor:
    """(length,) int32: at most so many ids, and `fill` after them."""
    return torch.tensor([*ids, *[fill] * (length - len(ids))], dtype=torch.int32)


def count(number: int) -> torch.Tensor:
    """() int32."""
    return torch.tensor(number, dtype=torch.int32)


def shortened(batch: Item, lengths: Mapping[str, str]) -> Item:
    """The batch without the columns that are padding in every row.

    `lengths` names, for a key with rows, the key that tells how much of them is used: numbers (B,),
    or masks (B, length). Other keys stay as they are.
    """
    used = {key: _columns(batch[key]) for key in set(lengths.values())}
    return {
        key: value[:, : used[lengths[key]]].contiguous() if key in lengths else value
        for key, value in batch.items()
    }


def _columns(used: torch.Tensor) -> int:
    return int(used.max()) if used.dim() == 1 else int(used.any(0).nonzero().max()) + 1


def collate(items: Sequence[Item], fill: Mapping[str, int]) -> Item:
    """Stack the items key by key: entries (B,) or (B, longest), padded by `fill[key]` or 0.

    All items have the keys of the first. Dtypes stay.
    """
    return {key: _stack([item[key] for item in items], fill.get(key, 0)) for key in items[0]}


def _stack(values: Sequence[torch.Tensor], fill: int) -> torch.Tensor:
    if values[0].dim() == 0:
        return torch.stack(list(values))
    return torch.nn.utils.rnn.pad_sequence(list(values), batch_first=True, padding_value=fill)


def one_hot(position: int, length: int) -> torch.Tensor:
    """(length,) int32: 1 at `position`, 0 elsewhere."""
    index = torch.zeros(length, dtype=torch.int32)
    index[position] = 1
    return index
