"""Token data, read and written: the names under which old programs import them.

The code is in `model_center.dataset`.
"""

from model_center.dataset.indexed import IndexedCachedDataset, MMapIndexedDataset, make_dataset
from model_center.dataset.indexed_builder import MMapIndexedDatasetBuilder, make_builder
from model_center.dataset.indexed_format import bin_path as data_file_path
from model_center.dataset.indexed_format import idx_path as index_file_path

__all__ = [
    "IndexedCachedDataset",
    "MMapIndexedDataset",
    "MMapIndexedDatasetBuilder",
    "data_file_path",
    "index_file_path",
    "make_builder",
    "make_dataset",
]
