"""Runs a program's steps in one plain process or on the ranks of a run, and records them."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from bmtrain.distributed.results import sum_loss
from bmtrain.errors import ConfigurationError, NotInitializedError
from bmtrain.runtime import world
from bmtrain.runtime.arguments import BOUND, POSITIVE, SIZE, check
from bmtrain.runtime.seeding import seed_everything
from bmtrain.shard.parameter import DistributedParameter
from bmtrain.torch_internals import tensors_of
from bmtrain.verification.compare import compare
from bmtrain.verification.program import Program, Trainer
from bmtrain.verification.record import Kind, Record


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
        check("verify", ranks=(self.ranks, SIZE), steps=(self.steps, SIZE))
        check("verify", timeout=(self.timeout, BOUND), slack=(self.slack, POSITIVE))


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
        first = _run(program, settings, on_ranks=False)
    except NotInitializedError:
        parallel = {"tp_size", "pipe_size", "num_micro_batches", "init_method"}
        alone = {name: value for name, value in settings.init.items() if name not in parallel}
        world.init_distributed(seed=settings.seed, device=settings.device, **alone)
        first = _run(program, settings, on_ranks=False)
    repeated = _run(program, settings, on_ranks=False)
    again = compare(first, [repeated], settings.device, settings.slack).first
    if again is not None and again.key.step == 0:
        raise ConfigurationError(
            f"the model function makes another model each time ({again}): it must build a new one, "
            "and draw its first values from torch's generators, which are seeded before."
        )
    if again is not None:
        raise ConfigurationError(
            f"the program does not repeat itself in one process ({again}): nothing can be "
            "compared with it."
        )
    drawn = first.drawn()
    if drawn is not None and program.batch == "split" and settings.ranks > 1:
        raise ConfigurationError(
            f"step {drawn.step} draws random numbers ({drawn.name} generator), which "
            "ranks with rows of their own draw differently "
            'from one process: give the Program batch="same", or turn dropout off.'
        )
    return first


def run_on_ranks(program: Program, settings: Settings) -> Record:
    """Run the steps on this rank of the current run, and return their record. Collective."""
    draws = world.current("verify").draws
    draws.same_rows = program.batch == "same"
    try:
        return _run(program, settings, on_ranks=True)
    finally:
        draws.same_rows = False


def _run(program: Program, settings: Settings, *, on_ranks: bool) -> Record:
    device = world.device() if world.is_initialized() else torch.device(settings.device)
    seed_everything(settings.seed)
    model = program.model()
    if not isinstance(model, torch.nn.Module):
        raise ConfigurationError(
            f"the model function returned {type(model).__name__}: expected a torch.nn.Module."
        )
    if on_ranks:
        model, record = program.shard(model), Record()
        unset = [
            name
            for name, param in model.named_parameters()
            if isinstance(param, DistributedParameter) and param.never_set
        ]
        if unset:
            raise ConfigurationError(
                "parameters without values: "
                f"{', '.join(unset[:3])}{' and others' if len(unset) > 3 else ''}. The model "
                "function must set them, by bmtrain.init_parameters(model) where "
                "bmtrain.is_initialized()."
            )
    else:
        model = model.to(device)
        # A gradient sums over all elements of a batch, an activation over a row of a matrix.
        sizes = [x.numel() for x in tensors_of(program.batches)]
        matrices = [param for param in model.parameters() if param.dim() > 1 and param.numel()]
        sizes += [param.numel() // param.shape[0] for param in matrices]
        kinds = {x.dtype for x in (*model.parameters(), *model.buffers())}
        floats = [torch.finfo(kind).eps for kind in kinds if kind.is_floating_point]
        coarsest = max(floats, default=torch.finfo(torch.float32).eps)
        record = Record(terms=max([1, *sizes]), coarsest=coarsest)
    optimizer = program.optimizer(model.parameters())
    trainer = Trainer(model, optimizer, record, on_ranks=on_ranks)
    rank, ranks = (world.rank(), world.world_size()) if on_ranks else (0, 1)
    for number in range(settings.steps + 1):
        trainer.number = number
        if number:  # 0 is before the first step
            batch = program.batch_of(number - 1, rank, ranks, device)
            loss = program.run_step(trainer, model, batch)
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                raise ConfigurationError(
                    f"the step returned {type(loss).__name__}: expected its loss, a scalar tensor."
                )
            record.add(number, Kind.LOSS, "", sum_loss(loss.detach()) if on_ranks else loss)
        record.add_random(number, device)
        record.add_model(number, model)
        record.add_states(number, model, optimizer, trainer.state())
    return record
