"""Batch normalisation over the rows of all ranks, as in one process that has them all."""

from __future__ import annotations

from typing import Any

import torch

from bmtrain.block.kinds import once_per_kind
from bmtrain.distributed import autograd
from bmtrain.errors import ParameterError
from bmtrain.runtime import world
from bmtrain.torch_internals import BatchNorm


def share_statistics(module: torch.nn.Module) -> None:
    """Let `module`, if it is torch's BatchNorm, take the mean and variance of all ranks' rows.

    Its class becomes a subclass. torch's SyncBatchNorm does the same already.
    """
    if (
        world.world_size() > 1
        and isinstance(module, BatchNorm)
        and not isinstance(module, torch.nn.SyncBatchNorm | _OfAllRanks)
    ):
        module.__class__ = _of_all_ranks(type(module))


@once_per_kind
def _of_all_ranks(kind: Any) -> Any:
    own = {"__doc__": kind.__doc__, "__module__": kind.__module__}
    base = _OfAllRanks if kind.forward is BatchNorm.forward else _Unknown
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
        dims = [dim for dim in range(x.dim()) if dim != 1]
        shape = [-1 if dim == 1 else 1 for dim in range(x.dim())]
        wide = x if x.dtype == torch.float64 else x.float()
        own = torch.cat([wide.sum(dims), wide.new_full((1,), x.numel() // x.shape[1])])
        total = autograd.all_reduce(own, "sum", current.mesh.world)
        count = total[-1].detach()
        mean = total[:-1] / count
        centred = wide - mean.view(shape)
        squares = autograd.all_reduce(centred.square().sum(dims), "sum", current.mesh.world)
        var = squares / count
        if self.training and self.track_running_stats:
            self._track(mean.detach(), squares.detach() / (count - 1))
        out = centred * (var + self.eps).rsqrt().view(shape)
        if self.affine:
            out = out * self.weight.view(shape) + self.bias.view(shape)
        return out.to(x.dtype)

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, var: torch.Tensor) -> None:
        """Move the running statistics, unless these are not finite: the step will be skipped."""
        is_good = (mean + var).isfinite().all()
        factor: Any = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(is_good)
            if factor is None:
                factor = 1.0 / self.num_batches_tracked.to(mean.dtype)
        for running, new in ((self.running_mean, mean), (self.running_var, var)):
            if running is not None:
                moved = running.lerp(new.to(running.dtype), factor)
                running.copy_(torch.where(is_good, moved, running))


class _Unknown(_OfAllRanks):
    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """ParameterError in training."""
        if self.training:
            raise ParameterError(
                f"{type(self).__name__} has a forward pass of its own and would normalise each "
                "rank's rows separately, unlike one process: use torch.nn.BatchNorm or "
                "torch.nn.SyncBatchNorm, or freeze it, module.eval()."
            )
        out: torch.Tensor = super(_OfAllRanks, self).forward(*args, **kwargs)
        return out
