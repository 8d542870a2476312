"""LCQMC for CPM-1, and the rows that it is pre-trained on."""

from model_center.dataset.cpm1 import CPM1_Dataset, CPM1_Dataset_Merge
from model_center.dataset.cpm1dataset.down_data import DATASET, LCQMC_Dataset

__all__ = ["DATASET", "CPM1_Dataset", "CPM1_Dataset_Merge", "LCQMC_Dataset"]
