"""Pretrained language models on top of bmtrain: models in `model`, data in `dataset`, tokenizers in
`tokenizer`, verbs of training programs in `training`. The version is bmtrain's, as both come in one
distribution.
"""

import importlib

from model_center import compat
from model_center.arguments import get_args

__all__ = ["__version__", "get_args"]

compat.make_importable()


def __getattr__(name: str) -> str:
    """`__version__`, when it is asked for: to import bmtrain takes seconds, and commands say
    something before.
    """
    if name != "__version__":
        raise AttributeError(f"module 'model_center' has no attribute {name!r}")
    version: str = importlib.import_module("bmtrain.version").__version__
    return version
