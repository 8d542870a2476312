"""Cuts the arguments of a call into micro-batches, and layers into stages."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from bmtrain.errors import ConfigurationError
from bmtrain.torch_internals import TreeSpec, tree_flatten


def stage_layers(num_layers: int, num_stages: int) -> list[range]:
    """The layers of each stage: contiguous; the first `num_layers % num_stages` have one more.

    Raises:
        ConfigurationError: for more stages than layers.
    """
    if num_layers < num_stages:
        raise ConfigurationError(
            f"the pipeline has {num_stages} stages for {num_layers} layers: expected "
            "at least one layer a stage; lower pipe_size."
        )
    least, more = divmod(num_layers, num_stages)
    starts = [stage * least + min(stage, more) for stage in range(num_stages + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(starts)]


@dataclasses.dataclass(frozen=True)
class Call:
    """Arguments of a block list: `hidden` go from block to block, the others to every block.

    `leaves` are the values of the others, flattened; `is_cut` says which of them have a row per
    sample.
    """

    hidden: tuple[torch.Tensor, ...]
    leaves: tuple[Any, ...]
    is_cut: tuple[bool, ...]
    spec: TreeSpec

    @property
    def num_rows(self) -> int:
        """Number of samples on this rank."""
        return self.hidden[0].shape[0]

    def signature(self) -> tuple[object, ...]:
        """What must be the same on all ranks of the pipeline."""
        rows = tuple(_kind(x) for x in self.hidden)
        return (*rows, *((_kind(x), cut) for x, cut in zip(self.leaves, self.is_cut, strict=True)))


def read_call(
    args: Sequence[Any],
    kwargs: dict[str, Any],
    num_hidden: int,
    batch_related: Iterable[int | str] | None,
) -> Call:
    """Split up the arguments of a block list.

    Args:
        args, kwargs: the arguments; the first `num_hidden` are tensors with a row per sample in dim
            0.
        num_hidden: number of leading hidden tensors.
        batch_related: the arguments with a row per sample, by position after the hidden tensors or
            by name; None takes the tensors whose dim 0 is as long as that of the hidden tensors.

    Raises:
        ConfigurationError: for arguments that cannot be cut.
    """
    hidden = tuple(args[:num_hidden])
    if len(hidden) < num_hidden:
        raise ConfigurationError(
            f"the block list got {len(args)} positional arguments: expected at least "
            f"num_hidden={num_hidden}."
        )
    for place, x in enumerate(hidden):
        if not isinstance(x, torch.Tensor) or x.dim() == 0:
            raise ConfigurationError(
                f"hidden argument {place} is {_kind(x)}: expected a tensor with a row per sample."
            )
        if x.shape[0] != hidden[0].shape[0]:
            raise ConfigurationError(
                f"hidden argument {place} has {x.shape[0]} rows, argument 0 has "
                f"{hidden[0].shape[0]}: expected a row per sample."
            )
    rest, num_rows = args[num_hidden:], hidden[0].shape[0]
    marked = None if batch_related is None else [*batch_related]
    for key in marked or ():
        known = (
            key in kwargs if isinstance(key, str) else type(key) is int and key in range(len(rest))
        )
        if not known:
            raise ConfigurationError(
                f"batch_related has {key!r}: expected positions 0 to {len(rest) - 1} of the "
                "arguments after the hidden ones, or names of "
                f"{sorted(kwargs) or 'keyword arguments (there are none)'}."
            )
    leaves, spec = tree_flatten((tuple(rest), kwargs))
    keyed: list[tuple[int | str, Any]] = [*enumerate(rest), *kwargs.items()]
    owners = [key for key, value in keyed for _ in tree_flatten(value)[0]]
    is_cut = []
    for leaf, owner in zip(leaves, owners, strict=True):
        is_tensor, is_marked = isinstance(leaf, torch.Tensor), marked is None or owner in marked
        has_rows = is_tensor and leaf.dim() > 0 and leaf.shape[0] == num_rows
        if marked is not None and is_marked and is_tensor and not has_rows:
            raise ConfigurationError(
                f"batch_related has {owner!r}, a tensor of shape {tuple(leaf.shape)}: expected "
                f"{num_rows} rows in dim 0, as the hidden ones have."
            )
        is_cut.append(is_marked and has_rows)
    return Call(hidden, tuple(leaves), tuple(is_cut), spec)


def rows_per_micro_batch(num_rows: int, num_ranks: int, num_micro_batches: int) -> int:
    """Rows of one micro-batch when every rank brings `num_rows`.

    Raises:
        ConfigurationError: if the rows of all ranks are not divisible by `num_micro_batches`.
    """
    if (num_rows * num_ranks) % num_micro_batches:
        raise ConfigurationError(
            f"{num_ranks} ranks of the pipeline with {num_rows} rows each cannot be "
            f"cut into {num_micro_batches} micro-batches: "
            "choose a batch size or num_micro_batches so that it divides."
        )
    return num_rows * num_ranks // num_micro_batches


def _kind(value: Any) -> object:
    if isinstance(value, torch.Tensor):
        return f"tensor {tuple(value.shape)} of {value.dtype}" + (
            " that requires grad" if value.requires_grad else ""
        )
    return (
        f"{type(value).__name__} {value}"
        if isinstance(value, bool | int | float | str | None)
        else type(value).__name__
    )
