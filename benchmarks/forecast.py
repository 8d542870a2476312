"""What `bmtrain.plan` forecasts for every setting that was measured, beside the measurement.

python benchmarks/forecast.py [--out benchmarks/results/forecast] reads the records of this library
in benchmarks/results/, forecasts each from its settings alone, and writes JSON and a table. It
needs no GPU. A forecast sees the model, the settings and the machine; what was measured is put
beside it afterwards. Two constants of the plan are derived here, and a test compares them: what
torch's allocator keeps beyond what is allocated, and how far forecasts are too low.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import pathlib
import statistics
import subprocess
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from as_written import GEOMETRIES, TRANSFORMERS, Decoder, loss_of, of_transformers
from backends import fused_loss

import bmtrain.plan as bp
from bmtrain.plan.forecast import trace
from bmtrain.plan.step import Memory
from models import SHAPES, projected_cross_entropy

RESULTS = pathlib.Path(__file__).with_name("results")
FILES = (
    "13b-4gpu.json",
    "13b-two-gpus-2gpu.json",
    "13b-tp-4gpu.json",
    "2.7b-offload-1gpu.json",
    "gpt2-1gpu.json",
    "llama-8b-4gpu.json",
    "scaling-4gpu.json",
)
AS_WRITTEN = tuple(
    f"as-written-{name}.json"
    for name in (
        "1gpu",
        "2gpu",
        "scaling-4gpu",
        "bert-2gpu",
        "t5-2gpu",
        "scaling-1b-1gpu",
        "large-2gpu",
        "lora",
    )
)
# Measured before masks were given to torch's fast kernels: another suite has it as it is now.
OVERTAKEN = {("as-written-large-2gpu.json", "bert-large")}
# Measured for a change, once before and once after it.
CHANGES = ("right-or-refused.json", "spine.json", "whole-parameters.json")
# Their `allocated_gib` is of a moment without activations: 26.5 GiB of Llama-3-8B, whose blocks
# keep 54 GiB, with 103.6 reserved.
NO_PEAKS = ("13b-four-gpus.json", "llama-8b-four-gpus.json")
LARGE = 20.0  # GiB: below, a kept segment of torch's counts more than a share
# Measured before the memory of cleared gradients was freed in forward (commit f73b332).
OLDER = ("13b-two-gpus-2gpu.json", "13b-tp-4gpu.json", "2.7b-offload-1gpu.json")
# Measured before compiled heads ran in chunks of rows.
WHOLE_HEADS = FILES
GIB = 2**30
AIM = 0.05
RECOMPUTE = {"none": "nothing", "all": "block", "auto": "auto", False: "nothing", True: "block"}


@dataclasses.dataclass(frozen=True)
class Row:
    """A measured setting.

    gib: what was in use on the GPU, or where that was not recorded what torch had reserved.
    """

    file: str
    what: str
    record: dict[str, Any]
    measure: str
    gib: float


def rows() -> list[Row]:
    """Of all files: medians where a setting was measured several times."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for name in FILES:
        for record in json.loads((RESULTS / name).read_text())["records"]:
            # A run below a limit of its own plans with peaks that it measures.
            limited = record.get("memory_limit") or "failure" in record
            # What recorded functions is gone.
            other = record.get("fp8") or record.get("cuda_graph")
            if record["backend"] == "bmtrain" and not limited and not other:
                found.setdefault((name, described(record)), []).append(record)
    out = []
    for (name, what), records in found.items():
        measure = "device_gib" if "device_gib" in records[0] else "reserved_gib"
        sizes = statistics.median(record[measure] for record in records)
        out.append(Row(name, what, records[0], measure, sizes))
    return out


def described(record: dict[str, Any]) -> str:
    """A setting in words."""
    flags = [name.replace("_", " ") for name in ("offload", "fused_head") if record.get(name)]
    flags += [f"recompute {RECOMPUTE[record['recompute']]}"]
    flags += [f"tp {record['tp']}"] if record.get("tp", 1) > 1 else []
    size = f"{record['gpus']} x {record['batch']} x {record['seq']}"
    return f"{record['shape']}, {size}: {', '.join(flags)}"


class Kept(Memory):
    """The memory of versions that kept the memory of gradients from step to step."""

    def gradients_behind(self, gone: int, *, is_forward: bool) -> int:
        return self.gradients


