"""What a run shows and leaves behind: progress, metrics file, loss curve. Only rank 0 makes one that does anything."""

from __future__ import annotations

import dataclasses
import json
import resource
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from checkpointing import write_whole


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepReport:
    """One optimizer step.

    loss: mean cross-entropy per token over all ranks and micro-batches, nats.
    grad_norm: of the whole model before clipping.
    lr, loss_scale: those used in this step; a scale of 1 where there is none.
    tokens_per_second: of all ranks together.
    memory: peak bytes of rank 0, on its device (on a CPU: of its process).
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    loss_scale: float
    tokens_per_second: float
    memory: int


class Metrics:
    """A JSONL file with one record per step and per validation.

    A run that goes on from a checkpoint first takes back what was written after it: no step is there twice.
    """

    def __init__(self, path: Path, last_step: int) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [record for record in read_metrics(path) if record["step"] <= last_step]
        write_whole(path, "".join(json.dumps(record) + "\n" for record in kept))

    def add(self, record: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All records; a last line that a killed run left half-written is passed over."""
    records: list[dict[str, Any]] = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records


class Report:
    """Progress on a terminal, plain lines every `log_every` steps elsewhere, nothing where not `enabled`."""

    def __init__(self, folder: Path, *, first_step: int, num_steps: int, log_every: int, enabled: bool) -> None:
        self.folder = folder
        self.first_step = first_step
        self.num_steps = num_steps
        self.log_every = log_every
        self.enabled = enabled
        self.started = time.monotonic()
        self.console = Console(highlight=False, soft_wrap=True)
        self.terminal = enabled and self.console.is_terminal
        self.metrics = Metrics(folder / "metrics.jsonl", first_step) if enabled else None
        # The bar comes last: what does not fit into a narrow terminal is cut off.
        columns = (MofNCompleteColumn(), TextColumn("{task.description}"), BarColumn(bar_width=20))
        self.bar = Progress(*columns, console=self.console, disable=not self.terminal)
        self.task = self.bar.add_task("", total=num_steps, completed=first_step)

    def __enter__(self) -> Report:
        self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.bar.stop()

    def step(self, report: StepReport) -> None:
        """Show and record one step."""
        if self.metrics is None:
            return
        self.metrics.add(dataclasses.asdict(report))
        speed = f"{report.tokens_per_second:,.0f} tokens/s  {report.memory / 2**30:.2f} GiB"
        words = f"loss {report.loss:.4f}  grad norm {report.grad_norm:.2f}  {speed}  {self._time_left(report.step)} left"
        self.bar.update(self.task, completed=report.step, description=words)
        last = report.step == self.num_steps
        if not self.terminal and (report.step % self.log_every == 0 or last or report.step == self.first_step + 1):
            self.say(f"step {report.step:>5}/{self.num_steps}  {words}")

    def validation(self, step: int, loss: float) -> None:
        """Show and record the loss on the held-out text (nats per token)."""
        if self.metrics is not None:
            self.metrics.add({"step": step, "validation_loss": loss})
            self.say(f"step {step:>5}/{self.num_steps}  validation loss {loss:.4f}")

    def sample(self, step: int, text: str) -> None:
        """Show and keep what the model writes."""
        if self.enabled:
            with (self.folder / "samples.txt").open("a") as file:
                file.write(f"=== after step {step}\n{text}\n")
            self.say(f"--- the model writes, after step {step}:\n{text}\n---")

    def say(self, text: str) -> None:
        """A line for the user."""
        if self.enabled:
            self.console.print(text, markup=False)
            sys.stdout.flush()

    def draw(self) -> None:
        """Draw the loss curve of the whole run."""
        if self.enabled:
            draw_losses(read_metrics(self.folder / "metrics.jsonl"), self.folder / "loss.png")

    def _time_left(self, step: int) -> str:
        seconds = int((time.monotonic() - self.started) / (step - self.first_step) * (self.num_steps - step))
        hours, minutes = divmod(seconds // 60, 60)
        return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{seconds % 60:02d}s"


def draw_losses(records: list[dict[str, Any]], path: Path) -> None:
    """Write a picture of training and validation loss against steps."""
    training = [(record["step"], record["loss"]) for record in records if "loss" in record]
    held_out = [(record["step"], record["validation_loss"]) for record in records if "validation_loss" in record]
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)  # needs no display
    axes = figure.add_subplot()
    for points, label, style in ((training, "training", "-"), (held_out, "held-out text", "o-")):
        if points:
            steps, losses = zip(*points, strict=True)
            axes.plot(steps, losses, style, label=label, linewidth=1)
    axes.set(xlabel="step", ylabel="cross-entropy per token, nats", title="GPT-2 trained by bmtrain")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def peak_memory(device: torch.device) -> int:
    """Bytes: the most this process has held on its GPU, or resident where it computes on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
