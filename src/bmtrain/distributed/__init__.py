"""Communication between ranks: differentiable collectives for programs, and what they and the
engine stand on.
"""

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
