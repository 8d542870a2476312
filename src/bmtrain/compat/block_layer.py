"""`bmtrain.block_layer`: `Block` and `TransformerBlockList` of block/, `round_up` of utils.py."""

from bmtrain.block.block import Block, CheckpointBlock
from bmtrain.block.stack import TransformerBlockList
from bmtrain.compat.removed import removed
from bmtrain.utils import round_up

CheckpointBlockContext = removed(
    "bmtrain.block_layer.CheckpointBlockContext",
    "a block gathers its parameters while it runs; outside of a pass read one by "
    "parameter.gather(), all by state_dict().",
)
storage_type_cuda = removed(
    "bmtrain.block_layer.storage_type_cuda",
    "memory is made by shape, dtype and device: torch.empty(n, dtype=dtype, "
    "device=bmtrain.device()).",
)

__all__ = [
    "Block",
    "CheckpointBlock",
    "CheckpointBlockContext",
    "TransformerBlockList",
    "round_up",
    "storage_type_cuda",
]
