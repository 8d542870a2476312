"""Positions that attention adds or applies itself."""

from model_center.layer.position_embedding.relative import RelativePositionEmbedding
from model_center.layer.position_embedding.rotary import RotaryEmbedding, RotaryEmbeddingESM
from model_center.layer.position_embedding.segment import SegmentPositionEmbedding

__all__ = [
    "RelativePositionEmbedding",
    "RotaryEmbedding",
    "RotaryEmbeddingESM",
    "SegmentPositionEmbedding",
]
