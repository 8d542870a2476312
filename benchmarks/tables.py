"""Write the tables of `benchmarks/results/*.json`: python benchmarks/tables.py

All of them go between the bench markers of docs/figures.md, a short one of this library beside
others and a picture of it in text between the figures and the picture markers of the READMEs, and
those of recipes between the recipes markers of the pages that list them.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from reports import LEFT_OUT

ROOT = pathlib.Path(__file__).parents[1]
BEGIN, END = "<!-- bench:start -->", "<!-- bench:end -->"
SHORT_BEGIN, SHORT_END = "<!-- figures:start -->", "<!-- figures:end -->"
PICTURE_BEGIN, PICTURE_END = "<!-- picture:start -->", "<!-- picture:end -->"
RECIPES_BEGIN, RECIPES_END = "<!-- recipes:start -->", "<!-- recipes:end -->"
RESULTS = ROOT / "benchmarks" / "results"
FULL = ROOT / "docs" / "figures.md"
READMES = (ROOT / "README.md", ROOT / "README-zh.md")
RECIPES = tuple(
    ROOT / "docs" / "site" / language / "recipes" / "index.md" for language in ("en", "zh")
)
# Tokens of a row in as_written.py.
TOKENS = {"gpt2": 1024, "llama-8b": 4096, "bert-large": 128, "t5-base": 512, "llama-8b-lora": 4096}
TOKENS |= {"qwen3-4b": 16384, "qwen3-4b-lora": 16384, "13b": 512, "1b": 4096, "llama-8b-8k": 8192}
# Kinds of rows and of peers in its records, where they are not the usual ones.
KINDS_OF_ROWS, OWN = ("padded", "packed"), ("ours", "center")
STEP_COLUMNS = ("what", "library", "ms a step", "GiB allocated", "against ours")
OURS = "bmtrain + "
LOAD_COLUMNS = (
    "checkpoint",
    "GB/s plain reading, cold / warm",
    "loading, cold / warm",
    "of reading, cold",
    "`load_file` and copy",
)
SAVE_COLUMNS = (
    "saving while training",
    "GB",
    "training paused, s",
    "until it is written, s",
    "step, s",
)
LOSS_COLUMNS = ("loss at the end", "bf16", "FP8", "FP8 has")
SMALL_STEP_COLUMNS = ("states of bf16 parameters", "parameters", "bytes each", "ms a step", "TB/s")
SMALL_LOSS_COLUMNS = ("states", "training loss", "validation loss", "against fp32")

# Choices that a mode names where they are others than these.
USUAL: dict[str, Any] = {
    "zero_level": 3,
    "tp": 1,
    "pipe": 1,
    "overlap": True,
    "device_states": 0.0,
    "micro_batches": 1,
}

Record = dict[str, Any]
Rows = dict[tuple[Any, ...], list[Record]]  # repeats of the same run


def mode_of(record: Record) -> str:
    """The backend with what was turned on; what older records lack was off."""
    recompute = {
        "all": ["recompute"],
        True: ["recompute"],
        "auto": ["recompute as needed"],
        "selective": ["recompute selectively"],
    }
    words = [
        record["backend"],
        "compile" if record["compile"] else "eager",
        *recompute.get(record["recompute"], []),
    ]
    words += [
        name.replace("_", " ")
        for name in ("offload", "fp8", "cuda_graph", "fused_head")
        if record.get(name)
    ]
    words += [
        f"{name} {record[name]}"
        for name, usual in USUAL.items()
        if record.get(name, usual) != usual
    ]
    words += [
        f"{record[name]} {said}"
        for name, said in (("moments", "moments"), ("master_weights", "masters"))
        if record.get(name, "fp32") != "fp32"
    ]
    if record.get("transport", "auto") != "auto":
        words.append(record["transport"].replace("_", " "))
    if record.get("memory_limit") is not None:
        words.append(f"at most {record['memory_limit']:g} GiB")
    return " + ".join(words)


def failure_of(record: Record) -> str:
    """Why nothing was measured; empty if it was."""
    return str(
        record.get("failure", "out of memory" if record.get("out_of_memory") else "")
    ).replace("|", "/")


def rows_of(records: Sequence[Record]) -> Rows:
    """Repeats together: by model, number of GPUs, batch, whether the optimizer was on the CPU, and
    mode.
    """
    rows: Rows = {}
    for r in records:
        rows.setdefault(
            (r["shape"], r["gpus"], r["batch"], bool(r["offload"]), mode_of(r)), []
        ).append(r)
    return rows


def rates_of(rows: Rows) -> dict[tuple[Any, ...], float]:
    """Tokens a second and GPU, the median of repeats, of the rows that were measured."""
    return {
        key: statistics.median(r["tokens_per_second_per_gpu"] for r in repeats)
        for key, repeats in rows.items()
        if not any(map(failure_of, repeats))
    }


def throughput_table(records: Sequence[Record]) -> str:
    """One row per mode and batch; columns that no record fills are left out."""
    rows = rows_of(records)
    rates = rates_of(rows)
    cells = []
    for key, repeats in rows.items():
        shape, gpus, batch, _, mode = key
        row = {
            "backend": mode,
            "model": f"{shape}, {repeats[0]['seq']} tokens",
            "GPUs": gpus,
            "batch a GPU": batch,
        }
        if key in rates:
            row |= measured_cells(repeats, rates[key]) | compared_cells(key, rates)
        else:
            row["tokens/s a GPU"] = next(filter(None, map(failure_of, repeats)))
        cells.append(row)
    return table_of(cells)


def measured_cells(repeats: Sequence[Record], rate: float) -> dict[str, object]:
    """What one row says of itself."""
    found = sorted(r["tokens_per_second_per_gpu"] for r in repeats)
    spread = f" ({found[0]:.0f} to {found[-1]:.0f})" if len(found) > 1 else ""
    cells: dict[str, object] = {"tokens/s a GPU": f"{rate:.0f}{spread}"}
    if all(r.get("mfu") is not None for r in repeats):
        cells["MFU"] = f"{statistics.median(r['mfu'] for r in repeats):.1%}"
    for name, column in (
        ("reserved_gib", "GiB reserved"),
        ("device_gib", "GiB on the GPU"),
        ("host_gib", "GiB of the host"),
    ):
        if all(name in r for r in repeats):
            cells[column] = statistics.median(r[name] for r in repeats)
    # before that was recorded, backends began with other values
    if all("fastest" in r for r in repeats):
        cells["loss"] = f"{statistics.median(r['loss'] for r in repeats):.2f}"
    hidden = [
        r["profile"]["hidden"]
        for r in repeats
        if r.get("profile") and r["profile"]["hidden"] is not None
    ]
    if hidden:
        cells["communication hidden"] = f"{statistics.median(hidden):.0%}"
    return cells


def compared_cells(key: tuple[Any, ...], rates: dict[tuple[Any, ...], float]) -> dict[str, object]:
    """How a row compares: with fewer GPUs, and how many times as fast ours is on the same model,
    GPUs and batch.

    Twice, for a row of another backend: ours with the same words in its mode, and our fastest,
    named, of those that compute in the same precision.
    """
    shape, gpus, *rest = key
    cells: dict[str, object] = {}
    fewer = [
        (other[1], rate)
        for other, rate in rates.items()
        if (other[0], *other[2:]) == (shape, *rest)
    ]
    if min(fewer)[0] < gpus:
        cells["efficiency"] = f"{rates[key] / min(fewer)[1]:.1%}"
    backend, _, how = key[4].partition(" + ")
    ours = {
        other[4]: rate
        for other, rate in rates.items()
        if other[:4] == key[:4] and other[4].startswith(OURS)
    }
    # others have no FP8 here
    ours = {mode.removeprefix(OURS): rate for mode, rate in ours.items() if "fp8" not in mode}
    if backend == "bmtrain" or not ours:
        return cells
    if how in ours:
        cells["ours, same options"] = f"{ours[how] / rates[key]:.2f} x"
    best = max(ours, key=lambda mode: ours[mode])
    cells["ours, fastest"] = f"{ours[best] / rates[key]:.2f} x ({best})"
    return cells


def kernel_table(records: Sequence[Record]) -> str:
    """GPU time of a step by kind, of what was profiled."""
    cells = []
    for (shape, gpus, batch, _, mode), repeats in rows_of(
        [r for r in records if r.get("profile")]
    ).items():
        profile = repeats[-1]["profile"]
        row = {
            "backend": mode,
            "model": f"{shape}, {gpus} x {batch}",
            "whole step": f"{profile['span']:.1f}",
        }
        row |= {kind: f"{ms:.1f}" for kind, ms in profile["kinds"].items()}
        row |= (
            {"communication exposed": f"{profile['exposed']:.1f}"}
            if profile["communication"]
            else {}
        )
        cells.append({**row, "nothing": f"{profile['idle']:.1f}"})
    return table_of(cells)


def table_of(cells: Sequence[dict[str, object]]) -> str:
    """Rows of named cells as Markdown, in the order in which the fullest rows name them."""
    columns = list(
        dict.fromkeys(name for row in sorted(cells, key=len, reverse=True) for name in row)
    )
    return table(
        columns, [f"| {' | '.join(str(row.get(name, '')) for name in columns)} |" for row in cells]
    )


def steps_of(records: Sequence[Record]) -> list[str]:
    """One Markdown row per kind of language model, its input and library, the median of repeats."""
    groups: dict[tuple[str, str, str], list[Record]] = {}
    for r in records:
        size = f"{r['tokens']} tokens" if "tokens" in r else f"{r['sequences']} sequences"
        size += f", {r['mask']}" if "mask" in r else ""
        groups.setdefault((r["what"], size, r["model"]), []).append(r)
    rows = []
    for (what, size, model), repeats in groups.items():
        seconds = statistics.median(r["seconds"] for r in repeats)
        ours = statistics.median(r["seconds"] for r in groups[what, size, "model_center"])
        ratio = "" if model == "model_center" else f"ours is {seconds / ours:.3f} x"
        rows.append(
            f"| {what}, {size} | {model} | {1000 * seconds:.1f} | "
            f"{repeats[-1]['allocated_gib']} | {ratio} |"
        )
    return rows


def recipe_cells(records: Sequence[Record], folder: str = "") -> list[dict[str, object]]:
    """The cells of a table of recipes, by column; `folder` leads to their pages."""
    return [_recipe_cell(record, folder) for record in records]


def _recipe_cell(r: Record, folder: str) -> dict[str, object]:
    gpus = f"{r['gpus']} x {r['machine']['gpu']}" if "machine" in r else r["gpus"]
    cell: dict[str, object] = {"recipe": f"[{r['setting']}]({folder}{r['page']}.md)", "GPUs": gpus}
    if "failed" in r:
        return cell | {"GiB a GPU": "failed: " + " ".join(r["failed"])}
    return cell | {
        "GiB a GPU": r["allocated_gib"],
        "GiB of the host": r["host_gib"],
        "tokens a step": f"{r['tokens_a_step']:,}",
        "seconds a step": f"{r['step_s']:.3g}",
        "tokens a second": f"{r['tokens_per_second']:,}",
        "first step, s": f"{r['first_step_s']:.0f}",
    }


def startup_cells(records: Sequence[Record]) -> list[dict[str, object]]:
    """The cells of a table of first steps, by column."""
    return [_startup_cell(record) for record in records]


def _startup_cell(r: Record) -> dict[str, object]:
    cell: dict[str, object] = {
        "suite": r["suite"],
        "backend": mode_of(r),
        "model": f"{r['shape']}, {r['gpus']} x {r['batch']}",
    }
    for start in ("cold", "warm"):
        if f"{start}_s" in r:
            cell[f"first step, {start} cache, s"] = f"{r[f'{start}_s']:.1f}"
            cell[f"files compiled, {start}"] = r[f"{start}_compiled"]
    return cell | ({"failed": failure_of(r)} if failure_of(r) else {})


def disk_cells(records: Sequence[Record]) -> list[dict[str, object]]:
    """The cells of a table of how fast files are, by column."""
    return [
        {
            "loads of 128 MiB": r["way"],
            "GB/s": r["gb_s"],
            "GB/s until all is on the disk": r["settled_gb_s"],
        }
        for r in records
    ]


def file_update_cells(records: Sequence[Record]) -> list[dict[str, object]]:
    """The cells of a table of updates with states in files, by column."""
    return [
        {
            "states": r["states"],
            "parameters": f"{r['parameters']:,}",
            "GB of states": r["states_gb"],
            "GB of memory": r["memory_gb"],
            "first update, s": r["first_s"],
            "further updates, s": r["seconds"],
            "GB/s each way": r["gb_s"],
        }
        for r in records
    ]


def law_cells(records: Sequence[Record]) -> list[dict[str, object]]:
    """The cells of a table of steps with the ledger and without it, by column."""
    return [
        {
            "step of": f"{r['blocks']} blocks, {r['width']:,} wide, {r['rows']} rows",
            "ranks": r["ranks"],
            **{
                f"{name} the ledger, median (least), ms": f"{1000 * r[name]['median_s']:.1f} "
                f"({1000 * r[name]['least_s']:.1f})"
                for name in ("with", "without")
            },
            "exchanges of words alone": r["alone"],
            "with data": r["with_data"],
        }
        for r in records
    ]


def host_cells(records: Sequence[Record]) -> list[dict[str, object]]:
    """The cells of a table of what a tiny block takes of the host, by column."""
    kinds = {"forward": "forward", "backward": "backward"}
    kinds |= {f"processor_{name}": f"{name}, processor" for name in kinds}
    return [
        {
            "library": r["library"],
            "ranks": r["ranks"],
            **{
                f"{said}, least (median), us": f"{r[kind]['least_us']:,.0f} "
                f"({r[kind]['median_us']:,.0f})"
                for kind, said in kinds.items()
            },
        }
        for r in records
    ]


def decoding_cells(records: Sequence[Record]) -> list[dict[str, object]]:
    """The cells of a table of generation, by column."""
    return [_decoding_cell(record) for record in records]


def _decoding_cell(r: Record) -> dict[str, object]:
    if "failed" in r:
        return {"library": r["method"], "rows": f"failed: {r['failed']}"}
    return {
        "library": r["method"],
        "GPUs": r["gpus"],
        "rows": r["rows"],
        "generation": r["generation"],
        "prompt": r["prompt"],
        "new tokens": r["new_tokens"],
        "tokens/s a GPU": f"{r['tokens_per_s']:,.0f}",
        "ms a further token": r.get("step_ms", ""),
        "GiB allocated": r["peak_gib"],
        "MiB kept": r["kept_mib"],
    }


def loads_of(records: Sequence[Record]) -> list[str]:
    """One Markdown row per checkpoint loaded."""
    rows = []
    for r in records:
        read, load, other = (
            f"{r[name]['cold']} / {r[name]['warm']}" for name in ("read", "load", "load_file")
        )
        share = r["load"]["cold"] / r["read"]["cold"]
        rows.append(
            f"| {r['layout']}, {r['gigabytes']} GB, {r['files']} files | {read} | {load} | "
            f"{share:.0%} | {other} |"
        )
    return rows


def saves_of(records: Sequence[Record]) -> list[str]:
    """One Markdown row per checkpoint written."""
    return [
        f"| {r['method']} | failed: {r['failed']} | | | |"
        if "failed" in r
        else f"| {r['method']}, save {r['save']}, {r['parameters'] / 1e9:.2f}e9 parameters | "
        f"{r['gigabytes']} | {r['stands_still_s']:.2f} | {r['written_s']:.1f} | {r['step_s']} |"
        for r in records
    ]


def ends_of(records: Sequence[Record]) -> list[str]:
    """One Markdown row per loss at the end of training in bf16 and FP8: the mean of all seeds, and
    how sure the difference is.
    """
    rows = []
    for name in ("training", "validation") if records else ():
        bf16, fp8, more = (
            [record[name][kind] for record in records] for kind in ("bf16", "fp8", "more")
        )
        said, error = name, ""
        if len(records) > 1:
            said += f", mean of {len(records)} seeds"
            error = f" (standard error {statistics.stdev(more) / len(more) ** 0.5:.2%})"
        rows.append(
            f"| {said} | {statistics.fmean(bf16):.4f} | {statistics.fmean(fp8):.4f} | "
            f"{statistics.fmean(more):+.2%}{error} |"
        )
    return rows


def small_steps_of(records: Sequence[Record]) -> list[str]:
    """One Markdown row per form of Adam's states that was stepped."""
    return [
        f"| {r['form']}{', in host memory' if r['on_host'] else ''} | "
        + (
            f"failed: {r['failed']} | | | |".replace("\n", " ")
            if "failed" in r
            else f"{r['elements'] / 1e9:.2f}e9 | {r['bytes_an_element']:.2f} | {r['ms']:.1f} | "
            f"{r['terabytes_a_second']:.2f} |"
        )
        for r in records
    ]


