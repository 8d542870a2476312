"""A program as the packages' users write it, run twice on each rank: in plain PyTorch on all rows,
and sharded on the rank's own rows. What both compute is compared.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from tests.ranks import models
from torch import nn

import bmtrain as bmt
from bmtrain.optim import AdamOptimizer, OptimManager

TOLERANCE = (
    1e-5  # of the largest element; models are float64, some of the packages' tensors float32
)
SETTINGS: dict[str, Any] = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1}
Batch = dict[str, Any]


class NotInPlain(Exception):
    """The package itself fails on this combination, in one process of plain PyTorch."""


class Differs(Exception):
    """The sharded program computed something else, without a word."""


@dataclasses.dataclass
class Side:
    """How a program is run: plain, with all rows, or sharded, with those of this rank."""

    sharded: bool

    @property
    def ranks(self) -> int:
        return bmt.world_size() if self.sharded else 1

    def wrap(self, model: Any) -> Any:
        """The model sharded, on the sharded side."""
        return bmt.BMTrainModelWrapper(model) if self.sharded else model

    def own(self, batch: Batch) -> Batch:
        """Copies of this rank's rows."""
        rank = bmt.rank() if self.sharded else 0
        out: Batch = {}
        for name, value in batch.items():
            rows = len(value) // self.ranks
            out[name] = value[rank * rows : (rank + 1) * rows]
            if isinstance(value, torch.Tensor):
                out[name] = out[name].clone()
        return out

    def whole(self, value: torch.Tensor) -> torch.Tensor:
        """What all ranks have, one under the other."""
        value = value.detach()
        if self.sharded and self.ranks > 1:
            return bmt.gather_result(value)
        return value

    def gradients(self, model: nn.Module) -> dict[str, torch.Tensor | None]:
        """Whole gradients by name."""
        return models.full_gradients(model) if self.sharded else models.plain_gradients(model)


@dataclasses.dataclass
class Program:
    """What is trained: `loss` is a mean over rows; `answer` is asked at the end, of rows too."""

    model: Any
    loss: Callable[[Batch], torch.Tensor]
    batches: list[Batch]
    answer: Callable[[Batch], torch.Tensor] | None = None


Build = Callable[[Side], Program]


@dataclasses.dataclass(frozen=True)
class Case:
    """One combination; `build` makes the program on either side."""

    name: str
    build: Build


def seed() -> None:
    """The same numbers on both sides."""
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)


@contextlib.contextmanager
def without_bmtrain() -> Iterator[None]:
    """OpenDelta shards some deltas wherever bmtrain can be imported: hide it."""
    hidden = sys.modules["bmtrain"]
    sys.modules["bmtrain"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.modules["bmtrain"] = hidden


def train(side: Side, program: Program) -> dict[str, Any]:
    """Losses, gradients and parameters by step, and the answer."""
    trainable = [param for param in program.model.parameters() if param.requires_grad]
    kind = AdamOptimizer if side.sharded else torch.optim.AdamW
    optimizer = kind(trainable, **SETTINGS)
    manager = OptimManager()
    if side.sharded:
        manager.add_optimizer(optimizer)
    found: dict[str, Any] = {"names": [name for name, _ in program.model.named_parameters()]}
    for step, batch in enumerate(program.batches):
        (manager if side.sharded else optimizer).zero_grad()
        loss = program.loss(side.own(batch))
        found[f"step {step}: loss"] = {"": side.whole(loss.view(1)).mean()}
        if side.sharded:
            manager.backward(loss)
        else:
            loss.backward()
        found[f"step {step}: gradients"] = side.gradients(program.model)
        (manager if side.sharded else optimizer).step()
        state = nn.Module.state_dict(program.model) if not side.sharded else whole_state(program)
        found[f"step {step}: parameters"] = {name: x.clone() for name, x in state.items()}
    if program.answer is not None:
        program.model.eval()
        with torch.no_grad():
            answer = program.answer(side.own(program.batches[0]))
        found["answer"] = {"": side.whole(answer)}
    return found


def whole_state(program: Program) -> dict[str, torch.Tensor]:
    """The state of the whole model, also where the package has cut `state_dict` down."""
    cut = program.model.__dict__.pop("state_dict", None)
    try:
        state: dict[str, torch.Tensor] = program.model.state_dict()
    finally:
        if cut is not None:
            program.model.__dict__["state_dict"] = cut
    return state


def compare_all(room: str, numbers: list[int], folder: str) -> None:
    """Compare these of a module's CASES, up to the first that is not equal. Runs on a rank.

    Each rank writes the number of the case that it is at to a file, and what plain PyTorch does not
    do to another.
    """
    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float64)
    cases: list[Case] = importlib.import_module(room).CASES
    for number in numbers:
        with open(f"{folder}/at{bmt.rank()}", "a") as file:
            file.write(f"{number}\n")
        try:
            compare(cases[number])
        except NotInPlain as error:
            if bmt.rank() > 0:
                continue
            with open(f"{folder}/not-in-plain", "a") as file:
                file.write(f"{number} {' '.join(str(error).split())}\n")


def compare(case: Case) -> None:
    """Raise what is wrong."""
    seed()
    try:
        with without_bmtrain():
            want = train(Side(False), case.build(Side(False)))
    except Exception as error:
        raise NotInPlain(f"{type(error).__name__}: {error}") from error
    for what, values in want.items():
        if what != "names" and any(x is not None and x.isnan().any() for x in values.values()):
            raise NotInPlain(f"{what}: NaN")
    seed()
    got = train(Side(True), case.build(Side(True)))
    for what, value in want.items():
        if what == "names":
            if value != got[what]:
                raise Differs(f"names: {sorted(set(value) ^ set(got[what])) or 'their order'}")
            continue
        try:
            models.assert_same_dicts(got[what], value, what, TOLERANCE)
        except AssertionError as error:
            raise Differs(str(error)) from error
