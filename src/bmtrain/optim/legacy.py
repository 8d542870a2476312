"""The training step of programs written for BMTrain 0.1.x, before OptimManager."""

from __future__ import annotations

from typing import Any

import torch

from bmtrain.optim.adam import AdamBase
from bmtrain.optim.clip import all_finite, parameters_of
from bmtrain.optim.runs import contiguous_runs
from bmtrain.runtime.log import print_rank


def optim_step(optimizer: torch.optim.Optimizer, lr_scheduler: Any = None) -> None:
    """Step `optimizer` and its scheduler after `optimizer.loss_scale(loss).backward()`.

    With a loss scale, gradients that overflow on any rank make all ranks skip the step and lower `optimizer.scale`.
    """
    if not isinstance(optimizer, AdamBase) or (optimizer.scale == 1 and not _has_fp16(optimizer)):
        optimizer.step()
    elif bool(all_finite(contiguous_runs(parameters_of(optimizer.param_groups))).item()):
        optimizer.step(scale=optimizer.scale)
        optimizer.dynamic_scale.grow()
    else:
        before = optimizer.scale
        optimizer.dynamic_scale.shrink()
        print_rank(f"gradient overflow: loss scale {before:g} -> {optimizer.scale:g}, the step is skipped")
        return
    if lr_scheduler is not None:
        lr_scheduler.step()


def _has_fp16(optimizer: AdamBase) -> bool:
    return any(param.dtype == torch.float16 for param in parameters_of(optimizer.param_groups))
