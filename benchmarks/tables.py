"""Write the tables of `benchmarks/results/*.json` between the bench markers of the READMEs: python benchmarks/tables.py"""

from __future__ import annotations

import json
import pathlib
import statistics
from collections.abc import Sequence
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
BEGIN, END = "<!-- bench:start -->", "<!-- bench:end -->"
COLUMNS = ("backend", "model", "GPUs", "batch a GPU", "tokens/s a GPU", "MFU", "GiB reserved", "against ours")
STEP_COLUMNS = ("what", "library", "ms a step", "GiB allocated", "against ours")
LOAD_COLUMNS = ("checkpoint", "GB/s plain reading, cold / warm", "loading, cold / warm", "of reading, cold", "`load_file` and copy")


def mode_of(record: dict[str, Any]) -> str:
    """The backend with what was turned on."""
    words = [record["backend"], *(name for name in ("compile", "recompute", "offload") if record[name])]
    tp = record.get("tp", 1)  # which older records lack
    return " + ".join(words + ([f"tp {tp}"] if tp > 1 else []))


def rows_of(report: dict[str, Any]) -> list[str]:
    """One Markdown row per mode and batch, the median of repeats; the last column compares with our fastest in the same run."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for r in report["records"]:
        groups.setdefault((r["shape"], r["gpus"], r["batch"], r["offload"], mode_of(r)), []).append(r)
    rates = {
        key: statistics.median(r["tokens_per_second_per_gpu"] for r in repeats)
        for key, repeats in groups.items()
        if all("tokens_per_second_per_gpu" in r for r in repeats)
    }
    rows = []
    for key, repeats in groups.items():
        shape, gpus, batch, _, mode = key
        head = f"| {mode} | {shape}, {repeats[0]['seq']} tokens | {gpus} | {batch} |"
        if key not in rates:
            rows.append(f"{head} out of memory | | | |")
            continue
        ours = [rate for other, rate in rates.items() if other[:4] == key[:4] and other[4].startswith("bmtrain")]
        ratio = f"ours is {max(ours) / rates[key]:.2f} x" if ours and not mode.startswith("bmtrain") else ""
        mfu, memory = (statistics.median(r[name] for r in repeats) for name in ("mfu", "reserved_gib"))
        rows.append(f"{head} {rates[key]:.0f} | {mfu:.1%} | {memory} | {ratio} |")
    return rows


def steps_of(records: Sequence[dict[str, Any]]) -> list[str]:
    """One Markdown row per kind of language model, its input and library, the median of repeats."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for r in records:
        size = f"{r['tokens']} tokens" if "tokens" in r else f"{r['sequences']} sequences, {r['mask']}"
        groups.setdefault((r["what"], size, r["model"]), []).append(r)
    rows = []
    for (what, size, model), repeats in groups.items():
        seconds = statistics.median(r["seconds"] for r in repeats)
        ours = statistics.median(r["seconds"] for r in groups[what, size, "model_center"])
        ratio = "" if model == "model_center" else f"ours is {seconds / ours:.3f} x"
        rows.append(f"| {what}, {size} | {model} | {1000 * seconds:.1f} | {repeats[-1]['allocated_gib']} | {ratio} |")
    return rows


def loads_of(records: Sequence[dict[str, Any]]) -> list[str]:
    """One Markdown row per checkpoint loaded."""
    rows = []
    for r in records:
        read, load, other = (f"{r[name]['cold']} / {r[name]['warm']}" for name in ("read", "load", "load_file"))
        share = r["load"]["cold"] / r["read"]["cold"]
        rows.append(f"| {r['layout']}, {r['gigabytes']} GB, {r['files']} files | {read} | {load} | {share:.0%} | {other} |")
    return rows


def table(columns: Sequence[str], rows: Sequence[str]) -> str:
    """The Markdown of a table; nothing for no rows."""
    return f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}\n" + "\n".join(rows) + "\n" if rows else ""


def tables_of(report: dict[str, Any]) -> str:
    """The tables of one file of results."""
    records = report["records"]
    if "what" not in records[0]:
        return table(COLUMNS, rows_of(report))
    loads = [r for r in records if r["what"] == "loading"]
    steps = [r for r in records if r["what"] != "loading"]
    return "\n".join(filter(None, (table(STEP_COLUMNS, steps_of(steps)), table(LOAD_COLUMNS, loads_of(loads)))))


def section() -> str:
    """All results, each with the machine and the command that made it."""
    parts = []
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        report = json.loads(path.read_text())
        machine = report["machine"]
        parts.append(
            f"`{path.relative_to(ROOT)}`: {machine['num_gpus']} x {machine['gpu']}, torch {machine['torch']}, "
            f"CUDA {machine['cuda']}, NCCL {machine['nccl']}, {report['date']}, commit {report['commit'][:12]}.\n\n"
            f"{tables_of(report)}\n```\n{report['command']}\n```\n"
        )
    return "\n".join(parts)


def main() -> None:
    """Rewrite both READMEs."""
    text = section()
    for name in ("README.md", "README-zh.md"):
        path = ROOT / name
        head, _, rest = path.read_text().partition(BEGIN)
        _, _, tail = rest.partition(END)
        path.write_text(f"{head}{BEGIN}\n{text}{END}{tail}")


if __name__ == "__main__":
    main()
