"""Here alone is decided whether a parameter is sharded: once `init_distributed` ran."""

from __future__ import annotations

from collections.abc import Callable

import torch

import bmtrain as bmt
from bmtrain.torch_internals import make_subclass

Initializer = Callable[[torch.Tensor], object]


class PlainParameter(torch.nn.Parameter):
    """An nn.Parameter that knows its first values, as `bmtrain.DistributedParameter` does.

    Attributes:
        init_method: called with the whole tensor to fill it; None for a copy.
    """

    init_method: Initializer | None

    def __new__(
        cls, data: torch.Tensor, requires_grad: bool = True, init_method: Initializer | None = None
    ) -> PlainParameter:  # the arguments that torch's own copying passes come first
        param = make_subclass(cls, data, requires_grad)
        param.init_method = init_method
        return param


def parameter(
    shape: tuple[int, ...], dtype: torch.dtype, init_method: Initializer
) -> torch.nn.Parameter:
    """A parameter of a layer.

    In a process group it is a DistributedParameter, of which only this rank's slice is ever
    allocated and which gets its values from `bmtrain.init_parameters` or a checkpoint. Otherwise it
    is a plain parameter on torch's default device, and has its values at once, unless that device
    is meta.
    """
    if bmt.is_initialized():
        return bmt.DistributedParameter(
            torch.empty(shape, dtype=dtype, device="meta"), init_method=init_method
        )
    param = PlainParameter(torch.empty(shape, dtype=dtype), init_method=init_method)
    if not param.is_meta:
        with torch.no_grad():
            init_method(param)
    return param


def normal(mean: float, std: float) -> Initializer:
    """First values drawn from a normal distribution."""
    return bmt.ParameterInitializer(torch.nn.init.normal_, mean=mean, std=std)


def constant(value: float) -> Initializer:
    """First values that are all `value`."""
    return bmt.ParameterInitializer(torch.nn.init.constant_, value)


def materialize(module: torch.nn.Module) -> None:
    """Give plain parameters made on the meta device memory on the CPU, without values.

    Ties between them are kept.
    """
    made: dict[int, PlainParameter] = {}
    for part in module.modules():
        for name, param in part._parameters.items():
            if isinstance(param, PlainParameter) and param.is_meta:
                if id(param) not in made:
                    data = torch.empty_like(param, device="cpu")
                    made[id(param)] = PlainParameter(data, param.requires_grad, param.init_method)
                part._parameters[name] = made[id(param)]
