"""T5's relative positions: a learned number per head and bucket of distances, added to the scores.

Source: Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
Transformer" (2020).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

import bmtrain as bmt
from model_center.layer.parameter import normal, parameter

Positions = int | torch.Tensor


def bucket_of(
    distance: torch.Tensor, *, num_buckets: int, max_distance: int, bidirectional: bool
) -> torch.Tensor:
    """The bucket of each distance, key position minus query position, int64 of the same shape.

    Half of the buckets hold one distance each, the others logarithmically growing ranges up to
    `max_distance`. With `bidirectional` the second half of all buckets is for keys after the query;
    otherwise those share bucket 0.
    """
    offset = torch.zeros_like(distance)
    if bidirectional:
        num_buckets //= 2
        offset = (distance > 0).long() * num_buckets
        distance = distance.abs()
    else:
        distance = (-distance).clamp(min=0)
    exact = num_buckets // 2
    ratio = distance.clamp(min=1).float() / exact
    far = exact + (ratio.log() / math.log(max_distance / exact) * (num_buckets - exact)).long()
    return offset + torch.where(distance < exact, distance, far.clamp(max=num_buckets - 1))


def positions_of(positions: Positions, device: torch.device) -> torch.Tensor:
    """Positions 0 to n - 1 for a length n, else those given, (length,) or (batch, length)."""
    if isinstance(positions, torch.Tensor):
        return positions.to(device)
    return torch.arange(positions, device=device)


class RelativePositionEmbedding(bmt.DistributedModule):
    """Bias of the scores for pairs of positions.

    Args:
        num_heads: heads of the attention, each with numbers of its own.
        num_buckets: rows of the table. Half of them are for one distance each, the others for
            logarithmically growing ranges.
        max_distance: from which on distances share the last bucket.
        bidirectional: whether keys after the query have half of the buckets; else they share one.
        dtype: of the table.
        init_mean, init_std: of the first values.
    """

    def __init__(
        self,
        num_heads: int,
        num_buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool = False,
        dtype: torch.dtype = torch.half,
        init_mean: float = 0.0,
        init_std: float = 1,
    ) -> None:
        super().__init__()
        self.num_buckets, self.max_distance, self.bidirectional = (
            num_buckets,
            max_distance,
            bidirectional,
        )
        self.relative_attention_bias = parameter(
            (num_buckets, num_heads), dtype, normal(init_mean, init_std)
        )

    def forward(self, query: Positions, key: Positions) -> torch.Tensor:
        """The bias of all pairs.

        Args:
            query, key: a length, or positions (length,) or (batch, length), integers.

        Returns (heads, queries, keys), or (batch, heads, queries, keys) for positions with a batch.
        """
        table = self.relative_attention_bias
        of_query, of_key = positions_of(query, table.device), positions_of(key, table.device)
        distance = of_key[..., None, :] - of_query[..., :, None]
        buckets = bucket_of(
            distance,
            num_buckets=self.num_buckets,
            max_distance=self.max_distance,
            bidirectional=self.bidirectional,
        )
        return F.embedding(buckets, table).movedim(-1, -3)
