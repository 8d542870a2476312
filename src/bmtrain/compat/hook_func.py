"""`bmtrain.hook_func`: placeholders for removed names.

Blocks gather and reduce in one autograd function (shard/unshard.py), without module hooks.
"""

from bmtrain.compat.removed import removed

_REMEDY = "Block(module) gathers, releases and reduces by itself."
zero_pre_forward = removed("bmtrain.hook_func.zero_pre_forward", _REMEDY)
zero_post_forward = removed("bmtrain.hook_func.zero_post_forward", _REMEDY)
zero_pre_backward = removed("bmtrain.hook_func.zero_pre_backward", _REMEDY)
zero_post_backward = removed("bmtrain.hook_func.zero_post_backward", _REMEDY)
PreHookFunc = removed("bmtrain.hook_func.PreHookFunc", _REMEDY)
PostHookFunc = removed("bmtrain.hook_func.PostHookFunc", _REMEDY)
OneStepNoGradFunc = removed("bmtrain.hook_func.OneStepNoGradFunc", _REMEDY)

__all__ = [
    "OneStepNoGradFunc",
    "PostHookFunc",
    "PreHookFunc",
    "zero_post_backward",
    "zero_post_forward",
    "zero_pre_backward",
    "zero_pre_forward",
]
