"""`bmtrain.nn.parallel_embedding`: `VPEmbedding` of nn/embedding.py."""

from bmtrain.nn.embedding import VPEmbedding

__all__ = ["VPEmbedding"]
