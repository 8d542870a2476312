"""Verbs of training programs; the program owns the loop.

`examples/language_models` shows them at work.
"""

from model_center.training.batches import make_loader
from model_center.training.checkpoints import Checkpoints
from model_center.training.optimization import make_manager, make_optimizer, make_scheduler
from model_center.training.run import Run
from model_center.training.run_log import RunLog
from model_center.training.setup import (
    class_of,
    model_options,
    pretrained,
    save_model,
    setup,
    untrained,
)
from model_center.training.stop import StopRequest

__all__ = [
    "Checkpoints",
    "Run",
    "RunLog",
    "StopRequest",
    "class_of",
    "make_loader",
    "make_manager",
    "make_optimizer",
    "make_scheduler",
    "model_options",
    "pretrained",
    "save_model",
    "setup",
    "untrained",
]
