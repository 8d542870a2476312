"""Layers of transformers: plain modules, sharded once `bmtrain.init_distributed` ran."""

from model_center.layer.blocks import (
    CrossAttentionBlock,
    FFNBlock,
    SelfAttentionBlock,
    TransformerBlock,
)
from model_center.layer.conv import Conv2d
from model_center.layer.dense_attention import Attention
from model_center.layer.embedding import Embedding, PatchEmbedding
from model_center.layer.feedforward import FeedForward
from model_center.layer.layernorm import LayerNorm
from model_center.layer.linear import Linear
from model_center.layer.position_embedding.relative import RelativePositionEmbedding
from model_center.layer.position_embedding.rotary import RotaryEmbedding, RotaryEmbeddingESM
from model_center.layer.position_embedding.segment import SegmentPositionEmbedding
from model_center.layer.transformer import Decoder, Encoder

__all__ = [
    "Attention",
    "Conv2d",
    "CrossAttentionBlock",
    "Decoder",
    "Embedding",
    "Encoder",
    "FFNBlock",
    "FeedForward",
    "LayerNorm",
    "Linear",
    "PatchEmbedding",
    "RelativePositionEmbedding",
    "RotaryEmbedding",
    "RotaryEmbeddingESM",
    "SegmentPositionEmbedding",
    "SelfAttentionBlock",
    "TransformerBlock",
]