def small_losses_of(records: Sequence[Record]) -> list[str]:
    """One Markdown row per form of Adam's states: means over seeds, and how sure the difference of
    validation losses from the first form's is.
    """
    begun = [r for r in records if "failed" not in r]
    rows = [f"| failed: {r['failed']} | | | |".replace("\n", " ") for r in records if "failed" in r]
    for name in begun[0]["kinds"] if begun else ():
        own = [r["kinds"][name] for r in begun]
        first = [next(iter(r["kinds"].values())) for r in begun]
        more = [a["validation"] / b["validation"] - 1 for a, b in zip(own, first, strict=True)]
        error = (
            f" (standard error {statistics.stdev(more) / len(more) ** 0.5:.2%})"
            if len(more) > 1
            else ""
        )
        means = (statistics.fmean(one[kind] for one in own) for kind in ("training", "validation"))
        cells = " | ".join(f"{mean:.4f}" for mean in means)
        rows.append(
            f"| {name}, {len(own)} seed{'s' if len(own) > 1 else ''} | {cells} | "
            f"{statistics.fmean(more):+.2%}{error} |"
        )
    return rows


def table(columns: Sequence[str], rows: Sequence[str]) -> str:
    """The Markdown of a table; nothing for no rows."""
    return (
        f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}\n" + "\n".join(rows) + "\n"
        if rows
        else ""
    )


