"""The record of a run: a JSON object per line, one for each step and one for each evaluation.

Beside it lies `metrics.fields.json`: the unit and the meaning of each field.
"""

from __future__ import annotations

import json
import pathlib
import shutil
from typing import Any

from bmtrain.checkpoint.writer import flush_to_disk
from bmtrain.runtime import log
from model_center.weights.staging import write_whole

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
    "unpadded_tokens_per_second": ("tokens/s", "of all ranks together, without padding"),
    "tokens": ("tokens", "up to this step, of all ranks, without padding"),
    "loss_tokens": ("tokens", "those of them that the loss is of"),
    "memory": ("bytes", "peak so far of rank 0's GPU; on a CPU of its process"),
    "seconds": ("s", "from the beginning of the step to its end"),
    "mfu": ("1", "share of the devices' peak FLOP/s that the model's products take, 0 to 1"),
    "skipped": ("1", "true for a step that was skipped; not there for others"),
    "validation_loss": ("nats per token", "mean over the held-out text"),
    "perplexity": ("1", "exp of validation_loss"),
    "bits_per_byte": ("bits/byte", "of the held-out texts, their ends included, in UTF-8"),
    "epoch": ("1", "number of the pass over the data, from 0 on"),
}
# what two runs that learn the same need not share
MEASURED = frozenset(
    {"time", "tokens_per_second", "unpadded_tokens_per_second", "memory", "seconds", "mfu"}
)


class MetricsFile:
    """A JSONL file with one record per step and per evaluation. One process writes it.

    A run that goes on from a checkpoint takes back what was written of later steps, and what it
    measures again takes the place of what was there, so that nothing is there twice. Lines that
    cannot be read are left out; the file as it was stays beside, as `metrics.jsonl.damaged`.

    Args:
        path: of the file; its folder is made. One beside it, `.fields.json`, has the units of all
            fields.
        last_step: of the earlier part of the run.

    Raises:
        OSError: if the file cannot be read or written.
    """

    def __init__(self, path: pathlib.Path, last_step: int) -> None:
        self.path = path
        self._waiting: list[Record] = []  # what could not be written yet
        path.parent.mkdir(parents=True, exist_ok=True)
        found, damaged = _read(path)
        if damaged:
            shutil.copyfile(path, f"{path}.damaged")
            log.warn(f"{path}: {damaged} lines cannot be read; the file is kept as {path}.damaged.")
        kept = [record for record in found if record["step"] <= last_step]
        # measured after the last step: it may come again
        self._again = {_kind(record) for record in kept if record["step"] == last_step}
        self._write(kept)
        fields = {name: {"unit": unit, "is": text} for name, (unit, text) in FIELDS.items()}
        text = json.dumps({"format": FORMAT, "fields": fields}, indent=1)
        write_whole(path.with_suffix(".fields.json"), f"{text}\n")

    def add(self, record: Record) -> None:
        """Append a record, and those before it that could not be written.

        Raises:
            OSError: if it cannot be written now: the next call tries it again.
        """
        self._waiting.append(record)
        again = self._again.intersection(map(_kind, self._waiting))
        if again:
            self._write([one for one in read_metrics(self.path) if _kind(one) not in again])
            self._again -= again
        text = "".join(json.dumps(one, default=_plain) + "\n" for one in self._waiting).encode()
        with self.path.open("ab", buffering=0) as file:
            size = file.tell()
            try:
                while text:
                    text = text[file.write(text) :]
            except OSError:
                file.truncate(size)  # no half of a line
                raise
        self._waiting = []

    def to_disk(self) -> None:
        """Wait until all that was added is on the disk."""
        flush_to_disk(self.path)

    def _write(self, records: list[Record]) -> None:
        write_whole(self.path, "".join(json.dumps(record) + "\n" for record in records))


def read_metrics(path: pathlib.Path) -> list[Record]:
    """All records; lines that cannot be read are passed over, as a killed run leaves them."""
    return _read(path)[0]


def _read(path: pathlib.Path) -> tuple[list[Record], int]:
    """All records, and the number of lines that hold none, but for a last one without an end."""
    records: list[Record] = []
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    damaged = 0
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            records.append({**record, "step": int(record["step"])})
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            damaged += bool(line.strip()) and number < len(lines)
    return records, damaged


def _kind(record: Record) -> tuple[Any, ...]:
    """The step, and what was measured: names, and texts that tell data sets from each other."""
    return tuple(
        (name, value if name == "step" or isinstance(value, str) else None)
        for name, value in sorted(record.items())
        if name != "time"
    )


def _plain(value: Any) -> float | str:
    """A number of another type, a tensor's for example, as one of Python's; else its text."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return str(value)
