"""Token data, read and written: the names under which old programs import them.

The code is in `model_center.dataset`.
"""

from model_center.dataset.indexed import (
    IndexedCachedDataset,
    MMapIndexedDataset,
    code,
    dtypes,
    make_dataset,
)
from model_center.dataset.indexed_builder import MMapIndexedDatasetBuilder, make_builder
from model_center.dataset.indexed_format import bin_path as data_file_path
from model_center.dataset.indexed_format import idx_path as index_file_path
from model_center.dataset.indexed_format import kind_of as infer_dataset_impl

IndexedDataset = MMapIndexedDataset  # the kind that read whole sequences from the file


def dataset_exists(path: str, impl: str) -> bool:
    """Whether there are token data `path`.bin and `path`.idx, of any kind."""
    return MMapIndexedDataset.exists(path)


__all__ = [
    "IndexedCachedDataset",
    "IndexedDataset",
    "MMapIndexedDataset",
    "MMapIndexedDatasetBuilder",
    "code",
    "data_file_path",
    "dataset_exists",
    "dtypes",
    "index_file_path",
    "infer_dataset_impl",
    "make_builder",
    "make_dataset",
]
