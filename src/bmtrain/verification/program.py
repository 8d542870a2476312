"""Program: the model, batches, loss and optimizer to verify, as a user's function returns them."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bmtrain.block.wrapper import BMTrainModelWrapper
from bmtrain.errors import ConfigurationError
from bmtrain.torch_internals import tree_leaves, tree_map
from bmtrain.verification.trainer import Trainer

BATCH_MODES = ("split", "same")


def _adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A model and how it is trained.

    Args:
        model: builds the model, of plain modules or this library's. All generators are seeded
            before each call, and each call must give the same values.
        batches: one per step, repeated if there are more steps: tensors in any nesting, rows along
            dim 0.
        loss: `loss(model, batch)` returns the scalar to train on. With split batches it must be a
            mean over rows (ranks have equal numbers of rows).
        optimizer: `optimizer(params)`, torch's or this library's; by default AdamW with a learning
            rate of 0.001.
        step: a whole training step instead of `loss`: `step(trainer, model, batch)` returns the
            loss to compare. It calls `trainer.zero_grad()`, `backward(loss,
            reduce_gradients=True)`, `clip_grad_norm(max_norm)` and `step()`.
        shard: shards the model on ranks; by default `BMTrainModelWrapper`. Not called in the plain
            process.
        batch: "split" gives each rank an equal part of the rows; "same" gives all ranks the whole
            batch, which programs that draw random numbers (dropout) need; or a function
            `(batch, rank, ranks)` that returns a rank's part.
        clip: the largest gradient norm, for programs without `step`; None does not clip.

    Raises:
        ConfigurationError: for arguments of the wrong kind.
    """

    model: Callable[[], torch.nn.Module]
    batches: Sequence[Any]
    loss: Callable[[torch.nn.Module, Any], torch.Tensor] | None = None
    optimizer: Callable[[Any], torch.optim.Optimizer] = _adamw
    step: Callable[[Trainer, torch.nn.Module, Any], torch.Tensor] | None = None
    shard: Callable[[torch.nn.Module], torch.nn.Module] = BMTrainModelWrapper
    batch: str | Callable[[Any, int, int], Any] = "split"
    clip: float | None = None

    def __post_init__(self) -> None:
        if (self.loss is None) == (self.step is None):
            raise ConfigurationError(
                "a Program has either a loss, loss(model, batch), or a step, step(trainer, "
                "model, batch)."
            )
        wanted = {
            "model": self.model,
            "optimizer": self.optimizer,
            "shard": self.shard,
            "loss or step": self.loss or self.step,
        }
        for name, value in wanted.items():
            if not callable(value) or isinstance(value, torch.nn.Module | torch.optim.Optimizer):
                raise ConfigurationError(
                    f"the {name} of a Program is of type {type(value).__name__}: "
                    "expected a function that makes it anew."
                )
        if not isinstance(self.batches, Sequence) or not len(self.batches):
            raise ConfigurationError(
                "the batches of a Program must be a sequence with at least one batch."
            )
        if not callable(self.batch) and self.batch not in BATCH_MODES:
            raise ConfigurationError(
                f"batch is {self.batch!r}: expected one of {', '.join(BATCH_MODES)}, or a function."
            )

    def run_step(self, trainer: Trainer, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        """Run one training step and return its loss."""
        if self.step is not None:
            return self.step(trainer, model, batch)
        if self.loss is None:
            raise ConfigurationError("a Program needs a loss.")
        trainer.zero_grad()
        loss = self.loss(model, batch)
        trainer.backward(loss)
        if self.clip is not None:
            trainer.clip_grad_norm(self.clip)
        trainer.step()
        return loss

    def batch_of(self, step: int, rank: int, ranks: int, device: torch.device) -> Any:
        """The part of a step's batch that `rank` of `ranks` trains on, on `device`."""
        whole = self.batches[step % len(self.batches)]
        own = _part(whole, self.batch, rank, ranks)
        return tree_map(lambda x: x.to(device) if isinstance(x, torch.Tensor) else x, own)


def _part(batch: Any, mode: str | Callable[[Any, int, int], Any], rank: int, ranks: int) -> Any:
    if callable(mode):
        return mode(batch, rank, ranks)
    if mode == "same" or ranks == 1:
        return batch
    leaves = [x for x in tree_leaves(batch) if isinstance(x, torch.Tensor) and x.dim()]
    rows = {x.shape[0] for x in leaves}
    if len(rows) != 1 or next(iter(rows)) % ranks:
        raise ConfigurationError(
            f"a batch whose tensors have {sorted(rows)} rows cannot be split over "
            f"{ranks} ranks: expected one number that they "
            'divide; or give batch="same", or a function (batch, rank, ranks) that '
            "returns a rank's part."
        )
    return tree_map(
        lambda x: x.chunk(ranks)[rank] if isinstance(x, torch.Tensor) and x.dim() else x, batch
    )


def load_program(source: str | Callable[[], Program]) -> Program:
    """Call the function, given itself or as "module:function", and return its program.

    Raises:
        ConfigurationError: if there is no such function, or if it returns anything else.
    """
    function = source if callable(source) else _find(source)
    program = function()
    if not isinstance(program, Program):
        raise ConfigurationError(
            f"{_name(source)} returned an object of type {type(program).__name__}: "
            "expected a bmtrain.verify.Program."
        )
    return program


def _find(text: str) -> Callable[[], Program]:
    module_name, colon, path = text.partition(":")
    if not colon or not module_name or not path:
        raise ConfigurationError(
            f"{text!r} names no function: expected module:function, such as "
            "my_package.checks:program."
        )
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"{text!r}: there is no module {error.name!r}; modules are looked for from "
            "the current folder and on PYTHONPATH."
        ) from error
    for part in path.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise ConfigurationError(f"the module {module_name!r} has no function {path!r}.")
    return found


def check_source(source: Any) -> None:
    """Check that a spawned process can import the function.

    Raises:
        ConfigurationError: if it cannot.
    """
    if isinstance(source, str):
        return
    name = getattr(source, "__qualname__", "")
    if not callable(source) or not name or "<" in name:
        raise ConfigurationError(
            f"verify got {_name(source)}: expected a function at the top of a module, "
            "or its name as module:function: each process "
            "that it starts has to import it."
        )


def _name(source: Any) -> str:
    return source if isinstance(source, str) else str(getattr(source, "__qualname__", repr(source)))
