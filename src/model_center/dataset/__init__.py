"""Datasets and how ranks read them."""

from model_center.dataset.block_dataset import DistributedDataset, SimpleDataset
from model_center.dataset.block_tools import compact_dataset, mask_dataset, shuffle_dataset
from model_center.dataset.block_writer import build_dataset
from model_center.dataset.distributed_indexed import DistributedMMapIndexedDataset
from model_center.dataset.indexed import MMapIndexedDataset
from model_center.dataset.loader import DistributedDataLoader
from model_center.dataset.packed import PackedDataset

__all__ = [
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
