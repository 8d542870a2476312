"""What a run shows and leaves behind: the log of every run, and text samples and curves of this
one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from model_center.training.metrics_file import read_metrics
from model_center.training.plots import draw_runs
from model_center.training.run_log import METRICS, RunLog
from model_center.weights.staging import write_whole

SAMPLES, CURVES = "samples.txt", "curves.png"


class Report(RunLog):
    """The run's log, and what rank 0 adds to it in `folder`."""

    def __init__(
        self,
        folder: Path,
        *,
        first_step: int,
        num_steps: int,
        log_every: int,
        curves: Sequence[str] = (),
    ) -> None:
        super().__init__(
            folder, first_step=first_step, num_steps=num_steps, log_every=log_every, curves=curves
        )
        self.folder = folder
        if self.enabled:
            keep_samples(folder / SAMPLES, first_step)

    def sample(self, step: int, text: str) -> None:
        """Show and keep what the model writes."""

        def keep() -> None:
            keep_samples(self.folder / SAMPLES, step - 1)
            with (self.folder / SAMPLES).open("a", encoding="utf-8") as file:
                file.write(f"=== after step {step}\n{text}\n")

        if self.enabled:
            self.write_or_warn(SAMPLES, keep)
            self.message(f"--- the model writes, after step {step}:\n{text}\n---")

    def draw(self) -> None:
        """Draw the curves of the whole run."""

        def draw() -> None:
            records = read_metrics(self.folder / METRICS)
            draw_runs({str(self.folder): records}, self.folder / CURVES)

        if self.enabled:
            self.write_or_warn(CURVES, draw)


def keep_samples(path: Path, last_step: int) -> None:
    """Take back what was written after a step."""
    if path.exists():
        parts = re.split(r"^(?==== after step \d+$)", path.read_text("utf-8"), flags=re.MULTILINE)
        steps = [re.match(r"=== after step (\d+)", part) for part in parts]
        kept = [
            part
            for part, found in zip(parts, steps, strict=True)
            if found and int(found[1]) <= last_step
        ]
        write_whole(path, "".join(kept))
