"""From items to a batch: rows padded on the right to the longest of the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

Item = dict[str, torch.Tensor]


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
