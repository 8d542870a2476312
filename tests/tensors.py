"""What tests ask of tensors, parameters and modules whose declared types do not have it."""

from __future__ import annotations

from collections.abc import Callable

import torch

import bmtrain as bmt
from bmtrain.distributed.transport import ShardSource
from bmtrain.shard.residence import Gathered
from bmtrain.shard.slices import Slices
from bmtrain.shard.storage import Storage


def grad_of(tensor: torch.Tensor) -> torch.Tensor:
    """The gradient of a tensor that has one."""
    assert tensor.grad is not None
    return tensor.grad


def sharded_parameter(param: torch.Tensor) -> bmt.DistributedParameter:
    """A parameter of a sharded model."""
    assert isinstance(param, bmt.DistributedParameter)
    return param


def own_slice(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's slice of a sharded tensor, 1-D."""
    assert isinstance(tensor, Slices)
    return tensor.local


def storage_of(block: torch.nn.Module) -> Storage:
    """The first storage of a block."""
    assert isinstance(block, bmt.Block)
    return block.storages[0]


def source_of(block: torch.nn.Module) -> ShardSource:
    """What a block's first storage is gathered from."""
    residence = storage_of(block).residence
    assert isinstance(residence, Gathered)
    return residence._source


def gradient_memory(block: torch.nn.Module) -> torch.Tensor:
    """This rank's gradient of a block's first storage, 1-D."""
    flat = storage_of(block).gradient.flat
    assert flat is not None
    return flat


def zeros_on(device: torch.device | str) -> Callable[[int, torch.dtype], torch.Tensor]:
    """What makes zeros there, of a number of elements and a dtype."""
    return lambda numel, dtype: torch.zeros(numel, dtype=dtype, device=device)
