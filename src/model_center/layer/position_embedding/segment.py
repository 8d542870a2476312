"""CPM-3's relative positions: distances within a segment, a number per pair of segments."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import bmtrain as bmt
from model_center.errors import InputError
from model_center.layer.embedding import check_range
from model_center.layer.parameter import normal, parameter
from model_center.layer.position_embedding.relative import Positions, bucket_of, positions_of


class SegmentPositionEmbedding(bmt.DistributedModule):
    """Bias of the scores for pairs of positions in segments.

    Rows 0 to num_buckets - 1 of the table are for distances; row num_buckets + q * num_segments + k
    is for a query in segment q and a key in segment k.

    Args:
        num_heads: heads of the attention, each with numbers of its own.
        num_segments: how many segments there are.
        num_buckets, max_distance, bidirectional: as in `RelativePositionEmbedding`.
        dtype: of the table.
        absolute_inner_segment: whether pairs of one segment take the row of their distance.
        init_mean, init_std: of the first values.
    """

    def __init__(  # noqa: PLR0913 (ModelCenter's signature)
        self,
        num_heads: int,
        num_segments: int = 1,
        num_buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool = False,
        dtype: torch.dtype = torch.half,
        absolute_inner_segment: bool = True,
        init_mean: float = 0.0,
        init_std: float = 1,
    ) -> None:
        super().__init__()
        self.num_segments, self.num_buckets, self.max_distance = (
            num_segments,
            num_buckets,
            max_distance,
        )
        self.bidirectional, self.absolute_inner_segment = bidirectional, absolute_inner_segment
        rows = num_segments * num_segments + num_buckets
        self.relative_attention_bias = parameter(
            (rows, num_heads), dtype, normal(init_mean, init_std)
        )

    def forward(
        self,
        key_pos: Positions | None = None,
        query_pos: Positions | None = None,
        key_segment: Positions | None = None,
        query_segment: Positions | None = None,
    ) -> torch.Tensor:
        """The bias of all pairs, (batch, heads, queries, keys), or of batch 1.

        Args:
            key_pos, query_pos: lengths or positions (batch, length); 0 on where only the segments
                are given.
            key_segment, query_segment: segment numbers (batch, length), or lengths, which mean
                segment 0.

        Raises:
            InputError: if neither positions nor segments of one side are given, and on the CPU for
                segments that there are not.
        """
        table = self.relative_attention_bias
        of_key, segment_of_key = _side("key", key_pos, key_segment, table.device)
        of_query, segment_of_query = _side("query", query_pos, query_segment, table.device)
        for segments in (segment_of_key, segment_of_query):
            check_range(segments, self.num_segments, "the table of segments")
        distance = of_key[:, None, :] - of_query[:, :, None]
        rows = bucket_of(
            distance,
            num_buckets=self.num_buckets,
            max_distance=self.max_distance,
            bidirectional=self.bidirectional,
        )
        between = (
            self.num_buckets
            + segment_of_query[:, :, None] * self.num_segments
            + segment_of_key[:, None, :]
        )
        if self.absolute_inner_segment:
            rows = torch.where(
                segment_of_query[:, :, None] == segment_of_key[:, None, :], rows, between
            )
        else:
            rows = between
        return F.embedding(rows, table).movedim(-1, -3)


def _side(
    name: str, positions: Positions | None, segments: Positions | None, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions and segments of one side, each (batch or 1, length)."""
    known = positions if positions is not None else segments
    if known is None:
        raise InputError(f"{name}_pos and {name}_segment are both None: give one of them.")
    length = known.shape[-1] if isinstance(known, torch.Tensor) else known
    of_side = _rows(positions_of(length if positions is None else positions, device))
    if isinstance(segments, torch.Tensor):
        return of_side, _rows(segments.to(device))
    return of_side, torch.zeros(1, length, dtype=torch.int64, device=device)


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.dim() == 2 else x[None]
