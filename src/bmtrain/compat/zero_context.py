"""`bmtrain.zero_context`: nothing.

What a block has gathered belongs to one call of it (shard/unshard.py).
"""

from bmtrain.compat.removed import removed

ZeroContext = removed(
    "bmtrain.zero_context.ZeroContext",
    "Block(module) gathers, releases and reduces by itself; parameter.gather() gives one tensor.",
)

__all__ = ["ZeroContext"]
