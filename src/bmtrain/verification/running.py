"""Runs a program's steps in one plain process or on the ranks of a run, and records them."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from bmtrain.distributed.results import sum_loss
from bmtrain.errors import ConfigurationError, NotInitializedError
from bmtrain.runtime import world
from bmtrain.runtime.seeding import seed_everything
from bmtrain.shard.parameter import DistributedParameter
from bmtrain.torch_internals import tree_leaves
from bmtrain.verification.compare import Difference, first_difference
from bmtrain.verification.program import Program
from bmtrain.verification.record import Kind, Record
from bmtrain.verification.trainer import ShardedTrainer, Trainer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a verification.

    Attributes:
        ranks: the number of ranks.
        steps: the number of training steps.
        device: "cpu" or "cuda".
        seed: the seed of all generators.
        timeout: seconds for a whole run; in processes of torchrun, for each collective.
        slack: the factor for all tolerances.
        init: further arguments of `init_distributed`: zero_level, tp_size, transport and so on.

    Raises:
        ConfigurationError: for numbers out of range.
    """

    ranks: int = 2
    steps: int = 3
    device: str = "cpu"
    seed: int = 0
    timeout: float = 300.0
    slack: float = 1.0
    init: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in (("ranks", self.ranks), ("steps", self.steps)):
            if type(value) is not int or value < 1:
                raise ConfigurationError(f"{name} is {value!r}: expected a whole number from 1 on.")
        for name, number in (("timeout", self.timeout), ("slack", self.slack)):
            if not number > 0:
                raise ConfigurationError(f"{name} is {number!r}: expected a number above 0.")


def run_reference(program: Program, settings: Settings) -> Record:
    """Run the steps in this process alone, on the whole batch, and return their record.

    Runs them twice, because a program that is not deterministic cannot serve as a reference. If the
    model or optimizer needs `init_distributed`, it is called with a world size of 1.

    Raises:
        ConfigurationError: for a program that cannot be verified, with the reason.
    """
    for step in range(min(settings.steps, len(program.batches))):
        # raises if the batch cannot be split
        program.batch_of(step, settings.ranks - 1, settings.ranks, torch.device("cpu"))
    try:
        first = _run_plain(program, settings)
    except NotInitializedError:
        world.init_distributed(
            seed=settings.seed, device=settings.device, **_without_parallelism(settings.init)
        )
        first = _run_plain(program, settings)
    again = first_difference(
        first, [_run_plain(program, settings)], settings.device, settings.slack
    )
    if again is not None:
        raise ConfigurationError(_not_repeatable(again))
    drawn = first.drawn()
    if drawn is not None and program.batch == "split" and settings.ranks > 1:
        raise ConfigurationError(
            f"step {drawn.step} draws random numbers ({drawn.name} generator), which "
            "ranks with rows of their own draw otherwise "
            'than one process: give the Program batch="same", or turn dropout off.'
        )
    return first


def run_on_ranks(program: Program, settings: Settings) -> Record:
    """Run the steps on this rank of the current run, and return their record. Collective."""
    device = world.device()
    seed_everything(settings.seed)
    model = program.shard(_made(program))
    unset = [
        name
        for name, param in model.named_parameters()
        if isinstance(param, DistributedParameter) and param.never_set
    ]
    if unset:
        raise ConfigurationError(
            "parameters without values: "
            f"{', '.join(unset[:3])}{' and others' if len(unset) > 3 else ''}. The "
            "model function must "
            "set them, by bmtrain.init_parameters(model) where bmtrain.is_initialized()."
        )
    record = Record()

    def loss_of_all(loss: torch.Tensor) -> torch.Tensor:
        return sum_loss(loss.detach())

    optimizer = program.optimizer(model.parameters())
    notes = _Notes(record, model, loss_of_all)
    trainer = ShardedTrainer(model, optimizer, notes.gradients, notes.norm)
    _steps(program, settings, trainer, notes, (world.rank(), world.world_size(), device))
    return record


def _run_plain(program: Program, settings: Settings) -> Record:
    device = world.device() if world.is_initialized() else torch.device(settings.device)
    seed_everything(settings.seed)
    model = _made(program).to(device)
    record = Record(terms=_terms(program, model), coarsest=_coarsest(model))
    notes = _Notes(record, model, torch.Tensor.detach)
    trainer = Trainer(model, program.optimizer(model.parameters()), notes.gradients, notes.norm)
    _steps(program, settings, trainer, notes, (0, 1, device))
    return record


class _Notes:
    """Records a run step by step."""

    def __init__(self, record: Record, model: torch.nn.Module, loss_of_all: Any) -> None:
        self.record, self.model, self.loss_of_all = record, model, loss_of_all
        self.number = 0

    def gradients(self) -> None:
        self.record.add_gradients(self.number, self.model)

    def norm(self, norm: torch.Tensor) -> None:
        self.record.add(self.number, Kind.NORM, "", norm)

    def end_of_step(
        self, trainer: Trainer, loss: torch.Tensor | None, device: torch.device
    ) -> None:
        if loss is not None:
            self.record.add(self.number, Kind.LOSS, "", self.loss_of_all(loss))
        self.record.add_random(self.number, device)
        self.record.add_model(self.number, self.model)
        self.record.add_states(self.number, self.model, trainer.optimizer, trainer.state())


def _steps(
    program: Program,
    settings: Settings,
    trainer: Trainer,
    notes: _Notes,
    place: tuple[int, int, torch.device],
) -> None:
    rank, ranks, device = place
    notes.end_of_step(trainer, None, device)
    for step in range(settings.steps):
        notes.number = step + 1
        loss = program.run_step(trainer, notes.model, program.batch_of(step, rank, ranks, device))
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise ConfigurationError(
                f"the step returned {type(loss).__name__}: expected its loss, a scalar tensor."
            )
        notes.end_of_step(trainer, loss, device)


def _made(program: Program) -> torch.nn.Module:
    model = program.model()
    if not isinstance(model, torch.nn.Module):
        raise ConfigurationError(
            f"the model function returned {type(model).__name__}: expected a torch.nn.Module."
        )
    return model


def _not_repeatable(found: Difference) -> str:
    if found.key.step == 0:
        return (
            f"the model function makes another model each time ({found}): it must "
            "build a new one, and draw its first values from "
            "torch's generators, which are seeded before."
        )
    return (
        f"the program does not repeat itself in one process ({found}): nothing can be "
        "compared with it."
    )


def _terms(program: Program, model: torch.nn.Module) -> int:
    """The number of terms of the longest sum.

    A gradient sums over all elements of a batch, an activation over a row of a matrix.
    """
    batches = [
        x.numel()
        for batch in program.batches
        for x in tree_leaves(batch)
        if isinstance(x, torch.Tensor)
    ]
    rows = [
        param.numel() // param.shape[0]
        for param in model.parameters()
        if param.dim() > 1 and param.numel()
    ]
    return max([1, *batches, *rows])


def _coarsest(model: torch.nn.Module) -> float:
    kinds = {x.dtype for x in (*model.parameters(), *model.buffers()) if x.dtype.is_floating_point}
    return max((torch.finfo(kind).eps for kind in kinds), default=torch.finfo(torch.float32).eps)


def _without_parallelism(init: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `init_distributed` that apply to a single rank."""
    return {
        name: value
        for name, value in init.items()
        if name not in {"tp_size", "pipe_size", "num_micro_batches", "init_method"}
    }
