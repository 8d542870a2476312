"""`bmtrain.pipe_layer`: `PipelineTransformerBlockList` of parallel/pipeline.py."""

from bmtrain.compat.removed import removed
from bmtrain.parallel.pipeline import PipelineTransformerBlockList

_REMEDY = (
    "PipelineTransformerBlockList moves activations and gradients between stages by itself "
    "(distributed/stages.py)."
)
PipePreFunction = removed("bmtrain.pipe_layer.PipePreFunction", _REMEDY)
PipePostFunction = removed("bmtrain.pipe_layer.PipePostFunction", _REMEDY)
StagePreFunction = removed("bmtrain.pipe_layer.StagePreFunction", _REMEDY)
StagePostFunction = removed("bmtrain.pipe_layer.StagePostFunction", _REMEDY)

__all__ = [
    "PipePostFunction",
    "PipePreFunction",
    "PipelineTransformerBlockList",
    "StagePostFunction",
    "StagePreFunction",
]
