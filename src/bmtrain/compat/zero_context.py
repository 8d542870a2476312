"""`bmtrain.zero_context`: a placeholder for a removed name.

Gathered parameters belong to one call of a block (shard/unshard.py).
"""

from bmtrain.compat.removed import removed

ZeroContext = removed(
    "bmtrain.zero_context.ZeroContext",
    "Block(module) gathers, releases and reduces by itself; parameter.gather() gives one tensor.",
)

__all__ = ["ZeroContext"]
