"""Communication between ranks: differentiable collectives, and the layers beneath them."""

from bmtrain.distributed.autograd import (
    all_gather,
    all_reduce,
    broadcast,
    recv_activations,
    reduce_scatter,
    send_activations,
)

__all__ = [
    "all_gather",
    "all_reduce",
    "broadcast",
    "recv_activations",
    "reduce_scatter",
    "send_activations",
]
