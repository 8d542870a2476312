"""The record of a run: full tensors by step, kind and name."""

from __future__ import annotations

import dataclasses
import enum
import math
import random
from typing import Any

import torch

from bmtrain.inspect.parameters import whole_shape
from bmtrain.runtime import seeding
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
        """Add the gradients of all parameters. Collective.

        Ranks must have gradients of the same parameters, or the gathers deadlock.
        """
        for name, param in model.named_parameters():
            grad = param.grad
            whole = grad.full_tensor() if isinstance(grad, Slices) else grad
            self.add(step, Kind.GRADIENT, name, whole)

    def add_random(self, step: int, device: torch.device) -> None:
        """Add the states of torch's and Python's generators."""
        for name, state in seeding.get_random_state(device).items():
            self.add(step, Kind.RANDOM, name, state)
        python = torch.tensor(random.getstate()[1], dtype=torch.int64, device="cpu")
        self.add(step, Kind.RANDOM, "python", python)

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
            shape = whole_shape(param)
            for entry, value in state.get(index, {}).items():
                if not isinstance(value, torch.Tensor | int | float):
                    continue
                shaped = value
                if isinstance(value, torch.Tensor) and value.shape == (math.prod(shape),):
                    # this library's Adam keeps those of plain parameters 1-D
                    shaped = value.reshape(shape)
                name = names.get(id(param), f"parameter {index}")
                self.add(step, Kind.STATE, f"{name}: {entry}", shaped)

    def drawn(self) -> Key | None:
        """The first random state that differs from step 0's; None if no step draws."""
        for key, value in self.values.items():
            if key.kind is Kind.RANDOM and key.step:
                before = self.values[Key(0, Kind.RANDOM, key.name)]
                if value is not None and before is not None and not torch.equal(value, before):
                    return key
        return None
