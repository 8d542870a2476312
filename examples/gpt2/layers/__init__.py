"""The layers of GPT-2, each a `bmt.DistributedModule` or made of such."""

from layers.attention import Attention
from layers.embedding import Embedding
from layers.feedforward import Feedforward
from layers.layernorm import Layernorm
from layers.linear import column_linear, row_linear, rows_of_all

__all__ = [
    "Attention",
    "Embedding",
    "Feedforward",
    "Layernorm",
    "column_linear",
    "row_linear",
    "rows_of_all",
]
