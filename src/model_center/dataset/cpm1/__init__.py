"""Pre-training data of CPM-1."""

from model_center.dataset.cpm1.pretraining import CPM1_Dataset, CPM1_Dataset_Merge

__all__ = ["CPM1_Dataset", "CPM1_Dataset_Merge"]
