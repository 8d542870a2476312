"""The linear layer that is not split over tensor-parallel ranks."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from bmtrain.errors import ConfigurationError
from bmtrain.runtime import world
from bmtrain.runtime.arguments import SIZE, check
from bmtrain.shard.module import DistributedModule
from bmtrain.shard.parameter import (
    DistributedParameter,
    Initializer,
    ParameterInitializer,
    computed_with,
)

ZEROS = ParameterInitializer(torch.nn.init.zeros_)


def options_of(layer: torch.nn.Module) -> str:
    """A layer's sizes and options, for printing."""
    own = {name: param is not None for name, param in layer._parameters.items() if name == "bias"}
    own |= {name: value for name, value in vars(layer).items() if name != "training"}
    return ", ".join(f"{name}={own[name]}" for name in own if name[0] != "_")


class OpLinear:
    """F.linear on distributed parameters, under BMTrain's name."""

    @staticmethod
    def apply(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`x @ weight.T + bias`: x (..., n), weight (m, n), bias (m,) -> (..., m)."""
        return F.linear(x, computed_with(weight), None if bias is None else computed_with(bias))


class Linear(DistributedModule):
    """A linear layer, not tensor-parallel: (..., in_features) -> (..., out_features).

    Args:
        in_features: size of the last dim of the input.
        out_features: size of the last dim of the output.
        bias: whether to add a bias.
        dtype: the dtype of the parameters; None is torch's default.
        init_method: called with the full weight (out_features, in_features); None draws from
            U(-b, b) with b = 1/sqrt(in_features), as torch.nn.Linear does. The bias starts at zero.

    Raises:
        NotInitializedError: before `init_distributed`.
        ConfigurationError: for sizes that are not whole numbers above 0.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        *,
        init_method: Initializer | None = None,
    ) -> None:
        world.current("Linear")
        super().__init__()
        check_sizes("Linear", in_features=in_features, out_features=out_features)
        self.in_features, self.out_features = in_features, out_features
        self.weight = DistributedParameter(
            torch.empty(out_features, in_features, dtype=dtype),
            init_method=init_method or fan_in_uniform(in_features),
        )
        self.register_parameter(
            "bias",
            DistributedParameter(torch.empty(out_features, dtype=dtype), init_method=ZEROS)
            if bias
            else None,
        )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """`input` (..., in_features) -> (..., out_features)."""
        return OpLinear.apply(input, self.weight, self._parameters["bias"])

    extra_repr = options_of


def fan_in_uniform(in_features: int) -> ParameterInitializer:
    """An initializer from U(-b, b), b = 1/sqrt(in_features): He et al. (2015), torch's gain."""
    bound = 1 / math.sqrt(in_features)
    return ParameterInitializer(torch.nn.init.uniform_, -bound, bound)


def check_sizes(layer: str, **sizes: int) -> None:
    """Raise ConfigurationError unless all `sizes` are whole numbers above 0."""
    check(layer, **{name: (size, SIZE) for name, size in sizes.items()})


def part_of(layer: str, name: str, size: int, num_ranks: int) -> int:
    """The part of each tensor-parallel rank, `size / num_ranks`.

    Raises:
        ConfigurationError: if it is not a whole number.
    """
    if size % num_ranks:
        raise ConfigurationError(
            f"{layer}: {name} is {size} and is split over tp_size={num_ranks} ranks: "
            f"expected a multiple of {num_ranks}; "
            f"round it up to {-(-size // num_ranks) * num_ranks} or change tp_size."
        )
    return size // num_ranks
