"""Pretrained language models on top of bmtrain: models in `model`, data in `dataset`, tokenizers in
`tokenizer`, verbs of training programs in `training`. The version is bmtrain's, as both come in one
distribution.
"""

from bmtrain.version import __version__
from model_center import compat
from model_center.arguments import get_args

__all__ = ["__version__", "get_args"]

compat.make_importable()
