"""Datasets and how ranks read them."""

from model_center.dataset.block_dataset import DistributedDataset, SimpleDataset
from model_center.dataset.block_tools import compact_dataset, mask_dataset, shuffle_dataset
from model_center.dataset.block_writer import build_dataset
from model_center.dataset.cpm1 import CPM1_Dataset, CPM1_Dataset_Merge
from model_center.dataset.cpm2 import CPM2_Dataset
from model_center.dataset.distributed_indexed import DistributedMMapIndexedDataset
from model_center.dataset.indexed import MMapIndexedDataset
from model_center.dataset.loader import DistributedDataLoader
from model_center.dataset.packed import PackedDataset

__all__ = [
    "CPM1_Dataset",
    "CPM1_Dataset_Merge",
    "CPM2_Dataset",
    "DistributedDataLoader",
    "DistributedDataset",
    "DistributedMMapIndexedDataset",
    "MMapIndexedDataset",
    "PackedDataset",
    "SimpleDataset",
    "build_dataset",
    "compact_dataset",
    "mask_dataset",
    "shuffle_dataset",
]
