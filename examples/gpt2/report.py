"""What a run shows and leaves behind: the log of every run, and text samples and the loss curve of
this one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from model_center.training.metrics_file import read_metrics
from model_center.training.run_log import METRICS, RunLog


class Report(RunLog):
    """The run's log, and what rank 0 adds to it in `folder`."""

    def __init__(self, folder: Path, *, first_step: int, num_steps: int, log_every: int) -> None:
        super().__init__(folder, first_step=first_step, num_steps=num_steps, log_every=log_every)
        self.folder = folder

    def sample(self, step: int, text: str) -> None:
        """Show and keep what the model writes."""
        if self.enabled:
            with (self.folder / "samples.txt").open("a") as file:
                file.write(f"=== after step {step}\n{text}\n")
            self.say(f"--- the model writes, after step {step}:\n{text}\n---")

    def draw(self) -> None:
        """Draw the loss curve of the whole run."""
        if self.enabled:
            draw_losses(read_metrics(self.folder / METRICS), self.folder / "loss.png")


def draw_losses(records: list[dict[str, Any]], path: Path) -> None:
    """Write a picture of training and validation loss against steps."""
    training = [(record["step"], record["loss"]) for record in records if "loss" in record]
    held_out = [
        (record["step"], record["validation_loss"])
        for record in records
        if "validation_loss" in record
    ]
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)  # needs no display
    axes = figure.add_subplot()
    for points, label, style in ((training, "training", "-"), (held_out, "held-out text", "o-")):
        if points:
            steps, losses = zip(*points, strict=True)
            axes.plot(steps, losses, style, label=label, linewidth=1)
    axes.set(
        xlabel="step", ylabel="cross-entropy per token, nats", title="GPT-2 trained by bmtrain"
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