def as_written_cells(records: Sequence[Record]) -> list[dict[str, object]]:
    """Programs without an option, and their peers."""
    names = {"ours": "bmtrain", "center": "model_center"}
    cells: list[dict[str, object]] = []
    for r in records:
        how = [names.get(r["backend"], r["backend"]), r["mode"], r.get("options")]
        how += [
            name
            for name, key in (("recomputed", "recomputes"), ("symmetric", "symmetric"))
            if r.get(key)
        ]
        cell: dict[str, object] = {
            "model": " ".join([r["model"], *filter(r.get, KINDS_OF_ROWS)]),
            "GPUs": r["gpus"],
            "rows": r.get("rows", ""),
            "library": " ".join(filter(None, how)),
        }
        if "failed" in r:
            cells.append(cell | {"tokens/s a GPU": str(r["failed"]).replace("|", "/")})
            continue
        cell |= {"tokens/s a GPU": f"{r['tokens_per_s']:,}"}
        if "real_tokens_per_s" in r:
            cell["without padding"] = f"{r['real_tokens_per_s']:,}"
        if "of_saved" in r:
            slower = " (slower)" if r["of_saved"] < 0.95 else ""
            cell["of the saved results"] = f"{r['of_saved']:.2f} x{slower}"
        cell["GiB allocated"] = r["peak_gib"]
        for key, column in (
            ("first_step_s", "s to the first step"),
            ("warm_first_step_s", "with warm caches"),
            ("compiled", "files compiled"),
            ("warm_compiled", "then"),
        ):
            cell |= {column: r[key]} if key in r else {}
        cells.append(cell)
    return cells


