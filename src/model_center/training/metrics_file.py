"""The record of a run: a JSON object per line, one for each step and one for each evaluation.

Beside it lies `metrics.fields.json`: the unit and the meaning of each field.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

from model_center.training.files import write_whole

Record = dict[str, Any]

FORMAT = 1  # of the file of fields: raised when a field that is there changes its meaning
# unit and meaning of what the library writes; a number without a unit has "1"
FIELDS = {
    "step": ("1", "number of the optimizer step, from 1 on"),
    "time": ("ISO 8601, UTC", "when the record was written"),
    "loss": ("nats per token, if it is a cross-entropy", "mean of all ranks and micro-batches"),
    "grad_norm": ("1", "2-norm of all gradients before clipping"),
    "lr": ("1", "learning rate of the first group of parameters in this step"),
    "loss_scale": ("1", "what the loss was multiplied by; 1 for nothing"),
    "tokens_per_second": ("tokens/s", "of all ranks together, padding included"),
    "memory": ("bytes", "peak so far of rank 0's GPU; on a CPU of its process"),
    "seconds": ("s", "from the beginning of the step to its end"),
    "mfu": ("1", "share of the devices' peak FLOP/s that the model's products take, 0 to 1"),
    "skipped": ("1", "true for a step that was skipped; not there for others"),
    "validation_loss": ("nats per token", "mean over the held-out text"),
    "perplexity": ("1", "exp of validation_loss"),
    "epoch": ("1", "number of the pass over the data, from 0 on"),
}
# what two runs that learn the same need not share
MEASURED = frozenset({"time", "tokens_per_second", "memory", "seconds", "mfu"})


class MetricsFile:
    """A JSONL file with one record per step and per evaluation. One process writes it.

    A run that goes on from a checkpoint takes back what was written after it, so that no step is
    there twice.

    Args:
        path: of the file; its folder is made. `fields_path` of it has the units of all fields.
        is_kept: whether a record of an earlier part of the run stays.
    """

    def __init__(self, path: pathlib.Path, is_kept: Callable[[Record], bool]) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(
            path,
            "".join(json.dumps(record) + "\n" for record in read_metrics(path) if is_kept(record)),
        )
        fields = {name: {"unit": unit, "is": text} for name, (unit, text) in FIELDS.items()}
        text = json.dumps({"format": FORMAT, "fields": fields}, indent=1)
        write_whole(fields_path(path), f"{text}\n")

    def add(self, record: Record) -> None:
        """Append a record."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def fields_path(path: pathlib.Path) -> pathlib.Path:
    """The file that describes the fields of the metrics in `path`."""
    return path.with_suffix(".fields.json")


def read_metrics(path: pathlib.Path) -> list[Record]:
    """All records; lines that a killed run left half-written are passed over."""
    records: list[Record] = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records
