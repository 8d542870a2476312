"""Batch normalisation over the rows of all ranks, as in one process that has them all."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from bmtrain.block.kinds import once_per_kind
from bmtrain.distributed import autograd
from bmtrain.errors import ParameterError
from bmtrain.recompute.recomputation import names_in
from bmtrain.runtime import world
from bmtrain.torch_internals import BatchNorm, tensors_of


def share_statistics(module: torch.nn.Module) -> None:
    """Let a module that normalises batches take the mean and variance of all ranks' rows.

    Its class becomes a subclass. torch's SyncBatchNorm does the same already.
    """
    done = torch.nn.SyncBatchNorm | _OfAllRanks | _Derived
    if world.world_size() == 1 or isinstance(module, done):
        return
    kind = type(module)
    # Static: the class of a scripted module has none, and raises; nor has a weak proxy's.
    code = getattr(inspect.getattr_static(kind, "forward", None), "__code__", None)
    if isinstance(module, BatchNorm) or (code and "batch_norm" in names_in(code)):
        module.__class__ = _of_all_ranks(kind)


@once_per_kind
def _of_all_ranks(kind: Any) -> Any:
    own = {"__doc__": kind.__doc__, "__module__": kind.__module__}
    base = _OfAllRanks if kind.forward is BatchNorm.forward else _Derived
    return type(kind.__name__, (base, kind), own)


class _OfAllRanks(BatchNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Collective where the statistics of a batch are used: two sums over all ranks.

        A pipeline's stages run at other times: there they are those of a micro-batch's rows.
        """
        current = world.current("BatchNorm")
        uses_batch = self.training or self.running_mean is None
        if not uses_batch or current.draws.same_rows or current.pipe_enabled:
            return super().forward(x)
        self._check_input_dim(x)
        out, mean, var = _normalised(x, self.weight, self.bias, self.eps)
        if self.training and self.track_running_stats:
            with torch.no_grad():
                is_good = (mean + var).isfinite().all()
                factor: Any = self.momentum
                if self.num_batches_tracked is not None:
                    self.num_batches_tracked.add_(is_good)
                    if factor is None:
                        factor = 1.0 / self.num_batches_tracked.to(mean.dtype)
                _move(self.running_mean, mean, factor, is_good)
                _move(self.running_var, var, factor, is_good)
        return out


class _Derived(torch.nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The forward pass of the class, whose `batch_norm` takes the statistics of all ranks.

        ParameterError in training, if it gives `batch_norm` only some of the rows, or if the class
        is a BatchNorm and does not call `batch_norm`.
        """
        current = world.current("BatchNorm")
        is_norm = isinstance(self, BatchNorm)
        uses_batch = self.training or (is_norm and self.running_mean is None)
        if not uses_batch or current.draws.same_rows or current.pipe_enabled:
            return super().forward(*args, **kwargs)
        num_rows = next((x.shape[0] for x in tensors_of((args, kwargs)) if x.dim()), None)
        sharing = _Sharing(type(self).__name__, num_rows)
        names = {*names_in(super().forward.__code__)}
        if "batch_norm" not in names and not names >= {"super", "forward"}:
            raise sharing.refused
        count: torch.Tensor | None = getattr(self, "num_batches_tracked", None)
        before = None if count is None else count.clone()
        try:
            with sharing:
                out = super().forward(*args, **kwargs)
            if is_norm and sharing.is_good is None:
                raise sharing.refused
        finally:  # neither an error nor a step that will be skipped counts
            if count is not None and before is not None:
                is_good = sharing.is_good
                count.copy_(before if is_good is None else torch.where(is_good, count, before))
        return out


class _Sharing(TorchFunctionMode):
    """Gives `batch_norm` the statistics of all ranks' rows.

    Attributes:
        is_good: whether they are finite; None before.
        refused: what is raised where that is not what one process computes.

    Args:
        name: of the module's class.
        num_rows: of the module's first tensor; None without one.
    """

    def __init__(self, name: str, num_rows: int | None) -> None:
        super().__init__()
        self._num_rows = num_rows
        self.is_good: torch.Tensor | None = None
        self.refused = ParameterError(
            f"{name} has a forward pass of its own and would normalise each rank's rows "
            "separately, unlike one process: use torch.nn.BatchNorm or torch.nn.SyncBatchNorm, or "
            "freeze it, module.eval()."
        )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func is not torch.nn.functional.batch_norm or not given["training"]:
            return func(*args, **given)
        x, running_mean, running_var = args
        if self._num_rows is None or x.shape[0] % max(self._num_rows, 1):
            raise self.refused  # parts of the rows are other ones on ranks than in one process
        out, mean, var = _normalised(x, given["weight"], given["bias"], given["eps"])
        with torch.no_grad():
            self.is_good = (mean + var).isfinite().all()
            _move(running_mean, mean, given["momentum"], self.is_good)
            _move(running_var, var, given["momentum"], self.is_good)
        return out


def _normalised(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`x` normalised, and the mean and unbiased variance of all ranks' rows, each (channels,)."""
    dims = [dim for dim in range(x.dim()) if dim != 1]
    shape = [-1 if dim == 1 else 1 for dim in range(x.dim())]
    wide = x if x.dtype == torch.float64 else x.float()
    own = torch.cat([wide.sum(dims), wide.new_full((1,), x.numel() // x.shape[1])])
    ranks = world.current("BatchNorm").mesh.tp_zero  # tensor ranks have the same rows
    total = autograd.all_reduce(own, "sum", ranks)
    count = total[-1].detach()
    mean = total[:-1] / count
    centred = wide - mean.view(shape)
    squares = autograd.all_reduce(centred.square().sum(dims), "sum", ranks)
    out = centred * (squares / count + eps).rsqrt().view(shape)
    if weight is not None:
        out = out * weight.view(shape)
    if bias is not None:
        out = out + bias.view(shape)
    return out.to(x.dtype), mean.detach(), squares.detach() / (count - 1)


def _move(
    running: torch.Tensor | None, new: torch.Tensor, factor: Any, is_good: torch.Tensor
) -> None:
    """Move a running statistic, unless the new ones are not finite: the step will be skipped."""
    if running is None:
        return
    moved = running.lerp(new.to(running.dtype), factor)
    running.copy_(torch.where(is_good, moved, running))