def tables_of(report: dict[str, Any]) -> str:
    """The tables of one file of results."""
    records = report["records"]
    if "what" not in records[0]:
        begun = [r for r in records if not failure_of(r).endswith(LEFT_OUT)]
        missing = {(mode_of(r), r["gpus"]) for r in records} - {
            (mode_of(r), r["gpus"]) for r in begun
        }
        several = len({r["gpus"] for r in records}) > 1
        names = sorted({f"{mode} on {gpus} GPUs" if several else mode for mode, gpus in missing})
        left_out = f"\nNot begun, for want of time: {'; '.join(names)}.\n" if names else ""
        kernels = kernel_table(begun)
        folded = (
            f"\n<details><summary>GPU time, ms a step</summary>\n\n{kernels}\n</details>\n"
            if kernels
            else ""
        )
        return throughput_table(begun) + left_out + folded
    loads = [r for r in records if r["what"] == "loading"]
    losses = [r for r in records if r["what"] == "fp8 losses"]
    saves = [r for r in records if r["what"] == "saving"]
    small_steps = [r for r in records if r["what"] == "small states step"]
    small_losses = [r for r in records if r["what"] == "small states losses"]
    recipes = [r for r in records if r["what"] == "recipe"]
    decoding = [r for r in records if r["what"] == "decoding"]
    startup = [r for r in records if r["what"] == "start-up"]
    disk = [r for r in records if r["what"] == "file states disk"]
    updates = [r for r in records if r["what"] == "file states update"]
    apart = {"loading", "fp8 losses", "saving", "small states step", "small states losses"}
    written = [r for r in records if r["what"] == "as written"]
    as_they_are = [r for r in records if r["what"] in ("tokenising", "resharding")]
    apart |= {
        "as written",
        "tokenising",
        "resharding",
        "recipe",
        "decoding",
        "start-up",
        "file states disk",
        "file states update",
        "the law",
        "host time",
    }
    steps = [r for r in records if r["what"] not in apart]
    parts = (
        table(STEP_COLUMNS, steps_of(steps)),
        table(LOAD_COLUMNS, loads_of(loads)),
        table(SAVE_COLUMNS, saves_of(saves)),
        table(LOSS_COLUMNS, ends_of(losses)),
        table(SMALL_STEP_COLUMNS, small_steps_of(small_steps)),
        table(SMALL_LOSS_COLUMNS, small_losses_of(small_losses)),
        table_of(recipe_cells(recipes, "site/en/recipes/")),
        table_of(decoding_cells(decoding)),
        table_of(startup_cells(startup)),
        table_of(disk_cells(disk)),
        table_of(file_update_cells(updates)),
        table_of(as_written_cells(written)),
        table_of(
            [{k.replace("_", " "): v for k, v in r.items() if k != "what"} for r in as_they_are]
        ),
        table_of(law_cells([r for r in records if r["what"] == "the law"])),
        table_of(host_cells([r for r in records if r["what"] == "host time"])),
    )
    return "\n".join(filter(None, parts))


