"""The mean over tokens when tokens are spread unevenly over ranks and micro-batches."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from bmtrain.distributed import collectives
from bmtrain.errors import ConfigurationError
from bmtrain.runtime import world


class TokenMean:
    """Turns sums of token losses into a loss whose gradient is that of the mean over all valid
    tokens of the step.

    A mean of micro-batch means weighs a token by how few others its micro-batch has; this one
    weighs all alike. Make it once per step from the targets of all micro-batches of this rank, call
    it with each micro-batch's summed loss, and give the result to `OptimManager.backward`. Adding
    the results up and averaging them by `sum_loss` gives the mean for the log.

    Args:
        targets: this rank's targets of the step, one integer tensor of any shape per micro-batch.
        ignore_index: the target that does not count.

    Example:
        mean = TokenMean(targets_of_all_micro_batches)
        for inputs, targets in micro_batches:
            losses = FusedCrossEntropy(reduction="sum")(model(inputs).flatten(0, 1),
            targets.flatten()) manager.backward(mean(losses))
    """

    def __init__(self, targets: Iterable[torch.Tensor], ignore_index: int = -100) -> None:
        current = world.current("TokenMean")
        self._num_ranks = current.mesh.world.size
        count = torch.zeros((), dtype=torch.float64, device=current.device)
        for target in targets:
            if not isinstance(target, torch.Tensor) or target.is_floating_point():
                raise ConfigurationError(
                    "TokenMean got targets that are no integer tensors: expected one "
                    "tensor per micro-batch."
                )
            count += (target != ignore_index).sum()
        collectives.all_reduce_(count, "sum", current.mesh.world)
        self.num_tokens = count

    def __call__(self, loss_sum: torch.Tensor) -> torch.Tensor:
        """`loss_sum`, a scalar summed over the valid tokens of one micro-batch, as a share of the
        mean over the step.

        Multiplied by the number of ranks, which `OptimManager.backward` divides by. A step without
        a valid token gives 0.
        """
        return loss_sum * (self._num_ranks / self.num_tokens.clamp(min=1)).to(loss_sum.dtype)
