"""`bmtrain.param_init`: `init_parameters` of block/wrapper.py, `grouped_parameters` of
shard/parameter.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from bmtrain.block.block import Block
from bmtrain.block.wrapper import init_parameters
from bmtrain.shard import initialize
from bmtrain.shard.listing import grouped_parameters
from bmtrain.shard.parameter import DistributedParameter


def init_distributed_parameter(params: Iterable[torch.nn.Parameter]) -> None:
    """Run the `init_method` of those that are distributed and have one, on whole tensors.

    Collective.
    """
    wanted = [
        param
        for param in params
        if isinstance(param, DistributedParameter) and param.init_method is not None
    ]
    initialize.initialize(torch.nn.ParameterList(wanted))


def iterate_parameters(model: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """The module's own parameters, not those of its children; none of a Block, which has no own."""
    if not isinstance(model, Block):
        yield from (param for param in model._parameters.values() if param is not None)


__all__ = [
    "grouped_parameters",
    "init_distributed_parameter",
    "init_parameters",
    "iterate_parameters",
]