def origin_of(report: dict[str, Any]) -> str:
    """Machine, versions, date and commit of a file of results."""
    machine = report["machine"]
    versions = [f"torch {machine['torch']}", f"CUDA {machine['cuda']}", f"NCCL {machine['nccl']}"]
    versions += [f"{name} {machine[name]}" for name in ("deepspeed",) if machine.get(name)]
    return (
        f"{machine['num_gpus']} x {machine['gpu']}, {', '.join(versions)}, "
        f"{report['date']}, commit {report['commit'][:12]}"
    )


class Beside(NamedTuple):
    """This library without an option beside the fastest other: the same program, one run.

    Attributes:
        gpu: the kind of GPU.
        ours, other: records of as_written.py.
        options: those of ours with an option, of the same run.
    """

    gpu: str
    ours: Record
    other: Record
    options: Sequence[Record] = ()

    @property
    def ratio(self) -> float:
        """Of tokens a second."""
        return float(self.ours["tokens_per_s"] / self.other["tokens_per_s"])

    @property
    def what(self) -> str:
        """Model and rows of a GPU."""
        rows = f"{self.ours['model']}, {self.ours['rows']} x {TOKENS[self.ours['model']]}"
        return " ".join([rows, *filter(self.ours.get, KINDS_OF_ROWS)])

    @property
    def gain(self) -> str:
        """Of each option, in times the speed without one."""
        rates = {r["options"]: r["tokens_per_s"] / self.ours["tokens_per_s"] for r in self.options}
        return ", ".join(f"{name} {rate:.2f} x" for name, rate in rates.items())

    @property
    def place(self) -> str:
        """The GPUs as people call them: 2 x H200."""
        kind = re.sub(r"^NVIDIA | \d+GB.*$", "", self.gpu)
        return f"{self.ours['gpus']} x {kind}"

    @property
    def peer(self) -> str:
        """The other's name and mode."""
        alone = "DDP" if self.ours["gpus"] > 1 else "PyTorch"
        name = "FSDP2" if self.other["backend"] == "fsdp2" else alone
        mode = self.other["mode"] or ("recomputed" if self.other["recomputes"] else "compile")
        return f"{name} symmetric {mode}" if self.other.get("symmetric") else f"{name} {mode}"


