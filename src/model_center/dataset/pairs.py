"""Two files of token data that belong together, sequence by sequence."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol, SupportsIndex

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset, default_collate

from model_center.dataset.protocols import shards_of
from model_center.errors import DataError


class TokenSequences(Protocol):
    """Token data by number, such as MMapIndexedDataset and DistributedMMapIndexedDataset."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> npt.NDArray[Any]: ...

    @property
    def sizes(self) -> npt.NDArray[Any]:
        """(len,), elements of each sequence."""


class SequencePairs:
    """The pairs of `ctx` and `tgt`, numbered as in their files; `fits` says which are short enough.

    Raises:
        DataError: when the two have different numbers of sequences.
    """

    def __init__(
        self, ctx: TokenSequences, tgt: TokenSequences, max_ctx: int, max_tgt: int
    ) -> None:
        if len(ctx) != len(tgt) or shards_of(ctx) != shards_of(tgt):
            raise DataError(
                f"ctx has {len(ctx)} sequences and tgt {len(tgt)}: expected a target for each "
                "context, and both divided alike among the ranks."
            )
        self._ctx, self._tgt = ctx, tgt
        self.num_shards = shards_of(ctx)
        self.fits = (ctx.sizes <= max_ctx) & (tgt.sizes <= max_tgt)

    def __getitem__(self, index: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        return self._ctx[index], self._tgt[index]


class PairRows(Dataset[Any], abc.ABC):
    """Rows made of pairs, numbered as in the files, which a program's own order may be drawn over.

    `len` counts all of them; one that is too long is `LONG`, and a slice, which gives its rows as
    one batch, leaves it out. `Subset(dataset, dataset.short)` has the others only.
    """

    LONG: ClassVar[dict[str, Any] | None] = None
    _pairs: SequencePairs

    @property
    def num_shards(self) -> int:
        """Among how many ranks the files are divided already."""
        return self._pairs.num_shards

    @property
    def short(self) -> list[int]:
        """The numbers of the pairs that are not too long."""
        return [int(number) for number in np.flatnonzero(self._pairs.fits)]

    @property
    def num_skipped(self) -> int:
        """SequencePairs that are too long."""
        return len(self) - len(self.short)

    def __len__(self) -> int:
        return len(self._pairs.fits)

    def __getitem__(self, index: SupportsIndex | slice) -> Any:
        if isinstance(index, slice):
            numbers = [n for n in range(*index.indices(len(self))) if self._pairs.fits[n]]
            return dict(default_collate([self[number] for number in numbers]))
        number = range(len(self))[index]
        return self.row(*self._pairs[number]) if self._pairs.fits[number] else self.LONG

    def collate(self, rows: Sequence[dict[str, Any] | None]) -> Any:
        """A batch of rows.

        Raises:
            DataError: if one of them is too long.
        """
        if any(row is self.LONG for row in rows):
            raise DataError(
                f"{self.num_skipped} rows of {type(self).__name__} are too long: load "
                "torch.utils.data.Subset(dataset, dataset.short), or raise the lengths."
            )
        return default_collate(list(rows))

    @abc.abstractmethod
    def row(self, ctx: npt.NDArray[Any], tgt: npt.NDArray[Any]) -> dict[str, Any]:
        """The row of a pair."""


def padded(ids: npt.NDArray[Any], length: int, fill: int) -> torch.Tensor:
    """int64 (length,): the ids, and `fill` after them."""
    row = torch.full((length,), fill)
    row[: len(ids)] = torch.from_numpy(ids.astype(np.int64))
    return row
