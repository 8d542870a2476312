"""`bmtrain.lr_scheduler.cosine`: `Cosine` of lr_scheduler/decays.py."""

from bmtrain.lr_scheduler.decays import Cosine

__all__ = ["Cosine"]
