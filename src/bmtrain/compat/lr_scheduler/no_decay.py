"""`bmtrain.lr_scheduler.no_decay`: `NoDecay` of lr_scheduler/decays.py."""

from bmtrain.lr_scheduler.decays import NoDecay

__all__ = ["NoDecay"]
