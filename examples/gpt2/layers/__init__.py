"""The layers of GPT-2, each a `bmt.DistributedModule`."""

from layers.attention import Attention
from layers.embedding import Embedding
from layers.feedforward import Feedforward
from layers.layernorm import Layernorm
from layers.linear import Linear

__all__ = ["Attention", "Embedding", "Feedforward", "Layernorm", "Linear"]