def whole_cross_entropy(
    hidden: torch.Tensor, project: torch.nn.Linear, targets: torch.Tensor
) -> torch.Tensor:
    """The loss as torch computes it, in words that the compiler's rewriting leaves alone."""
    logits = project(hidden).float()
    return F.nll_loss(F.log_softmax(logits, -1), targets)


@functools.cache
def source_of(shape: str, fused: bool, whole: bool) -> bp.Source:
    """A model of benchmarks/models.py, in blocks as benchmarks/backends.py makes them.

    Args:
        fused: by FusedLinearCrossEntropy.
        whole: of WHOLE_HEADS.
    """
    geometry = SHAPES[shape]

    def loss(model: torch.nn.Module, batch: int, seq: int) -> torch.Tensor:
        ids, targets = (torch.zeros(batch, seq, dtype=torch.long) for _ in range(2))
        out: torch.Tensor = model(ids, targets)
        return out

    head = fused_loss() if fused else whole_cross_entropy if whole else projected_cross_entropy
    return bp.Source(
        name=shape, build=functools.partial(geometry.model, head), loss=loss, blocks=("head",)
    )


def forecast(row: Row) -> dict[str, Any]:
    """The forecast and the measurement of a row."""
    record = row.record
    settings = bp.Settings(
        batch=record["batch"],
        seq=record["seq"],
        zero_level=record.get("zero_level", 3),
        tp_size=record.get("tp", 1),
        recompute=RECOMPUTE[record["recompute"]],
        optimizer="offload" if record["offload"] else "adam",
        compiled=record["compile"],
    )
    machine = bp.Machine(gpu="h200", gpus=record["gpus"])
    fused, whole = record.get("fused_head", False), row.file in WHOLE_HEADS
    # Measured in blocks, however small.
    traced = trace(source_of(record["shape"], fused, whole), settings, machine)
    traced = dataclasses.replace(traced, whole=None)
    memory = Kept if row.file in OLDER else Memory
    found = bp.Forecast.of(memory(traced, settings, machine))
    parts = dict(found.peak.parts)
    if row.measure == "reserved_gib":
        # These runs kept shards in torch's allocator: all but what is outside of it.
        parts = {k: v for k, v in parts.items() if k not in ("CUDA context", "communication")}
    gib = sum(parts.values()) / GIB
    return {
        "file": row.file,
        "setting": row.what,
        "measure": row.measure,
        "forecast_gib": round(gib, 1),
        "measured_gib": row.gib,
        "difference": round(gib / row.gib - 1, 4),
        "peak_at": found.peak.name,
        "recompute": found.recompute,
        "parts_gib": {name: round(size / GIB, 2) for name, size in parts.items()},
    }


def as_written() -> Iterator[dict[str, Any]]:
    """The forecasts and measurements of AS_WRITTEN: of what torch allocated."""
    for file in AS_WRITTEN:
        for record in json.loads((RESULTS / file).read_text())["records"]:
            is_known = record["backend"] == "ours" and record.get("peak_gib")
            is_other = record.get("padded") or (file, record["model"]) in OVERTAKEN
            if is_known and not is_other:
                yield written(file, record)


def written(file: str, record: dict[str, Any]) -> dict[str, Any]:
    """The same of a record."""
    name, rows = record["model"], record["rows"]
    own = GEOMETRIES.get(name)

    def loss(model: torch.nn.Module, batch: int, seq: int) -> torch.Tensor:
        ids = torch.zeros(batch, seq, dtype=torch.long)
        return loss_of(model(input_ids=ids, labels=ids))

    make: Any = functools.partial(of_transformers, name, recomputes=False)
    source = bp.Source(
        name=name, build=make if own is None else functools.partial(Decoder, own), loss=loss
    )
    seq = TRANSFORMERS[name] if own is None else own.seq
    settings = bp.Settings(batch=rows, seq=seq)
    machine = bp.Machine(gpu="h200", gpus=record["gpus"])
    memory = Memory(trace(source, settings, machine), settings, machine)
    found = bp.Forecast.of(memory)
    beside = ("CUDA context", "communication", "allocator's slack")
    parts = {k: v for k, v in found.peak.parts.items() if k not in beside}
    gib = (sum(parts.values()) - memory.shared) / GIB
    return {
        "file": file,
        "setting": f"{name}, {record['gpus']} x {rows} x {seq}: as written",
        "measure": "peak_gib",
        "forecast_gib": round(gib, 1),
        "measured_gib": record["peak_gib"],
        "difference": round(gib / record["peak_gib"] - 1, 4),
        "peak_at": found.peak.name,
        "recompute": found.recompute,
        "notes": found.notes,
        "parts_gib": {name: round(size / GIB, 2) for name, size in parts.items()},
    }


