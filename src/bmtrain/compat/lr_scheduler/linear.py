"""`bmtrain.lr_scheduler.linear`: `Linear` of lr_scheduler/decays.py."""

from bmtrain.lr_scheduler.decays import Linear

__all__ = ["Linear"]
