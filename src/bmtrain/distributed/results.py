"""Bringing ranks and their results together: a barrier, the mean loss, rows of all ranks."""

from __future__ import annotations

import weakref

import torch

from bmtrain.distributed import collectives
from bmtrain.distributed.autograd import all_reduce
from bmtrain.errors import ConfigurationError
from bmtrain.runtime import world
from bmtrain.runtime.config import config
from bmtrain.runtime.mesh import Axis
from bmtrain.runtime.world import World


class LastLoss:
    """The loss most recently averaged for the log, while the program still holds it. One per run.

    BMTrain's README calls `optim_manager.backward()` without the loss, right after
    `sum_loss(loss)`: this is that loss.
    """

    def __init__(self, world: World) -> None:
        self._loss: weakref.ref[torch.Tensor] | None = None

    def remember(self, loss: torch.Tensor) -> None:
        """`loss` is the one that a backward without argument means."""
        self._loss = weakref.ref(loss)

    def take(self) -> torch.Tensor | None:
        """That loss, once."""
        loss, self._loss = self._loss, None
        return loss() if loss is not None else None


def synchronize() -> None:
    """Wait until this rank's device and every other rank have come here. Collective."""
    current = world.current("synchronize")
    if current.device.type != "cpu":
        torch.cuda.synchronize(current.device)
    collectives.barrier(current.mesh.world)


def sum_loss(
    loss: torch.Tensor | float, comm: Axis | None = None, *, local_gradient: bool = False
) -> torch.Tensor:
    """The mean of `loss` over ranks (the name is historical), of the loss's shape and device.
    Collective.

    Differentiable where `loss` is: backward through the mean on all ranks is backward through each
    rank's own loss. A number becomes a 0-dim float32 tensor on the rank's device. Half-precision
    losses are averaged in float32 and returned in their dtype; integers give float32, as a mean is
    seldom whole.

    Args:
        comm: the ranks, one of bmtrain.config such as config["comm"]; None is all.
        local_gradient: backward divides by the number of ranks instead, as BMTrain's does (see
            `distributed.all_reduce`).
    """
    current = world.current("sum_loss")
    if isinstance(loss, torch.Tensor) and loss.requires_grad:
        current.service(LastLoss).remember(loss)
    own = (
        loss if isinstance(loss, torch.Tensor) else torch.tensor(float(loss), device=current.device)
    )
    wide = own.to(torch.promote_types(own.dtype, torch.float32))
    mean = all_reduce(wide, "avg", comm, local_gradient=local_gradient)
    return mean.to(own.dtype) if own.is_floating_point() else mean


def wait_loader() -> None:
    """Wait until the device has done what it had to do at the last call, so that the host is at
    most one step ahead of it.
    """
    current = world.current("wait_loader")
    event = config["load_event"]
    if event is not None:
        event.synchronize()
        event.record(torch.cuda.current_stream(current.device))


def gather_result(result: torch.Tensor) -> torch.Tensor:
    """The tensors of all ranks, concatenated along dim 0 in rank order, on the device of `result`.
    Collective.

    Ranks may have different numbers of rows; the other dims and the dtype must agree. 0-dim tensors
    give one row each.

    Raises:
        ConfigurationError: on every rank, naming the shapes and dtypes that do not fit together.
    """
    current = world.current("gather_result")
    if not isinstance(result, torch.Tensor):
        raise ConfigurationError(f"gather_result got {type(result).__name__}: expected a tensor.")
    axis, own = (
        current.mesh.world,
        result.detach().reshape(1) if result.dim() == 0 else result.detach(),
    )
    kinds = collectives.gather_objects((tuple(own.shape), own.dtype), axis)
    if len({(shape[1:], dtype) for shape, dtype in kinds}) > 1:
        seen = ", ".join(
            f"rank {rank}: {shape} {dtype}"
            for rank, (shape, dtype) in zip(axis.ranks, kinds, strict=True)
        )
        raise ConfigurationError(
            f"gather_result got tensors that differ in more than dim 0 ({seen}): "
            "expected equal other dims and dtypes."
        )
    rows = [shape[0] for shape, _ in kinds]
    padded = own.new_zeros((max(rows), *own.shape[1:]))
    if padded.numel() == 0:
        return own.new_empty((sum(rows), *own.shape[1:]))
    padded[: own.shape[0]] = own
    # Bytes travel: not every backend moves every dtype.
    wire = padded.contiguous().reshape(-1).view(torch.uint8)
    stacked = collectives.all_gather(wire, axis).view(own.dtype).view(axis.size, *padded.shape)
    return torch.cat([part[:count] for part, count in zip(stacked, rows, strict=True)])
