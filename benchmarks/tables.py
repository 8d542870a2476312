"""Write the tables of `benchmarks/results/*.json` between the bench markers of the READMEs: python benchmarks/tables.py"""

from __future__ import annotations

import json
import pathlib
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
BEGIN, END = "<!-- bench:start -->", "<!-- bench:end -->"
COLUMNS = ("backend", "model", "GPUs", "batch a GPU", "tokens/s a GPU", "MFU", "GiB reserved", "against ours")


def mode_of(record: dict[str, Any]) -> str:
    """The backend with what was turned on."""
    words = [record["backend"], *(name for name in ("compile", "recompute", "offload") if record[name])]
    return " + ".join(words)


def rows_of(report: dict[str, Any]) -> list[str]:
    """One Markdown row per record; the last column is how many times as fast ours was in the same run."""
    ours = {
        (r["shape"], r["gpus"], r["batch"], r["offload"]): r["tokens_per_second_per_gpu"]
        for r in report["records"]
        if r["backend"] == "bmtrain" and "tokens_per_second_per_gpu" in r
    }
    rows = []
    for r in report["records"]:
        head = f"| {mode_of(r)} | {r['shape']}, {r['seq']} tokens | {r['gpus']} | {r['batch']} |"
        if "tokens_per_second_per_gpu" not in r:
            rows.append(f"{head} out of memory | | | |")
            continue
        best = ours.get((r["shape"], r["gpus"], r["batch"], r["offload"]))
        other = r["backend"] != "bmtrain" and best is not None
        ratio = f"ours is {best / r['tokens_per_second_per_gpu']:.2f} x" if other and best is not None else ""
        rows.append(f"{head} {r['tokens_per_second_per_gpu']} | {r['mfu']:.1%} | {r['reserved_gib']} | {ratio} |")
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
