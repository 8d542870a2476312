"""`bmtrain.lr_scheduler.exponential`: `Exponential` of lr_scheduler/decays.py."""

from bmtrain.lr_scheduler.decays import Exponential

__all__ = ["Exponential"]
