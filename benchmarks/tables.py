"""Write the tables of `benchmarks/results/*.json` between the bench markers of the READMEs: python benchmarks/tables.py"""

from __future__ import annotations

import json
import pathlib
import statistics
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
BEGIN, END = "<!-- bench:start -->", "<!-- bench:end -->"
COLUMNS = ("backend", "model", "GPUs", "batch a GPU", "tokens/s a GPU", "MFU", "GiB reserved", "against ours")


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


def section() -> str:
    """All results, each with the machine and the command that made it."""
    parts = []
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        report = json.loads(path.read_text())
        machine = report["machine"]
        parts.append(
            f"`{path.relative_to(ROOT)}`: {machine['num_gpus']} x {machine['gpu']}, torch {machine['torch']}, "
            f"CUDA {machine['cuda']}, NCCL {machine['nccl']}, {report['date']}, commit {report['commit'][:12]}.\n\n"
            f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}\n"
            + "\n".join(rows_of(report))
            + f"\n\n```\n{report['command']}\n```\n"
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
