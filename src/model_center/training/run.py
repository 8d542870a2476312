"""Run: one training of one model, in steps that the program asks for."""

from __future__ import annotations

import argparse
import hashlib
import math
import pathlib
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch

import bmtrain as bmt
from bmtrain.checkpoint.entries import entries
from bmtrain.distributed.agreement import attempt, everyone
from model_center.dataset.loader import DistributedDataLoader
from model_center.errors import ConfigError, ResumeError
from model_center.training.base_weights import BaseWeights
from model_center.training.batches import grouped, num_tokens
from model_center.training.checkpoints import Checkpoints, check_same_run, load_state, read_facts
from model_center.training.flops import peak_flops
from model_center.training.optimization import make_manager, make_optimizer, make_scheduler
from model_center.training.run_log import RunLog, StepReport
from model_center.training.stop import StopRequest


class Stopped(Exception):
    """The run was asked to stop, and has saved a checkpoint; `Run` catches it."""


class Run:
    """A training run: optimizer, schedule, checkpoints, log; entered by `with`, by all ranks.

        with Run(model, loader, args) as run:
            for epoch in run.epochs():
                for batches in run.steps():
                    run.update(loss_of(batch) for batch in batches)
                run.record(accuracy=evaluate(model))

    `batches` are the micro-batches of one optimizer step; `update` runs the backward pass of each
    loss before it asks for the next. The losses of a step are added up, so each is a share of the
    step's mean: see `bmtrain.loss.TokenMean`.

    With `--save` there is a checkpoint every `--save-iters` steps, at the end, and when the program
    is asked to stop by Ctrl-C or SIGTERM, which ends the `with` block after the step at hand. With
    `--resume` the run goes on from the newest one, as if it had not stopped, also on another number
    of ranks, where steps are of another size.

    Args:
        model: with its parameters sharded and their first values.
        loader: of the training data.
        args: from `model_center.get_args`.
        flops_per_token: of a step, for the model FLOPs utilisation in the log; see `flops`.

    Attributes:
        step: the number of optimizer steps done.
        optimizer, scheduler, manager, log: what does it.
        total_steps: the last step, as far as can be said now: `--epochs` passes, but at most
            `--train-iters` steps.

    Raises:
        ResumeError: for checkpoints in --save that are of another run, or that are there without
            --resume.
        ConfigError: for a log that cannot be written where --log-dir or --save says, or by
            --tensorboard.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loader: DistributedDataLoader,
        args: argparse.Namespace,
        flops_per_token: float | None = None,
    ) -> None:
        self.model, self.loader, self.args = model, loader, args
        self.checkpoints = (
            Checkpoints(pathlib.Path(args.save), args.save_keep) if args.save else None
        )
        self.base = BaseWeights(model, args.load or args.model_config) if args.save else None
        self.made_with = _made_with(model, args)
        peak = peak_flops()
        # the highest number of tokens a second and rank
        self._limit = peak / flops_per_token if peak and flops_per_token else None
        self.step: int = args.start_step
        # the step at which the first pass would have begun with steps of this size
        self._origin: int = args.start_step
        self._recorded = False  # whether something was recorded after the last step
        self._tokens, self._clock = 0, time.perf_counter()
        checkpoint = attempt(self._to_go_on_from, everyone(), ResumeError)
        if checkpoint is not None:
            self._go_to(checkpoint)
        # the step of the last checkpoint
        self._saved = self.step if checkpoint is not None else None
        self.total_steps: int = min(
            self._origin + args.epochs * self._steps_per_epoch(), args.train_iters
        )
        self.optimizer = make_optimizer(model, args)
        self.scheduler = make_scheduler(self.optimizer, args, self.total_steps)
        self.manager = make_manager(self.optimizer, self.scheduler, args)
        # ranks read different rows, and should drop different parts of them
        torch.manual_seed(args.seed + bmt.rank())
        if checkpoint is not None:
            self._restore(checkpoint)
        # rank 0 alone writes: the others would go on without it
        self.log = attempt(self._open_log, everyone(), ConfigError)
        self.log.say(self._greeting(checkpoint))
        self._stop = StopRequest()

    def __enter__(self) -> Run:
        self.log.__enter__()
        return self

    def __exit__(self, *raised: Any) -> bool:
        error = raised[1]
        if error is None:
            self._save()
        self._stop.restore()
        self.log.__exit__(*raised)
        if isinstance(error, Stopped):
            self.log.say(
                f"stopped after step {self.step}: "
                + ("--resume goes on." if self.checkpoints else "nothing was kept.")
            )
            return True
        if error is None:
            self.log.say(f"finished after step {self.step}.")
        return False

    def epochs(self) -> Iterator[int]:
        """Numbers of the passes that are left, from 0 on, the one at hand first."""
        while self.loader.epoch < self.args.epochs and self.step < self.args.train_iters:
            yield self.loader.epoch

    def steps(self) -> Iterator[list[Any]]:
        """For each step that is left of this pass, its micro-batches."""
        groups = grouped(self.loader, self.args.gradient_accumulation)
        self._clock = time.perf_counter()
        for batches in groups:
            self._tokens = sum(map(num_tokens, batches))
            yield batches
            if self.step >= self.args.train_iters:
                return

    def update(self, losses: Iterable[torch.Tensor]) -> float:
        """One optimizer step on the sum of the losses; returns it, averaged over ranks."""
        lr, loss_scale = float(self.optimizer.param_groups[0]["lr"]), self.manager.loss_scale
        total = torch.zeros((), device=bmt.device())
        self.manager.zero_grad()
        for loss in losses:
            self.manager.backward(loss)
            total += loss.detach().float()
        grad_norm = self.manager.clip_grad_norm(
            self.optimizer.param_groups, max_norm=self.args.clip_grad or math.inf
        )
        self.step += 1
        # before the optimizer's step, which may use gradients up
        if self.step % self.args.inspect_iters == 0:
            self.log.say(bmt.inspect.format_summary(bmt.inspect.inspect_model(self.model, "*")))
        self.manager.step()
        self._recorded = False
        mean_loss, stopping = self._report(total, grad_norm, lr, loss_scale)
        if stopping or self.step % self.args.save_iters == 0:
            self._save()
        if stopping:
            raise Stopped
        return mean_loss

    def record(self, **values: Any) -> None:
        """Show and log what was found out about the model as it is after this step."""
        self.log.record(self.step, **values)
        self._recorded = True

    def _report(
        self, total: torch.Tensor, grad_norm: torch.Tensor, lr: float, loss_scale: float
    ) -> tuple[float, bool]:
        """Log a step; its loss, and whether any rank was asked to stop."""
        own = (total, grad_norm, float(self._tokens), float(self._stop.asked))
        # One message, and one moment of waiting for the device, for all of it.
        together = bmt.sum_loss(
            torch.stack([torch.as_tensor(value, device=total.device) for value in own])
        )
        mean_loss, norm, mean_tokens, wish = together.tolist()
        now = time.perf_counter()
        rate = mean_tokens / (now - self._clock)
        report = StepReport(
            step=self.step,
            loss=mean_loss,
            grad_norm=norm,
            lr=lr,
            loss_scale=float(loss_scale),
            tokens_per_second=rate * bmt.world_size(),
            memory=bmt.utils.peak_memory(),
            mfu=rate / self._limit if self._limit else None,
        )
        self._clock = now
        self.log.step(report)
        return mean_loss, wish > 0

    def _to_go_on_from(self) -> pathlib.Path | None:
        """The checkpoint to resume; ResumeError if that was not asked for, or for another run's."""
        checkpoint = self.checkpoints.latest() if self.checkpoints else None
        if checkpoint is None:
            return None
        if not self.args.resume:
            raise ResumeError(
                f"{checkpoint} is there: go on from it by --resume, or give another --save."
            )
        check_same_run(
            checkpoint, self.made_with, "give the same arguments to go on, or another --save"
        )
        return checkpoint

    def _go_to(self, checkpoint: pathlib.Path) -> None:
        """The model, and the place in the data."""
        if self.base is not None:
            self.base.load(checkpoint)
        progress = read_facts(checkpoint)
        self.loader.load_state_dict(progress["loader"])
        self.step, self._origin, self._recorded = (
            progress["step"],
            progress["origin"],
            progress["recorded"],
        )
        if progress["steps_per_epoch"] != self._steps_per_epoch():
            self._origin = round(self.step - _passes(progress["loader"]) * self._steps_per_epoch())

    def _restore(self, checkpoint: pathlib.Path) -> None:
        """What the optimizer had learned, and the place in the schedule.

        How that runs on is said by this run's flags.
        """
        planned = self.scheduler.state_dict()
        load_state(checkpoint, self.manager)
        self.scheduler.load_state_dict({**planned, "num_iter": self.scheduler.num_iter})

    def _steps_per_epoch(self) -> int:
        return -(-len(self.loader) // self.args.gradient_accumulation)

    def _open_log(self) -> RunLog:
        folder = self.args.log_dir or self.args.save
        return RunLog(
            pathlib.Path(folder) if folder else None,
            first_step=self.step,
            num_steps=self.total_steps,
            log_every=self.args.log_iters,
            is_kept=self._is_kept,
            tensorboard=self.args.tensorboard,
            wandb=self.args.wandb,
        )

    def _greeting(self, checkpoint: pathlib.Path | None) -> str:
        where = f"{bmt.world_size()} process(es) on {bmt.device().type}"
        rows = self.args.batch_size * self.args.gradient_accumulation * bmt.world_size()
        begin = f"going on from {checkpoint}" if checkpoint is not None else "starting anew"
        return (
            f"{type(self.model).__name__}, {self.args.dtype}, ZeRO-{self.args.zero_level} over "
            f"{where}; up to step {self.total_steps} of {rows} rows; {begin}; checkpoints: "
            f"{self.args.save or 'none, for want of --save'}"
        )

    def _save(self) -> None:
        if self.checkpoints is None or self.base is None or self._saved == self.step:
            return
        progress = {
            "step": self.step,
            "origin": self._origin,
            "steps_per_epoch": self._steps_per_epoch(),
            "recorded": self._recorded,
            "loader": self.loader.state_dict(),
        }
        self.checkpoints.save(progress, self.base, self.manager, self.made_with)
        self._saved, self._clock = self.step, time.perf_counter()

    def _is_kept(self, record: dict[str, Any]) -> bool:
        """Whether it came before the checkpoint, or the checkpoint knows of it."""
        return record["step"] < self.step or (
            record["step"] == self.step and (self._recorded or "loss" in record)
        )


def _made_with(model: torch.nn.Module, args: argparse.Namespace) -> dict[str, Any]:
    """What two parts of one run share: data, seed, dtype, and weights' names and shapes."""
    weights = "\n".join(f"{entry.name} {entry.shape}" for entry in entries(model))
    return {
        "dataset": args.dataset_name,
        "dtype": args.dtype,
        "seed": args.seed,
        "weights": hashlib.sha256(weights.encode()).hexdigest()[:16],
    }


def _passes(place: dict[str, Any]) -> float:
    """How many passes over the data a loader's state has behind it."""
    return float(place["epoch"] + (place["row"] / place["num_rows"] if "row" in place else 0))
