"""Both kinds of attention, under the path where ModelCenter has them."""

from model_center.layer.dense_attention import Attention
from model_center.layer.sparse_attention import SparseSelfAttention

__all__ = ["Attention", "SparseSelfAttention"]
