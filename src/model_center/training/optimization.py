"""Optimizer, learning-rate schedule and loss scale from the flags."""

from __future__ import annotations

import argparse

import torch

import bmtrain as bmt
from model_center.errors import ConfigError
from model_center.training.schedules import schedule


def make_optimizer(model: torch.nn.Module, args: argparse.Namespace) -> torch.optim.Optimizer:
    """AdamW over all parameters that are trained, without weight decay on norms and biases.

    Args:
        model: after its parameters have been sharded.
        args: of which `optimizer`, `moments`, `master_weights`, `device_states`, `lr`,
            `adam_betas` and `weight_decay` are read.

    Raises:
        ConfigError: if the model has nothing to train.
    """
    decayed: list[torch.nn.Parameter] = []
    plain: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (decayed if is_decayed(name) else plain).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": args.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if not groups:
        raise ConfigError(
            f"no parameter of {type(model).__name__} is to be trained: all have "
            "requires_grad=False."
        )
    settings = {"lr": args.lr, "betas": tuple(args.adam_betas)}
    settings |= {"moments": args.moments, "master_weights": args.master_weights}
    if args.optimizer == "adam-offload":
        room = args.device_states
        settings["device_bytes"] = room if room == "auto" else int(room * 2**30)
        return bmt.optim.AdamOffloadOptimizer(groups, **settings)
    return bmt.optim.AdamOptimizer(groups, **settings)


def is_decayed(name: str) -> bool:
    """Whether the parameter of this name is a matrix.

    (Its shape does not tell: shards are flat.)
    """
    module, _, leaf = name.rpartition(".")
    return not leaf.endswith("bias") and "norm" not in module.rpartition(".")[2]


def make_scheduler(
    optimizer: torch.optim.Optimizer, args: argparse.Namespace, total_steps: int
) -> bmt.lr_scheduler.WarmupLRScheduler:
    """The schedule of `--lr-decay-style`, at step `--start-step`.

    Args:
        optimizer: whose learning rate it sets.
        args: of which `lr_decay_style`, `lr`, `lr_end`, `warmup_iters`, `lr_decay_iters`,
            `wsd_decay` and `start_step` are read.
        total_steps: the run's last step, at which the learning rate has fallen unless
            `lr_decay_iters` says otherwise.

    Raises:
        ConfigError: for a warm-up that is longer than a schedule with an end.
    """
    end = args.lr_decay_iters or total_steps
    make = schedule(
        args.lr_decay_style, least=args.lr_end, fall=in_steps(args.wsd_decay, total_steps)
    )
    made: bmt.lr_scheduler.WarmupLRScheduler = make(
        optimizer, args.lr, in_steps(args.warmup_iters, total_steps), end, args.start_step
    )
    return made


def in_steps(number: float, total_steps: int) -> int:
    """`--warmup-iters` or `--wsd-decay` in steps: a number below 1 is a share of all steps."""
    return round(number * total_steps) if number < 1 else int(number)


def make_manager(
    optimizer: torch.optim.Optimizer,
    scheduler: bmt.lr_scheduler.WarmupLRScheduler,
    args: argparse.Namespace,
) -> bmt.optim.OptimManager:
    """The OptimManager of an optimizer and its schedule.

    Args:
        optimizer: of this library or of torch.
        scheduler: its schedule.
        args: from `model_center.get_args`: with `dtype` fp16 the loss is scaled, from `loss_scale`
            on, as small gradients would vanish.
    """
    scale = args.loss_scale if args.dtype == "fp16" and args.loss_scale > 0 else None
    # A Run has a limit of its own, and says more than the manager could.
    manager = bmt.optim.OptimManager(loss_scale=scale, max_skipped_steps=None)
    manager.add_optimizer(optimizer, scheduler)
    return manager