def allocator() -> dict[str, Any]:
    """What torch had reserved beyond what was allocated at most, of all settings of this library:
    as a share of large ones, in GiB of small ones.
    """
    found: dict[tuple[Any, ...], list[tuple[float, float]]] = {}
    for path in sorted(
        set(RESULTS.glob("*.json")) - {RESULTS / name for name in (*CHANGES, *NO_PEAKS)}
    ):
        content = json.loads(path.read_text())
        for record in content.get("records", ()) if isinstance(content, dict) else ():
            allocated = record.get("allocated_gib", record.get("peak_gib"))
            is_ours = record.get("backend") in ("bmtrain", "ours") and "reserved_gib" in record
            if is_ours and allocated and not (record.get("cuda_graph") or record.get("fp8")):
                what = ("shape", "model", "gpus", "batch", "rows", "recompute", "offload", "tp")
                key = (path.name, *(record.get(name) for name in (*what, "memory_limit")))
                found.setdefault(key, []).append((allocated, record["reserved_gib"]))
    pairs = [tuple(map(statistics.median, zip(*runs, strict=True))) for runs in found.values()]
    shares = [reserved / used - 1 for used, reserved in pairs if used >= LARGE]
    small = [reserved - used for used, reserved in pairs if used < LARGE]
    return {
        "settings": len(pairs),
        "median_share": round(statistics.median(shares), 3),
        "nine_of_ten_below": round(statistics.quantiles(shares, n=10)[-1], 3),
        "median_gib_of_small": round(statistics.median(small), 1),
    }


def constants(found: list[dict[str, Any]]) -> dict[str, Any]:
    """What the plan takes from measurements: what torch's allocator keeps, and the margin that nine
    of ten runs stay within, by what it keeps or by what forecasts were too low.

    A run that fills the GPU ("auto") says nothing of a forecast.
    """
    over = [
        row["measured_gib"] / row["forecast_gib"] - 1
        for row in found
        if set(row["recompute"]) == {"nothing"}
    ]
    kept = allocator()
    spread = (1 + kept["nine_of_ten_below"]) / (1 + kept["median_share"]) - 1
    too_low = statistics.quantiles(over, n=10)[-1]
    return {
        "allocator": kept,
        "nine_of_ten_too_low_by": round(too_low, 3),
        "margin": round(max(too_low, spread), 3),
    }


MEASURES = {"device_gib": "GPU in use", "reserved_gib": "reserved", "peak_gib": "allocated"}


def table(found: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "| setting | source | measured as | forecast, GiB | measured, GiB | difference |",
        "|---|---|---|---|---|---|",
    ]
    for row in found:
        name = MEASURES[row["measure"]]
        name += ", gradients kept" if row["file"] in OLDER else ""
        lines.append(
            f"| {row['setting']} | `{row['file']}` | {name} | {row['forecast_gib']} | "
            f"{row['measured_gib']} | {row['difference']:+.1%} |"
        )
    within = sum(abs(row["difference"]) <= AIM for row in found)
    lines += ["", f"{within} of {len(found)} settings within {AIM:.0%} of the measured memory."]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS / "forecast")
    parser.add_argument("--only", default="", help="of settings with these words alone")
    args = parser.parse_args()
    forecasts = [(f"{row.file} {row.what}", functools.partial(forecast, row)) for row in rows()]
    found = []
    makers: list[tuple[str, Any]] = [*forecasts, ("as-written", as_written)]
    for what, make in makers:
        if args.only in what:
            made = make()
            for one in [made] if isinstance(made, dict) else made:
                found.append(one)
                print(json.dumps({k: v for k, v in one.items() if k != "parts_gib"}), flush=True)
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if args.only and args.out.with_suffix(".json").exists():  # the others' stay
        before = json.loads(args.out.with_suffix(".json").read_text())["records"]
        known = {(one["file"], one["setting"]) for one in found}
        found = [one for one in before if (one["file"], one["setting"]) not in known] + found
    record = {"commit": commit, "torch": torch.__version__, **constants(found), "records": found}
    args.out.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    args.out.with_suffix(".md").write_text(table(found))
    print(table(found))


if __name__ == "__main__":
    main()
