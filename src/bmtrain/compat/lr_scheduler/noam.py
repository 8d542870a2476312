"""`bmtrain.lr_scheduler.noam`: `Noam` of lr_scheduler/decays.py."""

from bmtrain.lr_scheduler.decays import Noam

__all__ = ["Noam"]
