"""Barrier, mean loss and gathered results over all ranks."""

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
    """The last loss given to `sum_loss`, if the program still holds it. One per run.

    BMTrain's README calls `optim_manager.backward()` without an argument right after
    `sum_loss(loss)`; this supplies the loss. Held weakly: a strong reference would keep its graph,
    and with it all activations, alive.
    """

    def __init__(self, world: World) -> None:
        self.loss: weakref.ref[torch.Tensor] | None = None

    def take(self) -> torch.Tensor | None:
        """Return that loss, once; None if it is gone."""
        loss, self.loss = self.loss, None
        return loss() if loss is not None else None


def synchronize() -> None:
    """Wait for this rank's device, then for every other rank. Collective."""
    current = world.current("synchronize")
    if current.device.type != "cpu":
        torch.cuda.synchronize(current.device)
    collectives.barrier(current.mesh.world)


def sum_loss(
    loss: torch.Tensor | float, comm: Axis | None = None, *, local_gradient: bool = False
) -> torch.Tensor:
    """The mean of `loss` over ranks, of its shape and device; the name is BMTrain's. Collective.

    Differentiable where `loss` is: backward through the mean on all ranks equals backward through
    each rank's own loss. A number becomes a 0-dim fp32 tensor on the rank's device. Half-precision
    losses are averaged in fp32 and returned in their dtype; integers return fp32.

    Args:
        loss: a number, or a tensor on the rank's device, of the same shape and dtype on every rank.
        comm: the ranks, an axis such as config["comm"]; None is all.
        local_gradient: backward divides by the number of ranks instead, as in BMTrain (see
            `distributed.all_reduce`).

    Raises:
        ConfigurationError: for a `comm` that is no communicator of the open run.
    """
    current = world.current("sum_loss")
    if not isinstance(loss, torch.Tensor):
        loss = torch.tensor(float(loss), device=current.device)
    if loss.requires_grad:
        current.service(LastLoss).loss = weakref.ref(loss)
    wide = loss.to(torch.promote_types(loss.dtype, torch.float32))
    mean = all_reduce(wide, "avg", comm, local_gradient=local_gradient)
    return mean.to(loss.dtype) if loss.is_floating_point() else mean


def wait_loader() -> None:
    """Wait for the device's work up to the previous call: the host stays at most one step ahead."""
    current = world.current("wait_loader")
    event = config["load_event"]
    if event is not None:
        event.synchronize()
        event.record(torch.cuda.current_stream(current.device))


def gather_result(result: torch.Tensor) -> torch.Tensor:
    """The tensors of all ranks, concatenated along dim 0 in rank order, on the device of `result`.

    Collective. Ranks may have different numbers of rows; the other dims and the dtype must match. A
    0-dim tensor counts as one row.

    Raises:
        ConfigurationError: on every rank, naming the shapes and dtypes that do not match.
    """
    current = world.current("gather_result")
    if not isinstance(result, torch.Tensor):
        raise ConfigurationError(f"gather_result got {type(result).__name__}: expected a tensor.")
    axis, own = current.mesh.world, torch.atleast_1d(result.detach())
    kinds = collectives.gather_objects((tuple(own.shape), own.dtype), axis, "gather_result")
    if len({(shape[1:], dtype) for shape, dtype in kinds}) > 1:
        seen = ", ".join(
            f"rank {rank}: {shape} {dtype}"
            for rank, (shape, dtype) in zip(axis.ranks, kinds, strict=True)
        )
        raise ConfigurationError(
            f"gather_result got tensors that differ in more than dim 0 ({seen}): "
            "expected equal other dims and dtypes."
        )
    return collectives.all_gather_rows(own, [shape[0] for shape, _ in kinds], axis)
