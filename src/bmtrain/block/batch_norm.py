"""Batch normalisation over the rows of all ranks, as one process that has all rows computes it."""

from __future__ import annotations

import functools
import types
from typing import Any

import torch

from bmtrain.distributed import autograd
from bmtrain.runtime import world
from bmtrain.runtime.log import warn
from bmtrain.torch_internals import BatchNormBase


def share_statistics(module: torch.nn.Module) -> None:
    """Let `module`, if it normalises by its batch, take the mean and variance of all ranks' rows.

    Its class becomes a subclass. One with a forward pass of its own is left as it is, with a
    warning; torch's SyncBatchNorm does the same already.
    """
    if (
        world.world_size() == 1
        or not isinstance(module, BatchNormBase)
        or isinstance(module, torch.nn.SyncBatchNorm | OfAllRanks)
    ):
        return
    kind: Any = type(module)
    if kind.forward is BatchNormBase.forward:
        module.__class__ = _of_all_ranks(kind)
    else:
        warn(
            f"{kind.__name__} has a forward pass of its own: in training it normalises each rank's "
            "rows by themselves, other than one process would. Take torch.nn.BatchNorm, "
            "torch.nn.SyncBatchNorm, or a norm that looks at one row, before the model is sharded."
        )


@functools.cache
def _of_all_ranks(kind: Any) -> Any:
    def fill(namespace: dict[str, Any]) -> None:
        namespace["__doc__"], namespace["__module__"] = kind.__doc__, kind.__module__

    return types.new_class(kind.__name__, (OfAllRanks, kind), exec_body=fill)


class OfAllRanks(BatchNormBase):
    """The forward pass of torch's BatchNorm, where it uses the statistics of a batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Collective in training: two sums over all ranks.

        In a pipeline, whose stages run at other times, it is a micro-batch's rows of this rank.
        """
        mesh = world.current("BatchNorm").mesh
        if (not self.training and self.running_mean is not None) or mesh.pipe.size > 1:
            return super().forward(x)
        is_tracking = self.training and self.track_running_stats
        self._check_input_dim(x)
        dims = [dim for dim in range(x.dim()) if dim != 1]
        shape = [-1 if dim == 1 else 1 for dim in range(x.dim())]
        wide = x if x.dtype == torch.float64 else x.float()
        own = torch.cat([wide.sum(dims), wide.new_full((1,), x.numel() // x.shape[1])])
        total = autograd.all_reduce(own, "sum", mesh.world)
        count = total[-1].detach()
        mean = total[:-1] / count
        centred = wide - mean.view(shape)
        var = autograd.all_reduce(centred.square().sum(dims), "sum", mesh.world) / count
        if is_tracking and self.running_mean is not None and self.running_var is not None:
            self._track(mean.detach(), var.detach() * (count / (count - 1)))
        out = centred * (var + self.eps).rsqrt().view(shape)
        if self.affine:
            out = out * self.weight.view(shape) + self.bias.view(shape)
        return out.to(x.dtype)

    def _track(self, mean: torch.Tensor, var: torch.Tensor) -> None:
        with torch.no_grad():
            factor: Any = self.momentum
            if self.num_batches_tracked is not None:
                self.num_batches_tracked.add_(1)
                if self.momentum is None:
                    factor = 1.0 / self.num_batches_tracked.to(mean.dtype)
            for running, new in ((self.running_mean, mean), (self.running_var, var)):
                if running is not None:
                    running.lerp_(new.to(running.dtype), factor)
