"""Rows on which CPM-2 is trained, from token data."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from model_center.dataset.pairs import PairRows, SequencePairs, TokenSequences, padded

IGNORED = -100
# The data were made with 190 more ids before these than the published vocabulary has.
FIRST_MOVED, MOVED_BY = 26240, 190


class CPM2_Dataset(PairRows):
    """Inputs of the encoder and sequences of the decoder from two files of token data, padded.

    A row is `ctx` int64 (max_source_length,), padded with 0; `tgt` int64 (max_target_length + 1,),
    padded with -100: the decoder reads tgt[:-1] (with 0 in place of -100) and predicts tgt[1:];
    `len_ctx`, the ids in ctx, and `len_tgt`, those that the decoder reads, max_target_length at
    most. Ids from 26240 on are lowered by 190. A pair of which one is too long is None.

    Args:
        ctx: sequences of ids, an MMapIndexedDataset for example.
        tgt: as many, those of the decoder.
        max_source_length: of the encoder's ids.
        max_target_length: of the decoder's ids.

    Raises:
        DataError: when the files do not belong together.
    """

    def __init__(
        self,
        ctx: TokenSequences,
        tgt: TokenSequences,
        max_source_length: int = 512,
        max_target_length: int = 256,
    ) -> None:
        self._source_length, self._target_length = max_source_length, max_target_length + 1
        self._pairs = SequencePairs(ctx, tgt, self._source_length, self._target_length)

    def row(self, ctx: npt.NDArray[Any], tgt: npt.NDArray[Any]) -> dict[str, Any]:
        """The ids in the published vocabulary, padded."""
        return {
            "ctx": padded(_moved(ctx), self._source_length, 0),
            "tgt": padded(_moved(tgt), self._target_length, IGNORED),
            "len_ctx": len(ctx),
            "len_tgt": min(len(tgt), self._target_length - 1),
        }


def _moved(ids: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """The ids in the published vocabulary."""
    wide = ids.astype(np.int64)
    return np.where(wide >= FIRST_MOVED, wide - MOVED_BY, wide)
