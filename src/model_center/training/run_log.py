"""What a run shows and keeps: progress, a file of metrics, curves."""

from __future__ import annotations

import dataclasses
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

import bmtrain as bmt
from model_center.training.curves import Curves, TensorBoard, Wandb
from model_center.training.metrics_file import MetricsFile, Record

METRICS = "metrics.jsonl"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepReport:
    """One optimizer step.

    Attributes:
        step: its number, from 1 on.
        loss: what was minimised, a mean over all ranks and micro-batches.
        grad_norm: of the whole model before clipping.
        lr, loss_scale: those used in this step; a scale of 1 where there is none.
        tokens_per_second: of all ranks together.
        memory: peak bytes of rank 0, on its device (on a CPU: of its process).
        mfu: model FLOPs utilisation, 0 to 1; None where it is not known.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    loss_scale: float
    tokens_per_second: float
    memory: int
    mfu: float | None = None


class RunLog:
    """Progress on a terminal, elsewhere lines every `log_every` steps; on rank 0 only.

    Args:
        folder: where `metrics.jsonl` and the curves go; None to keep nothing.
        first_step: the last step done before.
        num_steps: the step that the run ends with.
        log_every: steps between plain lines.
        is_kept: which records of an earlier part of the run stay; by default those up to
            `first_step`.
        tensorboard: whether to write for TensorBoard too.
        wandb: the project in Weights & Biases to send to; None for none.

    Raises:
        ConfigError: for curves whose package is missing.
    """

    def __init__(
        self,
        folder: pathlib.Path | None,
        *,
        first_step: int,
        num_steps: int,
        log_every: int,
        is_kept: Callable[[Record], bool] | None = None,
        tensorboard: bool = False,
        wandb: str | None = None,
    ) -> None:
        self.enabled = bmt.rank() == 0
        self.first_step = first_step
        self.num_steps = num_steps
        self.log_every = log_every
        self.console = Console(highlight=False, soft_wrap=True)
        self.terminal = self.enabled and self.console.is_terminal
        kept = is_kept or (lambda record: record["step"] <= first_step)
        self.metrics = (
            MetricsFile(folder / METRICS, kept) if self.enabled and folder is not None else None
        )
        self.curves: list[Curves] = []
        if self.enabled and folder is not None and tensorboard:
            self.curves.append(TensorBoard(folder, first_step))
        if self.enabled and folder is not None and wandb is not None:
            self.curves.append(Wandb(folder, wandb))
        self._started = time.monotonic()
        # The bar comes last: what does not fit into a narrow terminal is cut off.
        columns = (MofNCompleteColumn(), TextColumn("{task.description}"), BarColumn(bar_width=20))
        self._bar = Progress(*columns, console=self.console, disable=not self.terminal)
        self._task = self._bar.add_task("", total=num_steps, completed=first_step)

    def __enter__(self) -> RunLog:
        self._bar.start()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._bar.stop()
        for curves in self.curves:
            curves.close()

    def step(self, report: StepReport) -> None:
        """Show and record one step."""
        if not self.enabled:
            return
        values = dataclasses.asdict(report)
        self._keep({name: value for name, value in values.items() if value is not None})
        speed = f"{report.tokens_per_second:,.0f} tokens/s  {report.memory / 2**30:.2f} GiB"
        speed += "" if report.mfu is None else f"  MFU {report.mfu:.1%}"
        words = (
            f"loss {report.loss:.4f}  grad norm {report.grad_norm:.2f}  {speed}  "
            f"{self._time_left(report.step)} left"
        )
        self._bar.update(self._task, completed=report.step, description=words)
        last = report.step == self.num_steps
        if not self.terminal and (
            report.step % self.log_every == 0 or last or report.step == self.first_step + 1
        ):
            self.say(f"step {report.step:>5}/{self.num_steps}  {words}")

    def record(self, step: int, **values: Any) -> None:
        """Show and record what was found out after a step."""
        if self.enabled:
            self._keep({"step": step, **values})
            words = "  ".join(f"{_words(name)} {_number(value)}" for name, value in values.items())
            self.say(f"step {step:>5}/{self.num_steps}  {words}")

    def say(self, text: str) -> None:
        """A line for the user."""
        if self.enabled:
            self.console.print(text, markup=False)
            sys.stdout.flush()

    def _keep(self, record: Record) -> None:
        if self.metrics is not None:
            self.metrics.add(record)
        values = {name: value for name, value in record.items() if name != "step"}
        for curves in self.curves:
            curves.add(record["step"], values)

    def _time_left(self, step: int) -> str:
        seconds = int(
            (time.monotonic() - self._started)
            / (step - self.first_step)
            * max(self.num_steps - step, 0)
        )
        hours, minutes = divmod(seconds // 60, 60)
        return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{seconds % 60:02d}s"


def _words(name: str) -> str:
    return name.replace("_", " ")


def _number(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)
