"""Learning rate schedules by iteration: a linear warm-up, then the decay of the class."""

from bmtrain.lr_scheduler.decays import Cosine, Exponential, Linear, Noam, NoDecay
from bmtrain.lr_scheduler.warmup import WarmupLRScheduler

__all__ = ["WarmupLRScheduler", "Noam", "NoDecay", "Linear", "Cosine", "Exponential"]