def reports() -> dict[pathlib.Path, dict[str, Any]]:
    """The files of results, but for comparisons of two trees, which the log tells of, and the GPU
    tests' file.
    """
    found = {path: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}
    return {path: report for path, report in found.items() if {"date", "records"} <= report.keys()}


def beside_others() -> list[Beside]:
    """Where another library was measured too, by programs without an option: of each model, number
    of GPUs and rows the newest report.
    """
    found: dict[tuple[Any, ...], tuple[tuple[str, str], Beside]] = {}
    for report in reports().values():
        groups: dict[tuple[Any, ...], list[Record]] = {}
        for record in report["records"]:
            if record.get("what") == "as written" and "tokens_per_s" in record:
                kind = [record.get(name) for name in KINDS_OF_ROWS]
                key = record["model"], record["gpus"], record["rows"], *kind
                groups.setdefault(key, []).append(record)
        for key, group in groups.items():
            own = [record for record in group if record["backend"] == "ours"]
            ours = [record for record in own if not record.get("options")]
            others = [record for record in group if record["backend"] not in OWN]
            if ours and others:
                other = max(others, key=lambda record: float(record["tokens_per_s"]))
                options = [record for record in own if record.get("options")]
                row = Beside(report["machine"]["gpu"], ours[0], other, options)
                when = report["date"], report.get("time", "")
                if key not in found or when >= found[key][0]:
                    found[key] = when, row
    return [row for _, row in found.values()]


