"""Program: the model, batches, loss and optimizer to verify, as a user's function returns them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from bmtrain.block.wrapper import BMTrainModelWrapper
from bmtrain.errors import ConfigurationError
from bmtrain.optim.manager import OptimManager
from bmtrain.runtime.arguments import named_function
from bmtrain.torch_internals import tensors_of, tree_map
from bmtrain.verification.record import Kind, Record

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3)


class Trainer:
    """The operations of a training step, the same in one plain process and on ranks.

    They also record the gradients and gradient norms of the step.

    Args:
        model: the model.
        optimizer: the optimizer of its parameters.
        record: where to.
        on_ranks: whether an OptimManager does it.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        record: Record,
        *,
        on_ranks: bool,
    ) -> None:
        self.model, self.optimizer, self.record = model, optimizer, record
        self.number = 0  # of the step, from 1
        self.manager = OptimManager() if on_ranks else None
        if self.manager is not None:
            self.manager.add_optimizer(optimizer)

    def zero_grad(self) -> None:
        """Clear all gradients, those not yet reduced included."""
        (self.manager or self.optimizer).zero_grad()

    def backward(self, loss: torch.Tensor, *, reduce_gradients: bool = True) -> None:
        """Run backward from the scalar `loss`; gradients are averaged over ranks.

        `reduce_gradients=False` defers that to a later call.
        """
        if self.manager is None:
            loss.backward()
        else:
            self.manager.backward(loss, reduce_gradients=reduce_gradients)

    def clip_grad_norm(self, max_norm: float) -> torch.Tensor:
        """Clip the gradients to `max_norm`; returns their norm before clipping, 0-dim."""
        groups = self.optimizer.param_groups
        if self.manager is None:
            params = [param for group in groups for param in group["params"]]
            norm = torch.nn.utils.clip_grad_norm_(params, max_norm)
        else:
            norm = self.manager.clip_grad_norm(groups, max_norm)
        self.record.add(self.number, Kind.NORM, "", norm)
        return norm

    def step(self) -> None:
        """Update all parameters."""
        self.record.add_gradients(self.number, self.model)
        (self.manager or self.optimizer).step()

    def state(self) -> dict[int, dict[str, torch.Tensor]]:
        """The optimizer's state as full tensors, by parameter index. Collective."""
        whole = (
            self.optimizer.state_dict()
            if self.manager is None
            else self.manager.state_dict(gather_opt=True)["optimizers"][0]
        )
        state: dict[int, dict[str, torch.Tensor]] = whole["state"]
        return state


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
    optimizer: Callable[[Any], torch.optim.Optimizer] = ADAMW
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
                    f"the {name} of a Program is of type {type(value).__name__}: expected a "
                    "function that makes a new one."
                )
        if not isinstance(self.batches, Sequence) or not len(self.batches):
            raise ConfigurationError(
                "the batches of a Program must be a sequence with at least one batch."
            )
        if not callable(self.batch) and self.batch not in ("split", "same"):
            raise ConfigurationError(
                f"batch is {self.batch!r}: expected one of split, same, or a function."
            )

    def run_step(self, trainer: Trainer, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        """Run one training step and return its loss."""
        if self.step is not None:
            return self.step(trainer, model, batch)
        trainer.zero_grad()
        loss: torch.Tensor = cast(Any, self.loss)(model, batch)  # there is one: `__post_init__`
        trainer.backward(loss)
        if self.clip is not None:
            trainer.clip_grad_norm(self.clip)
        trainer.step()
        return loss

    def batch_of(self, step: int, rank: int, ranks: int, device: torch.device) -> Any:
        """The part of a step's batch that `rank` of `ranks` trains on, on `device`."""
        batch = self.batches[step % len(self.batches)]
        if callable(self.batch):
            batch = self.batch(batch, rank, ranks)
        elif self.batch == "split" and ranks > 1:
            rows = {x.shape[0] for x in tensors_of(batch) if x.dim()}
            if len(rows) != 1 or next(iter(rows)) % ranks:
                raise ConfigurationError(
                    f"a batch whose tensors have {sorted(rows)} rows cannot be split over "
                    f"{ranks} ranks: expected one number that they "
                    'divide; or give batch="same", or a function (batch, rank, ranks) that '
                    "returns a rank's part."
                )
            batch = tree_map(
                lambda x: x.chunk(ranks)[rank] if isinstance(x, torch.Tensor) and x.dim() else x,
                batch,
            )
        return tree_map(lambda x: x.to(device) if isinstance(x, torch.Tensor) else x, batch)


def load_program(source: str | Callable[[], Program]) -> Program:
    """Call the function, given itself or as "module:function", and return its program.

    Raises:
        ConfigurationError: if there is no such function, or if it returns anything else.
    """
    function = named_function("verify", source) if isinstance(source, str) else source
    program = function()
    if not isinstance(program, Program):
        raise ConfigurationError(
            f"{source} returned an object of type {type(program).__name__}: "
            "expected a bmtrain.verify.Program."
        )
    return program


def check_source(source: Any) -> None:
    """Check that a spawned process can import the function.

    Raises:
        ConfigurationError: if it cannot.
    """
    name = getattr(source, "__qualname__", "")
    if not isinstance(source, str) and (not callable(source) or not name or "<" in name):
        raise ConfigurationError(
            f"verify got {name or source!r}: expected a function at the top of a module, or its "
            "name as module:function: each process that it starts has to import it."
        )
