"""Nothing that is not finite goes into a checkpoint of a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from bmtrain.checkpoint.entries import entries
from bmtrain.distributed.agreement import agree, everyone
from bmtrain.errors import CheckpointError
from bmtrain.kernels.chunks import Batch
from bmtrain.kernels.squares import sum_of_squares
from bmtrain.runtime import world
from bmtrain.shard.slices import local_of

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_finite(model: torch.nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Refuse weights and optimizer states that have become NaN or infinite. Collective.

    Reads each value once, on its device, and waits for one number. Of what is not trained (frozen
    parameters, buffers) only NaN is refused: masks hold -inf.

    Raises:
        CheckpointError: on every rank, naming the first tensor.
    """
    held = [*_weights(model), *_states(model, optimizers)]
    # Finite if all are: squares are summed in fp64.
    total = sum_of_squares(Batch([(x,) for _, x, _ in held]), world.device())
    name = None if bool(total.isfinite()) else _first_bad(held)
    error = (
        None
        if name is None
        else f"the checkpoint is not written: {name} is not finite any more. The checkpoints "
        "before it stay. Remedy: go on from one of them, with another learning rate or without the "
        "batches of these steps."
    )
    agree(error, everyone(), kind=CheckpointError)


def _weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Names, this rank's values, and whether infinities are refused."""
    for entry in entries(model):
        trained = isinstance(entry.tensor, torch.nn.Parameter) and entry.tensor.requires_grad
        yield from _values(f"parameter or buffer {entry.name}", entry.tensor, trained)


def _states(
    model: torch.nn.Module, optimizers: Iterable[torch.optim.Optimizer]
) -> Iterator[tuple[str, torch.Tensor, bool]]:
    names = {id(entry.tensor): entry.name for entry in entries(model)}
    for optimizer in optimizers:
        for param, state in optimizer.state.items():
            for key, value in state.items():
                what = names.get(id(param), f"a parameter of shape {tuple(param.shape)}")
                yield from _values(f"state {key!r} of the optimizer for {what}", value, True)


def _values(name: str, x: Any, trained: bool) -> Iterator[tuple[str, torch.Tensor, bool]]:
    if isinstance(x, torch.Tensor) and x.dtype in _DTYPES and x.layout is torch.strided:
        yield name, local_of(x).detach(), trained


def _first_bad(held: Iterable[tuple[str, torch.Tensor, bool]]) -> str | None:
    for name, x, trained in held:
        if bool(x.isnan().any()) or (trained and not bool(x.isfinite().all())):
            return name
    return None
