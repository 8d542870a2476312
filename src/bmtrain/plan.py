"""`bmtrain.plan`: what a run takes, before it is started. Its code is in `model_center.plan`."""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    """The public names, imported when they are asked for: nothing of the engine needs them."""
    return getattr(importlib.import_module("model_center.plan"), name)
