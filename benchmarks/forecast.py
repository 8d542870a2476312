"""What `bmtrain.plan` forecasts for every setting that was measured, beside the measurement.

python benchmarks/forecast.py [--out benchmarks/results/forecast] reads the records of this library
in benchmarks/results/, forecasts each from its settings alone, and writes JSON and a table. It
needs no GPU. A forecast sees the model, the settings and the machine; what was measured is put
beside it afterwards.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import pathlib
import statistics
import subprocess
from typing import Any

import torch
import torch.nn.functional as F
from as_written import TRANSFORMERS, loss_of, of_transformers
from backends import fused_loss

import model_center.plan as bp
from model_center.plan.forecast import trace
from model_center.plan.step import Memory
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
LORA = "as-written-lora.json"  # of Llama-3-8B of transformers
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
            if record["backend"] == "bmtrain" and not limited and not record.get("fp8"):
                found.setdefault((name, described(record)), []).append(record)
    out = []
    for (name, what), records in found.items():
        measure = "device_gib" if "device_gib" in records[0] else "reserved_gib"
        sizes = statistics.median(record[measure] for record in records)
        out.append(Row(name, what, records[0], measure, sizes))
    return out


def described(record: dict[str, Any]) -> str:
    """A setting in words."""
    flags = [
        name.replace("_", " ")
        for name in ("offload", "cuda_graph", "fused_head")
        if record.get(name)
    ]
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
    traced = trace(source_of(record["shape"], fused, whole), settings)
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


def adapted() -> list[dict[str, Any]]:
    """The forecasts and measurements of LORA: of what torch allocated."""
    out = []
    for record in json.loads((RESULTS / LORA).read_text())["records"]:
        if record["backend"] != "ours":
            continue
        name, rows = record["model"], record["rows"]

        def loss(model: torch.nn.Module, batch: int, seq: int) -> torch.Tensor:
            ids = torch.zeros(batch, seq, dtype=torch.long)
            return loss_of(model(input_ids=ids, labels=ids))

        source = bp.Source(
            name=name, build=functools.partial(of_transformers, name, recomputes=False), loss=loss
        )
        settings = bp.Settings(batch=rows, seq=TRANSFORMERS[name], recompute="nothing")
        machine = bp.Machine(gpu="h200", gpus=record["gpus"])
        found = bp.Forecast.of(Memory(trace(source, settings), settings, machine))
        beside = ("CUDA context", "communication", "allocator's slack")
        parts = {k: v for k, v in found.peak.parts.items() if k not in beside}
        gib = sum(parts.values()) / GIB
        out.append(
            {
                "file": LORA,
                "setting": f"{name}, {record['gpus']} x {rows} x {settings.seq}",
                "measure": "peak_gib",
                "forecast_gib": round(gib, 1),
                "measured_gib": record["peak_gib"],
                "difference": round(gib / record["peak_gib"] - 1, 4),
                "peak_at": found.peak.name,
                "recompute": found.recompute,
                "parts_gib": {name: round(size / GIB, 2) for name, size in parts.items()},
            }
        )
    return out


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
    makers: list[tuple[str, Any]] = [*forecasts, (LORA, adapted)]
    for what, make in makers:
        if args.only in what:
            made = make()
            found += made if isinstance(made, list) else [made]
            print(json.dumps({k: v for k, v in found[-1].items() if k != "parts_gib"}), flush=True)
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if args.only and args.out.with_suffix(".json").exists():  # the others' stay
        before = json.loads(args.out.with_suffix(".json").read_text())["records"]
        known = {(one["file"], one["setting"]) for one in found}
        found = [one for one in before if (one["file"], one["setting"]) not in known] + found
    record = {"commit": commit, "torch": torch.__version__, "records": found}
    args.out.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    args.out.with_suffix(".md").write_text(table(found))
    print(table(found))


if __name__ == "__main__":
    main()
