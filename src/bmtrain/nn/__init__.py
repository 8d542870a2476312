"""Linear layers and embeddings, replicated or split over tensor-parallel ranks; attention."""

from bmtrain.nn.attention import first_keys, segment_attention
from bmtrain.nn.embedding import VPEmbedding
from bmtrain.nn.linear import Linear, OpLinear
from bmtrain.nn.parallel_linear import (
    ColumnParallelLinear,
    OpParallelLinear,
    ReduceType,
    RowParallelLinear,
)

__all__ = [
    "ColumnParallelLinear",
    "Linear",
    "OpLinear",
    "OpParallelLinear",
    "ReduceType",
    "RowParallelLinear",
    "VPEmbedding",
    "first_keys",
    "segment_attention",
]
