"""Pre-training data of CPM-2."""

from model_center.dataset.cpm2.pretraining import CPM2_Dataset

__all__ = ["CPM2_Dataset"]
