"""The optimizer step of programs written for BMTrain 0.1.x, before OptimManager."""

from __future__ import annotations

from typing import Any

import torch

from bmtrain.errors import ConfigurationError
from bmtrain.optim.adam import AdamBase
from bmtrain.optim.clip import global_sum_of_squares, parameters_of
from bmtrain.optim.gradients import Gradients
from bmtrain.optim.runs import contiguous_runs
from bmtrain.optim.verdict import Verdict
from bmtrain.runtime import world
from bmtrain.runtime.log import warn
from bmtrain.shard.engine import Engine
from bmtrain.shard.parameter import DistributedParameter


def optim_step(optimizer: torch.optim.Optimizer, lr_scheduler: Any = None) -> None:
    """Step `optimizer` and its scheduler after `optimizer.loss_scale(loss).backward()`.

    Gradients that are not finite on any rank make all ranks skip the step, and lower
    `optimizer.scale` if there is a loss scale. The host waits for the device to know.

    Raises:
        ConfigurationError: if a parameter that is not sharded has a gradient of this rank only.
    """
    _check_replicas(optimizer)
    gradients = Gradients(contiguous_runs(parameters_of(optimizer.param_groups)))
    is_finite = Verdict(global_sum_of_squares(*gradients.look())).wait()
    if not isinstance(optimizer, AdamBase) or (optimizer.scale == 1 and not _has_fp16(optimizer)):
        if not is_finite:
            warn("optim_step: a gradient is not finite, the step is skipped on all ranks.")
            return
        optimizer.step()
    else:
        if is_finite:
            optimizer.step(scale=optimizer.scale)
        optimizer.dynamic_scale.judge(is_finite)
        if not is_finite:
            return
    if lr_scheduler is not None:
        lr_scheduler.step()


def _check_replicas(optimizer: torch.optim.Optimizer) -> None:
    """Raise if torch's optimizer would train ordinary parameters with gradients of one rank.

    Without the check, these parameters would silently diverge between ranks.
    """
    replicated = world.current("optim_step").service(Engine).replicated
    for param in parameters_of(optimizer.param_groups):
        if (
            param.grad is not None
            and not isinstance(param, DistributedParameter)
            and not replicated.is_summed(param)
        ):
            raise ConfigurationError(
                f"optim_step got {type(optimizer).__name__} with a parameter of shape "
                f"{tuple(param.shape)} that is not sharded, "
                "and whose gradients have not been averaged over ranks: add the "
                "optimizer to an OptimManager before the first "
                "backward pass, use an optimizer of bmtrain.optim, or shard the model "
                "with BMTrainModelWrapper."
            )


def _has_fp16(optimizer: AdamBase) -> bool:
    return any(param.dtype == torch.float16 for param in parameters_of(optimizer.param_groups))
