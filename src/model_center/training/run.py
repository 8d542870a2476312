"""Run: one training of one model, in steps that the program asks for."""

from __future__ import annotations

import argparse
import dataclasses
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
from bmtrain.errors import CheckpointError
from bmtrain.runtime.process import Exit
from model_center.dataset.loader import DistributedDataLoader
from model_center.errors import ConfigError, DivergenceError, ResumeError
from model_center.training.base_weights import BaseWeights
from model_center.training.batches import num_tokens, tokens_counted
from model_center.training.checkpoints import Checkpoints
from model_center.training.curves import requested_curves
from model_center.training.flops import FlopsMeter, peak_flops
from model_center.training.non_finite_cause import cause_lines, find_cause, non_finite_error
from model_center.training.optimization import make_manager, make_optimizer, make_scheduler
from model_center.training.replay import MeasuredStep, Replay, gradient_checksums
from model_center.training.resuming import check_same_run, load_state, read_facts
from model_center.training.run_log import METRICS, OnStep, RunLog, StepReport
from model_center.training.spikes import Spikes
from model_center.training.step_replay import Losses, StepReplayBuffer
from model_center.training.stop import StopRequest


class Stopped(Exception):
    """The run was asked to stop, and has saved a checkpoint; `Run` catches it."""


class Replayed(Stopped):
    """A step was computed again, as `--replay-step` asks, and the run has nothing more to do."""


