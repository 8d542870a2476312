"""The record of a run: full tensors by step, kind and name."""

from __future__ import annotations

import dataclasses
import enum
import random
from collections.abc import Iterator
from typing import Any

import torch

from bmtrain.runtime import seeding
from bmtrain.shard.parameter import DistributedParameter
from bmtrain.shard.slices import Slices


class Kind(enum.Enum):
    """The kind of a recorded tensor."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    RANDOM = "random state"
    LOSS = "loss"
    NORM = "gradient norm"
    GRADIENT = "gradient"
    STATE = "optimizer state"


@dataclasses.dataclass(frozen=True)
class Key:
    """The step (0 is before the first), kind and name of a recorded tensor."""

    step: int
    kind: Kind
    name: str


@dataclasses.dataclass
class Record:
    """The tensors of a run, in the order of recording.

    Attributes:
        values: CPU tensors; None for a gradient that is None.
        terms: the number of terms of the longest sum.
        coarsest: the eps of the coarsest dtype that the model computes in.
    """

    values: dict[Key, torch.Tensor | None] = dataclasses.field(default_factory=dict)
    terms: int = 1
    coarsest: float = 0.0

    def add(self, step: int, kind: Kind, name: str, value: Any) -> None:
        """Keep a copy on the CPU; numbers become tensors.

        A name that repeats within a step and kind gets a number appended.
        """
        key, again = Key(step, kind, name), 1
        while key in self.values:
            again += 1
            key = Key(step, kind, f"{name} ({again})")
        if value is not None and not isinstance(value, torch.Tensor):
            value = torch.tensor(value, dtype=torch.float64, device="cpu")
        if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
            value = value.to_dense()
        self.values[key] = None if value is None else value.detach().to("cpu", copy=True)

    def add_model(self, step: int, model: torch.nn.Module) -> None:
        """Add all parameters and all buffers, persistent or not. Collective."""
        buffers = dict(model.named_buffers(remove_duplicate=False))
        for name, value in model.state_dict().items():
            if isinstance(value, torch.Tensor) and name not in buffers:
                self.add(step, Kind.PARAMETER, name, value)
        for name, value in buffers.items():
            self.add(step, Kind.BUFFER, name, value)

    def add_gradients(self, step: int, model: torch.nn.Module) -> None:
        """Add the gradients of all parameters. Collective."""
        for name, grad in whole_gradients(model):
            self.add(step, Kind.GRADIENT, name, grad)

    def add_random(self, step: int, device: torch.device) -> None:
        """Add the states of torch's and Python's generators."""
        for name, state in seeding.get_random_state(device).items():
            self.add(step, Kind.RANDOM, name, state)
        self.add(
            step,
            Kind.RANDOM,
            "python",
            torch.tensor(random.getstate()[1], dtype=torch.int64, device="cpu"),
        )

    def add_states(
        self,
        step: int,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        state: dict[int, Any],
    ) -> None:
        """Add the state of an optimizer under the names of its parameters.

        `state` has full tensors by the parameters' indices.
        """
        names = {id(param): name for name, param in model.named_parameters()}
        params = [param for group in optimizer.param_groups for param in group["params"]]
        for index, param in enumerate(params):
            for entry, value in state.get(index, {}).items():
                if isinstance(value, torch.Tensor | int | float):
                    name = f"{names.get(id(param), f'parameter {index}')}: {entry}"
                    self.add(step, Kind.STATE, name, _in_shape(value, whole_shape(param)))

    def drawn(self) -> Key | None:
        """The first random state that differs from step 0's; None if no step draws."""
        for key, value in self.values.items():
            if key.kind is Kind.RANDOM and key.step:
                before = self.values[Key(0, Kind.RANDOM, key.name)]
                if value is not None and before is not None and not torch.equal(value, before):
                    return key
        return None


def _in_shape(value: torch.Tensor | float, shape: torch.Size) -> torch.Tensor | float:
    """A state in its parameter's shape: this library's Adam keeps those of plain parameters 1-D."""
    is_flat = (
        isinstance(value, torch.Tensor) and value.dim() == 1 and value.numel() == shape.numel()
    )
    return value.reshape(shape) if isinstance(value, torch.Tensor) and is_flat else value


def whole_shape(param: torch.nn.Parameter) -> torch.Size:
    """The shape of the full tensor, before sharding and the tensor-parallel split."""
    return param._tp_original_shape if isinstance(param, DistributedParameter) else param.shape


def whole_gradients(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor | None]]:
    """(name, full gradient or None) of every parameter.

    Collective: ranks must have gradients of the same parameters, or the gathers deadlock.
    """
    for name, param in model.named_parameters():
        yield name, param.grad.whole_of_parts() if isinstance(param.grad, Slices) else param.grad
