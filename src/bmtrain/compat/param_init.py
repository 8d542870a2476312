"""`bmtrain.param_init`: names of block/wrapper.py and shard/listing.py, and two functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from bmtrain.block.block import Block
from bmtrain.block.wrapper import init_parameters
from bmtrain.shard import initialize
from bmtrain.shard.listing import grouped_parameters
from bmtrain.shard.parameter import DistributedParameter


def init_distributed_parameter(params: Iterable[torch.nn.Parameter]) -> None:
    """Initialise distributed parameters by their `init_method`, if they have one. Collective.

    The method gets the full tensor.
    """
    wanted = [
        param
        for param in params
        if isinstance(param, DistributedParameter) and param.init_method is not None
    ]
    initialize.initialize(torch.nn.ParameterList(wanted))


def iterate_parameters(model: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """The module's own parameters without those of its children; none for a Block."""
    if not isinstance(model, Block):
        yield from (param for param in model._parameters.values() if param is not None)


__all__ = [
    "grouped_parameters",
    "init_distributed_parameter",
    "init_parameters",
    "iterate_parameters",
]