@dataclasses.dataclass(frozen=True)
class Figures:
    """What all ranks say of a step: means of losses and of tokens, the norm of the gradients.

    `wish` is above 0 if a rank was asked to stop; `seen` are tokens without padding,
    `loss_tokens` those in the loss.
    """

    loss: float
    grad_norm: float
    tokens: float
    wish: float
    seen: float
    loss_tokens: float


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
    is asked to stop by Ctrl-C, SIGTERM or `request_stop`, which ends the `with` block after the
    step at hand. SIGUSR1 ends the program there, with an exit code for schedulers: 75. With
    `--resume` the run continues from the newest one as if it had not stopped, also on another
    number of ranks, where steps are of another size.

    A step whose loss or gradients are not finite on any rank is skipped; after `--max-bad-steps` in
    a row the program is handed the batches of the last one once more, and the run ends with a
    NonFiniteError that names module, rank and rows. `--on-spike` sets what happens to losses far
    above the last ones, `--replay-step` computes one step twice.

    Args:
        model: with its parameters sharded and their first values.
        loader: of the training data.
        args: from `model_center.get_args`.
        flops_per_token: of a step, for the model FLOPs utilisation in the log; None for what a
            `flops.FlopsMeter` counts in the model.
        on_step: called with a dict of the figures of each step, and of what `record` gets, on every
            rank. An error that it raises is reported once and does not end the run.

    Attributes:
        step: the number of steps done, skipped ones too.
        optimizer, scheduler, manager, log: of the run.
        is_recorded: whether something was recorded after the last step; of a resumed run, before
            its checkpoint: if not, what is due at that step is still to be measured.
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
        on_step: OnStep | None = None,
    ) -> None:
        self.model, self.loader, self.args = model, loader, args
        self.checkpoints = _checkpoints(args)
        self._on_step = on_step
        try:
            self._begin(model, loader, args, flops_per_token)
        except BaseException:
            if self.checkpoints is not None:  # else the program could not try again
                self.checkpoints.abandon()
            raise

    def _begin(
        self,
        model: torch.nn.Module,
        loader: DistributedDataLoader,
        args: argparse.Namespace,
        flops_per_token: float | None,
    ) -> None:
        self.base = BaseWeights(model, args.load or args.model_config) if args.save else None
        self.made_with = _made_with(model, args)
        self.spikes = Spikes(args.spike_factor)
        self._replay_buffer = StepReplayBuffer(loader, args.gradient_accumulation)
        self._replay = (
            Replay(args.replay_step, pathlib.Path(args.log_dir or args.save, METRICS))
            if args.replay_step
            else None
        )
        self._peak = peak_flops(args.peak_tflops)
        self._flops_per_token = flops_per_token
        self._meter = FlopsMeter(model) if self._peak and not flops_per_token else None
        self.step: int = args.start_step
        # the step at which the first pass would have begun with steps of this size
        self._origin: int = args.start_step
        self.is_recorded = False
        self._tokens, self._clock = 0, time.perf_counter()
        self._counts: torch.Tensor | None = None  # of the step at hand, see `tokens_counted`
        self._epoch = 0  # the pass at hand
        self._open: int | None = None  # the pass whose end the program has not dealt with
        self._seen = [0, 0]  # tokens up to this step, and those in the loss, of all ranks
        newest = self._latest()
        checkpoint = attempt(lambda: self._checkpoint_to_resume(newest), everyone(), ResumeError)
        if checkpoint is not None:
            self._load_checkpoint(checkpoint)
        # the step of the last checkpoint
        self._saved = self.step if checkpoint is not None else None
        self.total_steps: int = min(
            self._origin + args.epochs * self._steps_per_epoch(), args.train_iters
        )
        if self._replay is not None and not self.step < self._replay.step <= self.total_steps:
            raise ResumeError(
                f"--replay-step is {self._replay.step}: expected a step of this run, "
                f"{self.step + 1} to {self.total_steps}."
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
        self.log.with_listener(self._on_step)
        self.log.message(self._opening_line(checkpoint))
        self._stop = StopRequest(args.stop_patience or "auto")

    def __enter__(self) -> Run:
        self.log.__enter__()
        return self

    def __exit__(self, *raised: Any) -> bool:
        error = raised[1]
        if error is None:
            self._save()
        if self.checkpoints is not None:
            if error is None or isinstance(error, Stopped):
                self.checkpoints.close()
            else:
                self.checkpoints.abandon()
        is_requeue = isinstance(error, Stopped) and self._stop.is_requeue()
        if isinstance(error, Exception) and not isinstance(error, Stopped):
            self._log_resume_point()
        self.log.__exit__(*raised)
        if isinstance(error, Replayed):
            self._stop.restore()
            return True
        if isinstance(error, Stopped):
            left = self._resuming(self.step) if self.checkpoints else "nothing was kept."
            self.log.message(f"stopped after step {self.step}: {left}")
        if error is None:
            self.log.message(f"finished after step {self.step}.")
        # last, because a rank without its launcher ends here
        self._stop.restore()
        if is_requeue:
            bmt.synchronize()  # the first rank to go has the launcher end the others
            raise SystemExit(Exit.REQUEUE)
        return isinstance(error, Stopped)

    def _resuming(self, step: int | str) -> str:
        again = "" if self.args.resume else " with --resume"
        return f"run the same command{again} to resume from step {step}."

    def _log_resume_point(self) -> None:
        """From where a run that an error ends can be resumed, as this rank alone sees it."""
        try:
            left = self.checkpoints.usable() if self.checkpoints is not None else []
        except CheckpointError:  # the error that ends the run is told
            return
        if left:
            step = str(left[-1])
            if self._saved is not None and self._saved > left[-1]:
                step += f", or {self._saved} if its checkpoint was still written"
            self.log.message(f"failed after step {self.step}: {self._resuming(step)}")

    def epochs(self) -> Iterator[int]:
        """Numbers of the passes that are left, from 0 on, the one at hand first.

        One that was stopped after its last step comes again, without steps, for what is due at its
        end.
        """
        while self._open is not None or self._has_more():
            self._open = self.loader.epoch if self._open is None else self._open
            yield self._open
            self._open = None

    def _has_more(self) -> bool:
        return self.loader.epoch < self.args.epochs and self.step < self.args.train_iters

    def steps(self) -> Iterator[list[Any]]:
        """For each step that is left of this pass, its micro-batches."""
        if self._open is not None and not (self._open == self.loader.epoch and self._has_more()):
            return
        self._clock, self._epoch = time.perf_counter(), self.loader.epoch
        for batches in self._replay_buffer.steps():
            self._tokens = sum(map(num_tokens, batches))
            self._counts = tokens_counted(batches)
            yield batches
            if self.step >= self.args.train_iters and not self._replay_buffer.is_recomputed:
                return

    def update(self, losses: Iterable[torch.Tensor]) -> float:
        """One step on the sum of `losses`, scalars with a graph; returns its mean over ranks.

        A step whose loss or gradients are not finite is skipped.

        Raises:
            NonFiniteError, DivergenceError: on all ranks, when `--max-bad-steps` steps in a row
                were skipped.
            CheckpointError: on all ranks, for a checkpoint that cannot be written or would hold
                what is not finite.
        """
        again = self._replay_buffer.take_recomputation()
        if again is not None:
            return again(losses)
        if self._replay is not None and self.step + 1 == self._replay.step:
            return self._begin_replay(losses)
        lr, loss_scale = float(self.optimizer.param_groups[0]["lr"]), self.manager.loss_scale
        total, grad_norm = self._backward(losses, self.args.clip_grad or math.inf)
        self.step += 1
        # before the optimizer's step, which may use gradients up
        if self.step % self.args.inspect_iters == 0:
            self.log.message(bmt.inspect.format_summary(bmt.inspect.inspect_model(self.model, "*")))
        skipped = self.manager.skipped_steps
        # A spike that is only told need not be known before the step: the device goes on meanwhile.
        is_left_out = False
        if self.args.on_spike == "warn":
            self.manager.step()
            figures = self._figures(total, grad_norm)
        else:
            figures = self._figures(total, grad_norm)
            is_left_out = self.spikes.is_spike(figures.loss)
            if is_left_out:
                self._skip_spike(figures.loss)
            else:
                self.manager.step()
        self.is_recorded = False
        bad = is_left_out or self.manager.skipped_steps > skipped
        self._report(figures, lr, loss_scale, bad)
        if not is_left_out:
            self._check_spike(figures.loss)
        if figures.wish > 0 or self.step % self.args.save_iters == 0:
            self._save()
        if figures.wish > 0:
            raise Stopped
        self._end_after_bad_steps()
        return figures.loss

    def _backward(self, losses: Losses, max_norm: float) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradients of a step; the sum of its losses on this rank, and the gradients' norm."""
        total = torch.zeros((), device=bmt.device())
        self.manager.zero_grad()
        for loss in losses:
            self.manager.backward(loss)
            total += loss.detach().float()
        return total, self.manager.clip_grad_norm(self.optimizer.param_groups, max_norm=max_norm)

    def _check_spike(self, loss: float) -> None:
        """Tell of a spike; remember the loss."""
        limit = self.spikes.limit()
        if self.args.on_spike == "warn" and self.spikes.is_spike(loss):
            self.log.message(f"step {self.step}: loss {loss:.4f} is above {limit:.4f}, a spike.")
        self.spikes.keep(loss)

    def _skip_spike(self, loss: float) -> None:
        """Skip the step of a spike; with `--on-spike back`, after the last checkpoint."""
        self.manager.zero_grad()
        limit = self.spikes.limit()
        text = f"step {self.step}: loss {loss:.4f} is above {limit:.4f}, a spike: the step is "
        before = self._roll_back() if self.args.on_spike == "back" else None
        if before is None:
            self.log.message(f"{text}skipped.")
        else:
            self.log.message(
                f"{text}skipped, weights and optimizer are those of step {before} again, and the "
                f"batches of steps {before + 1} to {self.step} are left out."
            )

    def _roll_back(self) -> int | None:
        """Weights, optimizer and schedule of the last checkpoint, from the next batch on.

        Returns its step; None where there is none.

        Source: Chowdhery et al., "PaLM" (2022), section 5.1: the batches before a spike are left
        out too, since a run that sees them again comes to the same weights.
        """
        checkpoint = self._latest()
        if checkpoint is None:
            return None
        done, origin, recorded, seen = self.step, self._origin, self.is_recorded, self._seen
        at_hand = self._open
        place, spikes = self.loader.state_dict(), self.spikes.state_dict()
        self._load_checkpoint(checkpoint)
        before = self.step
        self._restore(checkpoint)
        self.step, self._origin, self.is_recorded, self._seen = done, origin, recorded, seen
        self._open = at_hand
        self.loader.load_state_dict(place)
        self.spikes.load_state_dict(spikes)
        self._replay_buffer.loader_moved()
        return before

    def _latest(self) -> pathlib.Path | None:
        """The newest checkpoint, of a replay the newest before its step. Collective."""
        before = self._replay.step if self._replay is not None else None
        return self.checkpoints.latest(before) if self.checkpoints else None

    def _end_after_bad_steps(self) -> None:
        """Look at the step again, or raise, after too many that were skipped."""
        if self.manager.skipped_in_a_row >= self.args.max_bad_steps:
            if not self._replay_buffer.has_batches:
                raise non_finite_error(self.step, self.manager.skipped_in_a_row, [])
            self._replay_buffer.recompute(self._raise_non_finite)
        elif self.spikes.in_a_row >= self.args.max_bad_steps:
            raise DivergenceError(
                f"the losses of {self.spikes.in_a_row} steps in a row, up to step {self.step}, are "
                f"above {self.spikes.limit():.4f}: no single batch is their cause. Remedy: resume "
                "from a checkpoint before them with a lower learning rate, or with --on-spike warn "
                "if the data have changed."
            )

    def _raise_non_finite(self, losses: Losses) -> float:
        found = find_cause(self.model, self.manager, losses, self._replay_buffer.rows())
        raise non_finite_error(self.step, self.manager.skipped_in_a_row, cause_lines(found))

    def _begin_replay(self, losses: Losses) -> float:
        if not self._replay_buffer.has_batches:
            raise ResumeError("--replay-step needs a program that takes batches from Run.steps.")
        first = self._measure(losses)

        def compare(losses: Losses) -> float:
            second = self._measure(losses)
            for line in self._compared(first, second):
                self.log.message(line)
            if first.is_finite and second.is_finite:
                raise Replayed
            self._replay_buffer.recompute(self._log_non_finite)
            return second.loss

        self._replay_buffer.recompute(compare)
        return first.loss

    def _compared(self, first: MeasuredStep, second: MeasuredStep) -> list[str]:
        return [] if self._replay is None else self._replay.compare(first, second)

    def _log_non_finite(self, losses: Losses) -> float:
        for line in cause_lines(
            find_cause(self.model, self.manager, losses, self._replay_buffer.rows())
        ):
            self.log.message(f"  {line}")
        raise Replayed

    def _measure(self, losses: Losses) -> MeasuredStep:
        seen: list[float] = []
        total, grad_norm = self._backward(_collected(losses, seen), math.inf)
        figures = self._figures(total, grad_norm)
        gradients = gradient_checksums(self.model)
        return MeasuredStep(seen, figures.loss, figures.grad_norm, gradients)

    def request_stop(self, *, requeue: bool = False) -> None:
        """End the `with` block on all ranks after the step at hand, as a signal does.

        It can be called by any thread of any rank; with `requeue` as SIGUSR1.
        """
        self._stop.request_stop(requeue=requeue)

    def record(self, **values: Any) -> None:
        """Show and log `values`, numbers measured on the model as it is after this step.

        What a resumed run measures once more takes the place of the first record.
        """
        self.log.record(self.step, **values)
        self.is_recorded = True

    def _figures(self, total: torch.Tensor, grad_norm: torch.Tensor) -> Figures:
        """What all ranks say of the step at hand. Waits for the device."""
        counts = (0.0, 0.0) if self._counts is None else self._counts
        own = (total, grad_norm, float(self._tokens), float(self._stop.asked), *counts)
        # One message, and one moment of waiting for the device, for all of it.
        together = bmt.sum_loss(
            torch.stack([torch.as_tensor(value, device=total.device).float() for value in own])
        )
        return Figures(*together.tolist())

    def _report(self, figures: Figures, lr: float, loss_scale: float, skipped: bool) -> None:
        """Log a step."""
        now = time.perf_counter()
        seconds = now - self._clock
        rate = figures.tokens / seconds
        is_counted = self._counts is not None
        own = [round(count * bmt.world_size()) for count in (figures.seen, figures.loss_tokens)]
        self._seen = [before + count for before, count in zip(self._seen, own, strict=True)]
        report = StepReport(
            step=self.step,
            loss=figures.loss,
            grad_norm=figures.grad_norm,
            lr=lr,
            loss_scale=float(loss_scale),
            tokens_per_second=rate * bmt.world_size(),
            memory=bmt.utils.peak_memory(),
            seconds=seconds,
            mfu=self._mfu(rate, figures.tokens),
            skipped=True if skipped else None,
            epoch=self._epoch,
            unpadded_tokens_per_second=own[0] / seconds if is_counted else None,
            tokens=self._seen[0] if is_counted else None,
            loss_tokens=self._seen[1] if is_counted else None,
        )
        self._clock = now
        self.log.step(report)
        if self._replay is not None:
            self._replay.check(self.step, figures.loss)

    def _mfu(self, rate: float, tokens: float) -> float | None:
        """Of a step with so many tokens, and tokens a second, on this rank; None if not known."""
        if not self._peak:
            return None
        if self._flops_per_token:
            return rate * self._flops_per_token / self._peak
        counted = self._meter.take() if self._meter else 0.0
        return rate * counted / tokens / self._peak if counted and tokens else None

    def _checkpoint_to_resume(self, checkpoint: pathlib.Path | None) -> pathlib.Path | None:
        """The checkpoint to resume; ResumeError if that was not asked for, or for another run's."""
        if checkpoint is None:
            return None
        if not self.args.resume and self._replay is None:
            raise ResumeError(
                f"{checkpoint} exists: resume from it with --resume, or give another --save."
            )
        made_with = self.made_with
        if self.args.continue_with_other_data:
            made_with = {**made_with, "dataset": read_facts(checkpoint)["made_with"].get("dataset")}
        check_same_run(
            checkpoint,
            made_with,
            "give the same arguments to resume, or another --save; --continue-with-other-data "
            "accepts a dataset that differs on purpose",
        )
        return checkpoint

    def _has_other_data(self, checkpoint: pathlib.Path) -> bool:
        before = read_facts(checkpoint)["made_with"].get("dataset")
        return bool(before != self.made_with["dataset"])

    def _load_checkpoint(self, checkpoint: pathlib.Path) -> None:
        """The model, and the place in the data: of other data their beginning."""
        if self.base is not None:
            self.base.load(checkpoint)
        progress = read_facts(checkpoint)["progress"]
        self._seen = list(progress.get("tokens", [0, 0]))
        if self._has_other_data(checkpoint):
            self.step = self._origin = progress["step"]
            return
        self.loader.load_state_dict(progress["loader"])
        self.step, self._origin, self.is_recorded = (
            progress["step"],
            progress["origin"],
            progress["recorded"],
        )
        at_hand = progress.get("pass")
        self._open = at_hand if at_hand is not None and at_hand < self.args.epochs else None
        self.spikes.load_state_dict(progress.get("spikes", {}))
        if progress["steps_per_epoch"] != self._steps_per_epoch():
            self._origin = round(self.step - _passes(progress["loader"]) * self._steps_per_epoch())

    def _restore(self, checkpoint: pathlib.Path) -> None:
        """What the optimizer had learned, and the place in the schedule.

        How that runs on is said by this run's flags.
        """
        planned = self.scheduler.state_dict()
        _, own = load_state(checkpoint, self.manager)
        if own is not None and not self._has_other_data(checkpoint):
            self.loader.load_state_dict(own["loader"])
        self.scheduler.load_state_dict({**planned, "num_iter": self.scheduler.num_iter})

    def _steps_per_epoch(self) -> int:
        return -(-len(self.loader) // self.args.gradient_accumulation)

    def _open_log(self) -> RunLog:
        # A replay adds nothing to the run, and takes nothing of its log back.
        folder = None if self._replay else self.args.log_dir or self.args.save
        try:
            return RunLog(
                pathlib.Path(folder) if folder else None,
                first_step=self.step,
                num_steps=self.total_steps,
                log_every=self.args.log_iters,
                curves=requested_curves(self.args),
            )
        except OSError as error:
            raise ConfigError(
                f"the record of the run cannot be written into {folder}: "
                f"{error.strerror or error}. Make room there, or give another --log-dir."
            ) from error

    def _opening_line(self, checkpoint: pathlib.Path | None) -> str:
        where = f"{bmt.world_size()} process(es) on {bmt.device().type}"
        rows = self.args.batch_size * self.args.gradient_accumulation * bmt.world_size()
        begin = f"resuming from {checkpoint}" if checkpoint is not None else "starting from scratch"
        if checkpoint is not None and self._has_other_data(checkpoint):
            begin += " with other data, from their beginning"
        return (
            f"{type(self.model).__name__}, {self.args.dtype}, ZeRO-{self.args.zero_level} over "
            f"{where}; up to step {self.total_steps} of {rows} rows; {begin}; checkpoints: "
            f"{self.args.save or 'none, as there is no --save'}"
        )

    def _save(self) -> None:
        if self.checkpoints is None or self.base is None or self._saved == self.step:
            return
        if self._replay is not None:
            return
        progress = {
            "step": self.step,
            "origin": self._origin,
            "steps_per_epoch": self._steps_per_epoch(),
            "recorded": self.is_recorded,
            "pass": self._open,
            "tokens": self._seen,
            "spikes": self.spikes.state_dict(),
            "loader": self.loader.state_dict(),
        }
        own = {"loader": self.loader.state_dict()}
        self.log.to_disk()  # else a power failure could leave steps that are in no record
        self.checkpoints.save(progress, self.base, self.manager, self.made_with, own)
        self._saved, self._clock = self.step, time.perf_counter()


def _checkpoints(args: argparse.Namespace) -> Checkpoints | None:
    if not args.save:
        return None
    return Checkpoints(
        pathlib.Path(args.save), args.save_keep, args.save_keep_every, not args.save_blocking
    )


def _collected(losses: Losses, seen: list[float]) -> Iterator[torch.Tensor]:
    """The losses, each written down."""
    for loss in losses:
        seen.append(loss.item())
        yield loss


def _made_with(model: torch.nn.Module, args: argparse.Namespace) -> dict[str, Any]:
    """What two parts of one run share: data, seed, dtypes, and weights' names and shapes."""
    weights = "\n".join(f"{entry.name} {entry.shape}" for entry in entries(model))
    return {
        "dataset": args.dataset_name,
        "dtype": args.dtype,
        "moments": args.moments,
        "master_weights": args.master_weights,
        "seed": args.seed,
        "weights": hashlib.sha256(weights.encode()).hexdigest()[:16],
    }


def _passes(place: dict[str, Any]) -> float:
    """How many passes over the data a loader's state has behind it."""
    return float(place["epoch"] + (place["row"] / place["num_rows"] if "row" in place else 0))
