"""Two files of token data that belong together, sequence by sequence."""

from __future__ import annotations

import abc
import operator
from typing import Any, Protocol, SupportsIndex

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset, default_collate

from model_center.dataset.protocols import shards_of
from model_center.errors import DataError


class Tokens(Protocol):
    """Token data by number, such as MMapIndexedDataset and DistributedMMapIndexedDataset."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> npt.NDArray[Any]: ...

    @property
    def sizes(self) -> npt.NDArray[Any]:
        """(len,), elements of each sequence."""


class Pairs:
    """The pairs of `ctx` and `tgt` that are short enough, by number.

    Raises:
        DataError: when the two have different numbers of sequences.
    """

    def __init__(self, ctx: Tokens, tgt: Tokens, max_ctx: int, max_tgt: int) -> None:
        if len(ctx) != len(tgt) or shards_of(ctx) != shards_of(tgt):
            raise DataError(
                f"ctx has {len(ctx)} sequences and tgt {len(tgt)}: they belong together one by "
                "one, and must be equally many and divided alike."
            )
        self._ctx, self._tgt = ctx, tgt
        self.num_shards = shards_of(ctx)
        self._rows = np.flatnonzero((ctx.sizes <= max_ctx) & (tgt.sizes <= max_tgt))
        self.num_skipped = len(ctx) - len(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        row = int(self._rows[index])
        return self._ctx[row], self._tgt[row]


class PairRows(Dataset[dict[str, Any]], abc.ABC):
    """Rows made of pairs; `len` counts them, and not those that are too long.

    A slice gives its rows as one batch.
    """

    _pairs: Pairs

    @property
    def num_shards(self) -> int:
        """Among how many ranks the files are divided already."""
        return self._pairs.num_shards

    @property
    def num_skipped(self) -> int:
        """Pairs that are too long."""
        return self._pairs.num_skipped

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: SupportsIndex | slice) -> dict[str, Any]:
        if isinstance(index, slice):
            return dict(default_collate([self[row] for row in range(*index.indices(len(self)))]))
        return self.row(*self._pairs[operator.index(index)])

    @abc.abstractmethod
    def row(self, ctx: npt.NDArray[Any], tgt: npt.NDArray[Any]) -> dict[str, Any]:
        """The row of a pair."""


def padded(ids: npt.NDArray[Any], length: int, fill: int) -> torch.Tensor:
    """int64 (length,): the ids, and `fill` after them."""
    row = torch.full((length,), fill)
    row[: len(ids)] = torch.from_numpy(ids.astype(np.int64))
    return row
