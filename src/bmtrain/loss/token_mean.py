"""The mean loss over tokens that are unevenly distributed over ranks and micro-batches."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from bmtrain.distributed import collectives
from bmtrain.errors import ConfigurationError
from bmtrain.runtime import world


class TokenMean:
    """Scales summed losses so that the step's gradient is that of the mean over all valid tokens.

    A mean of micro-batch means gives tokens of a short micro-batch more weight; this one weighs all
    tokens equally. Construct it once per step from the targets of all micro-batches of this rank,
    call it with each micro-batch's summed loss, and pass the result to `OptimManager.backward`. The
    sum of the results, averaged by `sum_loss`, is the mean loss for the log. Construction is
    collective: it sums the token counts of all ranks.

    Args:
        targets: this rank's targets of the step, one integer tensor of any shape per micro-batch.
        ignore_index: the target of tokens to ignore.

    Raises:
        NotInitializedError: before `init_distributed`.
        ConfigurationError: for targets that are no integer tensors.

    Example:
        mean = TokenMean(targets_of_all_micro_batches)
        loss = FusedCrossEntropy(reduction="sum")
        for inputs, targets in micro_batches:
            logits = model(inputs).flatten(0, 1)
            manager.backward(mean(loss(logits, targets.flatten())))
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
        """Scale `loss_sum`, a scalar summed over the valid tokens of one micro-batch.

        It is divided by the step's number of tokens and multiplied by the world size, by which
        `OptimManager.backward` divides. A step without a valid token gives 0.
        """
        return loss_sum * (self._num_ranks / self.num_tokens.clamp(min=1)).to(loss_sum.dtype)
