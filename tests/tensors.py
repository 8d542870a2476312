"""What tests ask of tensors, parameters and modules whose declared types do not have it."""

from unittest import mock

import torch

import bmtrain as bmt
from bmtrain.kernels import launch
from bmtrain.kernels.blockwise import Blocks, num_blocks
from bmtrain.shard.engine import Gathered
from bmtrain.shard.slices import Slices


def grad_of(tensor):
    """The gradient of a tensor that has one."""
    assert tensor.grad is not None
    return tensor.grad


def sharded_parameter(param):
    """A parameter of a sharded model."""
    assert isinstance(param, bmt.DistributedParameter)
    return param


def own_slice(tensor):
    """This rank's slice of a sharded tensor, 1-D."""
    assert isinstance(tensor, Slices)
    return tensor.local


def storage_of(block):
    """The first storage of a block."""
    assert isinstance(block, bmt.Block)
    return block.storages[0]


def source_of(block):
    """What a block's first storage is gathered from."""
    residence = storage_of(block).residence
    assert isinstance(residence, Gathered)
    return residence._source


def gradient_memory(block):
    """This rank's gradient of a block's first storage, 1-D."""
    flat = storage_of(block).gradient.flat
    assert flat is not None
    return flat


def zero_blocks(numel, dtype, device="cpu"):
    """Adam's moments in 8 bits, of so many zeros."""
    scales = torch.zeros(num_blocks(numel), dtype=torch.float32, device=device)
    return Blocks(torch.zeros(numel, dtype=dtype, device=device), scales)


def by_torch(function, *args, **options):
    """`function` by torch's operators, on whatever device the tensors are."""
    with mock.patch.object(launch, "takes", lambda _: False):
        return function(*args, **options)


def by_kernel(function, *args, **options):
    """`function` by its kernel, on whatever device the tensors are."""
    with mock.patch.object(launch, "takes", lambda _: True):
        return function(*args, **options)
