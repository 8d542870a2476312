"""What a run shows and keeps: progress, a file of metrics, curves."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import os
import pathlib
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

import bmtrain as bmt
from bmtrain.errors import printable
from bmtrain.runtime.process import say
from model_center.training.curves import Curves, open_curves
from model_center.training.metrics_file import MetricsFile, Record

OnStep: TypeAlias = Callable[[dict[str, Any]], object]


class Listener:
    """Hands figures of a run to a callable, and goes on whatever that raises.

    Args:
        call: gets a dict of names and numbers, "step" among them, on every rank: after each step
            loss, gradient norm, learning rate, tokens a second and memory of this rank, as
            `StepReport` has them; after a measurement what was measured, "validation_loss" for
            example. None for nobody.
    """

    def __init__(self, call: OnStep | None = None) -> None:
        self._call = call
        self._has_warned = False

    def receive(self, values: Mapping[str, Any]) -> None:
        """Hand them on, without those that are None. The first error is told as a warning."""
        if self._call is None:
            return
        try:
            self._call({name: value for name, value in values.items() if value is not None})
        except Exception as error:  # whose program it is, training is not its victim
            if not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    f"{self._call!r}, which is told of each step, has raised {error!r}. The run "
                    "continues; its later errors are not reported.",
                    UserWarning,
                    stacklevel=2,
                )


METRICS, OUTPUT = "metrics.jsonl", "standard output"
COLUMNS = (
    "columns: step, mean loss of all ranks, learning rate, norm of the gradient before clipping, "
    "tokens/s of all ranks, {mfu}time per step, peak memory of rank 0, time left"
)


class _Console(Console):
    """Goes on where nobody reads any more; rich's own ends the program, and says nothing."""

    def on_broken_pipe(self) -> None:
        """Write into nothing from now on."""
        self.write_into_nothing()
        raise OSError("nobody reads it any more")

    def write_into_nothing(self) -> None:
        """Else Python would end with an error, by what it writes last."""
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepReport:
    """One optimizer step. `metrics_file.FIELDS` says what is written of it, with units.

    Attributes:
        step: its number, from 1 on.
        loss: what was minimised, a mean over all ranks and micro-batches.
        grad_norm: of the whole model before clipping.
        lr, loss_scale: those used in this step; a scale of 1 where there is none.
        tokens_per_second: of all ranks together.
        memory: peak bytes of rank 0, on its device (on a CPU: of its process).
        seconds: from the beginning of the step to its end; None where it was not measured.
        mfu: model FLOPs utilisation, 0 to 1; None where it is not known.
        skipped: True for a step that was skipped, else None.
        epoch: the pass over the data, from 0 on.
        unpadded_tokens_per_second: as `tokens_per_second`, of tokens that are no padding.
        tokens, loss_tokens: up to this step without padding, and those that the loss is of; None
            for batches that do not say.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    loss_scale: float
    tokens_per_second: float
    memory: int
    seconds: float | None = None
    mfu: float | None = None
    skipped: bool | None = None
    epoch: int | None = None
    unpadded_tokens_per_second: float | None = None
    tokens: int | None = None
    loss_tokens: int | None = None


class RunLog:
    """Progress on a terminal, elsewhere lines every `log_every` steps; on rank 0 only.

    Args:
        folder: where `metrics.jsonl`, `metrics.fields.json` and the curves go; None to keep
            nothing.
        first_step: the last step done before.
        num_steps: the step that the run ends with.
        log_every: steps between plain lines.
        curves: where curves go too: "tensorboard", "wandb", "wandb:PROJECT".

    Raises:
        ConfigError: for curves of another name, or whose package is missing.
    """

    def __init__(
        self,
        folder: pathlib.Path | None,
        *,
        first_step: int,
        num_steps: int,
        log_every: int,
        curves: Sequence[str] = (),
    ) -> None:
        self.enabled = bmt.rank() == 0
        self.first_step = first_step
        self.num_steps = num_steps
        self.log_every = log_every
        self.console = _Console(highlight=False, soft_wrap=True)
        self._listener = Listener()
        self.terminal = self.enabled and self.console.is_terminal
        self._failed: set[str] = set()  # ways of telling
        self.metrics = (
            MetricsFile(folder / METRICS, first_step)
            if self.enabled and folder is not None
            else None
        )
        self.curves: list[Curves] = (
            open_curves(curves, folder, first_step) if self.enabled and folder is not None else []
        )
        self._started = time.monotonic()
        self._is_explained = False
        # The bar comes last: what does not fit into a narrow terminal is cut off.
        columns = (MofNCompleteColumn(), TextColumn("{task.description}"), BarColumn(bar_width=20))
        self._bar = Progress(*columns, console=self.console, disable=not self.terminal)
        self._task = self._bar.add_task("", total=num_steps, completed=first_step)

    def __enter__(self) -> RunLog:
        self.write_or_warn(OUTPUT, self._bar.start)
        return self

    def __exit__(self, *raised: Any) -> None:
        self.write_or_warn(OUTPUT, self._bar.stop)
        for curves in self.curves:
            self.write_or_warn(type(curves).__name__, curves.close)
        try:
            self.console.file.flush()
        except (OSError, ValueError):
            self.console.write_into_nothing()

    def with_listener(self, call: OnStep | None) -> RunLog:
        """Hand steps and records to a callable too, on every rank; see `Listener`. Returns self."""
        self._listener = Listener(call)
        return self

    def step(self, report: StepReport) -> None:
        """Show and record one step, the figures of `report`."""
        self._listener.receive(dataclasses.asdict(report))
        if not self.enabled:
            return
        if not self._is_explained:
            self._is_explained = True
            mfu = "" if report.mfu is None else "share of the device's peak (MFU), "
            self.message(COLUMNS.format(mfu=mfu))
        values = dataclasses.asdict(report)
        self._keep({name: value for name, value in values.items() if value is not None})
        words = "  ".join(
            [*_parts(report), f"{self._time_left(report.step)} left"]
            + (["SKIPPED"] if report.skipped else [])
        )
        self._bar.update(self._task, completed=report.step, description=words)
        last = report.step == self.num_steps
        if not self.terminal and (
            report.step % self.log_every == 0 or last or report.step == self.first_step + 1
        ):
            self._line(report.step, words)

    def record(self, step: int, **values: Any) -> None:
        """Show and record `values`, numbers measured after a step."""
        self._listener.receive({"step": step, **values})
        if self.enabled:
            self._keep({"step": step, **values})
            words = "  ".join(f"{_words(name)} {_number(value)}" for name, value in values.items())
            self._line(step, words)

    def to_disk(self) -> None:
        """Wait until the record is on the disk."""
        if self.metrics is not None:
            self.write_or_warn(str(self.metrics.path), self.metrics.to_disk)

    def message(self, text: str) -> None:
        """Print `text` on rank 0; letters that the terminal lacks, or would obey, are escaped."""
        if self.enabled:
            name = self.console.encoding
            text = printable(text).encode(name, "backslashreplace").decode(name)
            self.write_or_warn(OUTPUT, lambda: self.console.print(text, markup=False))

    def write_or_warn(self, what: str, deed: Callable[[], object]) -> None:
        """Do what tells others of the run: an error of it is told once, and ends nothing."""
        try:
            deed()
        except Exception as error:  # of files, packages, networks; training is not its victim
            if what not in self._failed:
                self._failed.add(what)
                text = (
                    f"{what} cannot be written ({type(error).__name__}: {error}): the run "
                    "continues."
                )
                say(f"{text}\n") if what == OUTPUT else self.message(text)

    def _line(self, step: int, words: str) -> None:
        now = datetime.datetime.now().strftime("%H:%M:%S")
        self.message(f"{now}  step {step:>5}/{self.num_steps}  {words}")

    def _keep(self, record: Record) -> None:
        metrics = self.metrics
        if metrics is not None:
            now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds")
            self.write_or_warn(str(metrics.path), lambda: metrics.add({**record, "time": now}))
        values = {name: value for name, value in record.items() if name != "step"}
        for curves in self.curves:
            point = functools.partial(curves.add, record["step"], values)
            self.write_or_warn(type(curves).__name__, point)

    def _time_left(self, step: int) -> str:
        seconds = int(
            (time.monotonic() - self._started)
            / (step - self.first_step)
            * max(self.num_steps - step, 0)
        )
        hours, minutes = divmod(seconds // 60, 60)
        return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{seconds % 60:02d}s"


def _parts(report: StepReport) -> list[str]:
    """What a line says of a step, in the order in which a narrow terminal cuts it off."""
    parts = [
        f"loss {report.loss:.4f}",
        f"lr {report.lr:.2e}",
        f"grad norm {report.grad_norm:.2f}",
        f"{report.tokens_per_second:,.0f} tokens/s",
    ]
    if report.unpadded_tokens_per_second is not None:
        parts[-1] += f" ({report.unpadded_tokens_per_second:,.0f} without padding)"
    if report.mfu is not None:
        parts.append(f"MFU {report.mfu:.1%}")
    if report.seconds is not None:
        parts.append(f"{_duration(report.seconds)}/step")
    return [*parts, f"{report.memory / 2**30:.2f} GiB"]


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"


def _words(name: str) -> str:
    return name.replace("_", " ")


def _number(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)
