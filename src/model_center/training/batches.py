"""Batches on their way from a loader to the model."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset

from bmtrain.torch_internals import tree_leaves
from model_center.dataset.loader import DistributedDataLoader


def make_loader(
    dataset: Dataset[Any], args: argparse.Namespace, *, shuffle: bool
) -> DistributedDataLoader:
    """The loader of a data set.

    Args:
        dataset: rows by number, with a length; the same one on every rank.
        args: from `model_center.get_args`, of which `batch_size`, `seed` and `num_workers` are
            read.
        shuffle: a new random order in every epoch, the same on all ranks.

    Raises:
        DataError: when the dataset is empty or has fewer rows than ranks.
    """
    return DistributedDataLoader(
        dataset,
        shuffle=shuffle,
        seed=args.seed,
        batch_size=args.batch_size,
        num_workers=args.num_workers,
    )


def grouped(batches: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """Lists of `size` batches, the last one perhaps shorter.

    Nothing is fetched ahead of the list handed out.
    """
    group: list[Any] = []
    for batch in batches:
        group.append(batch)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group


def num_tokens(batch: Any) -> int:
    """Elements of the batch's largest tensor, padding included: a measure of its size."""
    return max(
        (leaf.numel() for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)), default=0
    )


def tokens_counted(batches: Sequence[Any]) -> torch.Tensor | None:
    """Tokens without padding, and those of them in the loss, fp64 (2,) on the batches' device;
    None for batches without `input_length` and `targets`.
    """
    counts = [
        torch.stack([batch["input_length"].sum(), (batch["targets"] != -100).sum()]).double()
        for batch in batches
        if isinstance(batch, Mapping) and {"input_length", "targets"} <= batch.keys()
    ]
    return torch.stack(counts).sum(0) if counts else None