def short_table(rows: Sequence[Beside]) -> str:
    """One line for each model, machine and number of rows."""
    cells: list[dict[str, object]] = [
        {
            "model, rows x tokens a GPU": row.what,
            "GPUs": row.place,
            "bmtrain": f"{row.ours['tokens_per_s']:,}",
            "fastest other": f"{row.peer} {row.other['tokens_per_s']:,}",
            "ratio": f"{row.ratio:.2f}",
            **({"ours with options": row.gain} if row.gain else {}),
            "GiB": f"{row.ours['peak_gib']:.1f}, {row.other['peak_gib']:.1f}",
        }
        for row in rows
    ]
    return table_of(cells)


def text_picture(rows: Sequence[Beside]) -> str:
    """Bars of text; the fastest other is 1.0. Of each model and kind of GPU, the largest batch on
    the most GPUs; of full and padded rows those with the lower ratio.
    """

    def order(row: Beside) -> tuple[float, ...]:
        return row.ours["gpus"], row.ours["rows"], -row.ratio

    shown = {(row.ours["model"], row.gpu): row for row in sorted(rows, key=order)}
    named = {f"{row.place}, {row.what} tokens": row for row in rows if row in shown.values()}
    width = max(map(len, named), default=0) + 1
    lines = [" " * width + "0         0.5       1.0       1.5"]
    for name, row in named.items():
        bar = "█" * round(20 * row.ratio)
        bar = f"{bar[:20]:<20}|{bar[20:]}"
        lines.append(f"{name:<{width}}{bar} {row.ratio:.2f} x {row.peer}")
    return "```text\n" + "\n".join(lines) + "\n```\n"


def section() -> str:
    """All results, each with the machine and the command that made it."""
    parts = []
    for path, report in reports().items():
        plot = path.with_suffix(".svg")
        drawn = f" [Plot](../{plot.relative_to(ROOT)})" if plot.exists() else ""
        parts.append(
            f"`{path.relative_to(ROOT)}`: "
            f"{origin_of(report)}.{drawn}\n\n{tables_of(report)}\n```\n{report['command']}\n```\n"
        )
    return "\n".join(parts)


def recipe_section() -> str:
    """What was measured of recipes, each table with its machine."""
    parts = []
    for report in reports().values():
        found = [r for r in report["records"] if r.get("what") == "recipe"]
        if found:
            parts.append(f"{origin_of(report)}:\n\n{table_of(recipe_cells(found))}")
    return "\n".join(parts)


def replaced(text: str, begin: str, end: str, content: str) -> str:
    """The text with other content between two markers; as it is where it lacks them."""
    head, found, rest = text.partition(begin)
    _, closed, tail = rest.partition(end)
    return f"{head}{begin}\n{content}{end}{tail}" if found and closed else text


def pages() -> dict[pathlib.Path, str]:
    """The files that hold tables, as they should be."""
    rows = beside_others()
    short = short_table(rows)
    texts = {FULL: replaced(FULL.read_text(encoding="utf-8"), BEGIN, END, section())}
    for path in READMES:
        text = path.read_text(encoding="utf-8")
        text = replaced(text, SHORT_BEGIN, SHORT_END, short)
        texts[path] = replaced(text, PICTURE_BEGIN, PICTURE_END, text_picture(rows))
    for path in RECIPES:
        text = path.read_text(encoding="utf-8")
        texts[path] = replaced(text, RECIPES_BEGIN, RECIPES_END, recipe_section())
    return texts


def main() -> None:
    """Rewrite the pages."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
