"""LCQMC for CPM-2, and the rows that it is pre-trained on."""

from model_center.dataset.cpm2 import CPM2_Dataset
from model_center.dataset.cpm2dataset.down_data import DATASET, LCQMC_Dataset

__all__ = ["CPM2_Dataset", "DATASET", "LCQMC_Dataset"]
