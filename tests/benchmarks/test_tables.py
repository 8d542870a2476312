"""Markdown and plots from records, old and new."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest


def record(backend: str, rate: float, **others: Any) -> dict[str, Any]:
    """As throughput.py writes it."""
    common = {
        "backend": backend,
        "shape": "2.7b",
        "gpus": 2,
        "seq": 1024,
        "batch": 8,
        "compile": True,
        "recompute": "none",
        "offload": False,
        "tp": 1,
        "zero_level": 3,
        "transport": "auto",
        "fp8": False,
        "cuda_graph": False,
        "fused_head": False,
        "mfu": 0.5,
        "reserved_gib": 60.0,
        "device_gib": 64.0,
        "host_gib": 7.5,
        "tokens_per_second_per_gpu": rate,
        "fastest": 1.0,
        "loss": 9.876,
    }
    return common | others


def report(*records: dict[str, Any]) -> dict[str, Any]:
    machine = {
        "num_gpus": 2,
        "gpu": "NVIDIA H200",
        "torch": "2.11",
        "cuda": "13.0",
        "nccl": "2.28",
        "deepspeed": "0.19",
    }
    return {
        "machine": machine,
        "date": "2026-11-21",
        "commit": "0123456789abcdef",
        "command": "x",
        "records": list(records),
    }


def failed(backend: str, why: str) -> dict[str, Any]:
    kept = ("backend", "shape", "gpus", "seq", "batch", "compile", "recompute", "offload")
    whole = record(backend, 0)
    return {name: whole[name] for name in kept} | {"failure": why}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "bmtrain + compile"),
        (
            {"compile": False, "recompute": "all", "offload": True},
            "bmtrain + eager + recompute + offload",
        ),
        (
            {"recompute": "auto", "fp8": True, "cuda_graph": True},
            "bmtrain + compile + recompute as needed + fp8 + cuda graph",
        ),
        (
            {"transport": "nccl", "tp": 2, "zero_level": 2},
            "bmtrain + compile + zero_level 2 + tp 2 + nccl",
        ),
        ({"recompute": True}, "bmtrain + compile + recompute"),
        ({"recompute": False}, "bmtrain + compile"),
        (
            {"recompute": "auto", "memory_limit": 68.0},
            "bmtrain + compile + recompute as needed + at most 68 GiB",
        ),
        (
            {"recompute": "auto", "master_weights": "split"},
            "bmtrain + compile + recompute as needed + split masters",
        ),
        (
            {"recompute": "selective", "memory_limit": None, "master_weights": "fp32"},
            "bmtrain + compile + recompute selectively",
        ),
    ],
)
def test_modes(bench: Any, changes: dict[str, Any], expected: str) -> None:
    assert bench.tables.mode_of(record("bmtrain", 1, **changes)) == expected


def test_losses_in_fp8(bench: Any) -> None:
    """The last training losses, averaged, and the last validation losses."""
    runs = {
        kind: [{"step": step, "loss": end + 1.0 / step} for step in range(1, 101)]
        + [{"step": 100, "validation_loss": end}]
        for kind, end in (("bf16", 4.0), ("fp8", 4.1))
    }
    found = bench.fp8_losses.compared(runs)
    mean = 4.0 + sum(1 / step for step in range(51, 101)) / 50
    assert found["training"]["bf16"] == pytest.approx(mean)
    lines = bench.tables.tables_of(report({"what": "fp8 losses", **found})).splitlines()
    assert lines[2:] == [
        f"| training | {mean:.4f} | {mean + 0.1:.4f} | {0.1 / mean:+.2%} |",
        "| validation | 4.0000 | 4.1000 | +2.50% |",
    ]
    other = {"what": "fp8 losses", **found, "validation": {"bf16": 4.2, "fp8": 4.2, "more": 0.0}}
    lines = bench.tables.tables_of(report({"what": "fp8 losses", **found}, other)).splitlines()
    assert (
        lines[3]
        == "| validation, mean of 2 seeds | 4.1000 | 4.1500 | +1.25% (standard error 1.25%) |"
    )


def test_small_states(bench: Any) -> None:
    """A row for each form: its step, its losses and the difference from the first; and failures."""
    step = {"elements": 1.5e9, "ms": 4.25, "bytes_an_element": 4.125, "terabytes_a_second": 3.456}
    records: list[dict[str, Any]] = [
        {"what": "small states step", "form": "split", "on_host": False, **step},
        {"what": "small states step", "form": "8-bit", "on_host": True, "failed": "out\nof"},
    ]
    for seed, end in enumerate((2.02, 2.04)):
        kinds = {"fp32": {"training": 3.0, "validation": 2.0}}
        kinds["split"] = {"training": 3.1, "validation": end}
        records.append({"what": "small states losses", "seed": seed, "kinds": kinds})
    lines = bench.tables.tables_of(report(*records)).splitlines()
    assert lines[2:4] == [
        "| split | 1.50e9 | 4.12 | 4.2 | 3.46 |",
        "| 8-bit, in host memory | failed: out of | | | |",
    ]
    assert lines[7:] == [
        "| fp32, 2 seeds | 3.0000 | 2.0000 | +0.00% (standard error 0.00%) |",
        "| split, 2 seeds | 3.1000 | 2.0300 | +1.50% (standard error 0.50%) |",
    ]


def test_losses_in_fp8_of_several_seeds(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each GPU runs one at a time, and all of them have work."""
    under_way: set[str] = set()
    used: set[str] = set()

    def train(kind: str, seed: int, folder: Any, arguments: Any, gpu: str) -> Any:
        assert gpu not in under_way
        under_way.add(gpu)
        used.add(gpu)
        time.sleep(0.02)
        under_way.remove(gpu)
        return [(kind, seed)]

    monkeypatch.setattr(bench.fp8_losses, "train", train)
    found = bench.fp8_losses.train_all([3, 5, 7], [], ["0", "1"])
    assert found == {
        seed: {kind: [(kind, seed)] for kind in ("bf16", "fp8")} for seed in (3, 5, 7)
    } and used == {"0", "1"}


def test_what_was_not_begun_is_named_below_the_table(bench: Any) -> None:
    """By its mode, unless that was measured elsewhere in the file, and with the number of GPUs if
    there are several.
    """
    why = "not tried: the 7 s of --within were over"
    text = bench.tables.tables_of(
        report(record("bmtrain", 1000), failed("bmtrain", why), failed("fsdp2", why))
    )
    assert text.splitlines()[2:] == [
        "| bmtrain + compile | 2.7b, 1024 tokens | 2 | 8 | 1000 | 50.0% | 60.0 | 64.0 | 7.5 | 9.88 |",
        "",
        "Not begun, for want of time: fsdp2 + compile.",
    ]
    text = bench.tables.tables_of(report(record("fsdp2", 1000, gpus=1), failed("fsdp2", why)))
    assert text.splitlines()[-1] == "Not begun, for want of time: fsdp2 + compile on 2 GPUs."


def test_rows(bench: Any) -> None:
    """Medians of repeats, compared with our fastest in the same precision; what failed has its
    reason in place of numbers.
    """
    records = [
        *(record("bmtrain", rate) for rate in (1000, 1200, 1100)),
        record("bmtrain", 900, transport="nccl"),
        record("bmtrain", 3000, fp8=True),
        record(
            "fsdp2",
            550,
            profile={
                "hidden": 0.625,
                "kinds": {},
                "span": 1.0,
                "idle": 0.0,
                "communication": 0.5,
                "exposed": 0.2,
            },
        ),
        failed("plain", "out of memory"),
        failed("deepspeed", "it said a | b"),
    ]
    lines = bench.tables.throughput_table(records).splitlines()
    assert lines[0] == (
        "| backend | model | GPUs | batch a GPU | tokens/s a GPU | MFU | GiB reserved "
        "| GiB on the GPU | GiB of the host | loss "
        "| communication hidden | ours, same options | ours, fastest |"
    )
    assert lines[2:] == [
        "| bmtrain + compile | 2.7b, 1024 tokens | 2 | 8 | 1100 (1000 to 1200) | 50.0% "
        "| 60.0 | 64.0 | 7.5 | 9.88 |  |  |  |",
        "| bmtrain + compile + nccl | 2.7b, 1024 tokens | 2 | 8 | 900 | 50.0% | 60.0 | "
        "64.0 | 7.5 | 9.88 |  |  |  |",
        "| bmtrain + compile + fp8 | 2.7b, 1024 tokens | 2 | 8 | 3000 | 50.0% | 60.0 | "
        "64.0 | 7.5 | 9.88 |  |  |  |",
        "| fsdp2 + compile | 2.7b, 1024 tokens | 2 | 8 | 550 | 50.0% | 60.0 | 64.0 | "
        "7.5 | 9.88 | 62% | 2.00 x | 2.00 x (compile) |",
        "| plain + compile | 2.7b, 1024 tokens | 2 | 8 | out of memory |  |  |  |  |  |  |  |  |",
        "| deepspeed + compile | 2.7b, 1024 tokens | 2 | 8 | it said a / b |  |  |  |  |  |  |  |  |",
    ]


def test_like_is_compared_with_like(bench: Any) -> None:
    """With ours that has the same options, where it was measured, and with our fastest, which is
    named; FP8 with nothing.
    """
    records = [
        record("bmtrain", 1000),
        record("bmtrain", 800, recompute="all"),
        record("bmtrain", 1200, recompute="auto", transport="nccl"),
        record("bmtrain", 3000, fp8=True),
        record("bmtrain", 7000, batch=16),
        record("fsdp2", 500),
        record("fsdp2", 400, recompute="all"),
        record("fsdp2", 600, recompute="selective"),
        record("fsdp2", 600, batch=24),
    ]
    rows = [
        line.split(" | ")[-2:] for line in bench.tables.throughput_table(records).splitlines()[2:]
    ]
    best = "x (compile + recompute as needed + nccl) |"
    assert rows[5:8] == [
        ["2.00 x", f"2.40 {best}"],
        ["2.00 x", f"3.00 {best}"],
        ["", f"2.00 {best}"],
    ]
    assert all(both[1].strip(" |") == "" for both in (*rows[:5], rows[8]))


def test_weak_scaling(bench: Any) -> None:
    """Each row against the same backend on the fewest GPUs."""
    records = [
        record(backend, rate / gpus**0.5, gpus=gpus)
        for gpus in (1, 4)
        for backend, rate in (("bmtrain", 100), ("fsdp2", 80))
    ]
    first, _, _, _, ours, theirs = bench.tables.throughput_table(records).splitlines()
    assert "| efficiency |" in first
    assert "50.0% |" in ours.split("9.88", 1)[1]
    assert theirs.endswith("| 50.0% | 1.25 x | 1.25 x (compile) |")


def test_kernel_times(bench: Any) -> None:
    profile = {
        "span": 10.04,
        "kinds": {"matmul": 8.0, "communication": 3.0},
        "communication": 3.0,
        "exposed": 1.5,
        "hidden": 0.5,
        "idle": 0.5,
    }
    text = bench.tables.tables_of(
        report(record("bmtrain", 100, profile=profile), record("fsdp2", 50))
    )
    assert (
        "| backend | model | whole step | matmul | communication | communication exposed | "
        "nothing |"
    ) in text
    assert "| bmtrain + compile | 2.7b, 2 x 8 | 10.0 | 8.0 | 3.0 | 1.5 | 0.5 |" in text
    assert "<details>" not in bench.tables.tables_of(report(record("fsdp2", 50)))


def test_origin(bench: Any) -> None:
    expected = (
        "2 x NVIDIA H200, torch 2.11, CUDA 13.0, NCCL 2.28, deepspeed 0.19, 2026-11-21, "
        "commit 0123456789ab"
    )
    assert bench.tables.origin_of(report()) == expected


def test_plots(bench: Any, tmp_path: Path) -> None:
    """Bars, or lines where the number of GPUs varies; the same file from the same numbers; nothing
    measured is no error.
    """
    pytest.importorskip("matplotlib")
    bars = report(record("bmtrain", 1100), record("fsdp2", 550), failed("plain", "out of memory"))
    first, second = (
        bench.plot.draw(bars, tmp_path / name).read_text() for name in ("a.svg", "b.svg")
    )
    assert first == second
    for word in ("2.7b, batch 8: bmtrain + compile", "1,100", "NVIDIA H200", "commit 0123456789ab"):
        assert word in first
    assert "plain" not in first
    lines = report(*(record("bmtrain", 1100, gpus=gpus) for gpus in (1, 2, 4)))
    assert ">GPUs<" in bench.plot.draw(lines, tmp_path / "c.svg").read_text()
    assert "<svg" in bench.plot.draw(report(failed("plain", "x")), tmp_path / "d.svg").read_text()


def test_this_library_beside_others(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the fastest of each, and with the options of the fastest other where ours has them; what
    computes in another precision, in less memory or on the CPU is left out, as is a model that no
    other was measured on.
    """
    records = [
        *(record("bmtrain", rate) for rate in (1000, 1200, 1100)),
        record("bmtrain", 1400, recompute="auto"),
        record("bmtrain", 9000, fp8=True),
        record("bmtrain", 9000, memory_limit=40.0),
        record("bmtrain", 9000, offload=True),
        record("fsdp2", 800),
        record("fsdp2", 700, recompute="all"),
        record("deepspeed", 500, compile=False),
        failed("plain", "out of memory"),
        record("bmtrain", 1500, batch=16),
        record("bmtrain", 1600, batch=24),
        record("fsdp2", 1000, batch=24, recompute="selective"),
        record("bmtrain", 50000, shape="gpt2", gpus=1),
        record("plain", 40000, shape="gpt2", gpus=1),
    ]
    (tmp_path / "x.json").write_text(json.dumps(report(*records)))
    steps = {"what": "bert", "model": "model_center"}
    (tmp_path / "y.json").write_text(json.dumps(report(steps)))
    elsewhere = report(record("bmtrain", 300, shape="gpt2"), record("plain", 200, shape="gpt2"))
    elsewhere["machine"]["gpu"] = "NVIDIA H100"
    (tmp_path / "other.json").write_text(json.dumps(elsewhere))
    (tmp_path / "z.json").write_text(json.dumps({"what": "trees", "records": []}))
    monkeypatch.setattr(bench.tables, "RESULTS", tmp_path)
    rows = bench.tables.beside_others()
    lines = bench.tables.short_table(rows).splitlines()
    assert lines[0] == (
        "| model | GPUs | bmtrain | FSDP2 | DeepSpeed ZeRO-3 | PyTorch without sharding "
        "| against the fastest other | with the same options |"
    )
    assert lines[2:] == [
        "| gpt2, 8 x 1024 tokens | 2 x NVIDIA H100 | 300 |  |  | 200 | 1.50 x | 1.50 x |",
        "| 2.7b, 8 x 1024 tokens | 2 | 1,400 | 800 | 500 |  | 1.75 x | 1.38 x |",
        "| 2.7b, 24 x 1024 tokens | 2 | 1,600 | 1,000 |  |  | 1.60 x |  |",
        "| gpt2, 8 x 1024 tokens | 1 | 50,000 |  |  | 40,000 | 1.25 x | 1.25 x |",
    ]
    pytest.importorskip("matplotlib")
    shown = bench.plot.sharded(rows)
    assert [row.gpus for row in shown] == [2, 2]
    first, second = (
        bench.plot.draw_beside(shown, tmp_path / name).read_text() for name in ("a.svg", "b.svg")
    )
    assert first == second
    for word in (">1,400<", ">800<", ">500<", ">FSDP2<", ">2.7b, 2 GPUs, 24 x 1024 tokens a GPU<"):
        assert word in first
    assert "PyTorch without" not in first and "50,000" not in first
    assert bench.plot.said(shown) in first


def test_the_tables_are_those_of_the_results(bench: Any) -> None:
    """`python benchmarks/tables.py` would change nothing."""
    for path, text in bench.tables.pages().items():
        assert path.read_text(encoding="utf-8") == text, f"{path}: run benchmarks/tables.py"
    assert bench.tables.SHORT_BEGIN in bench.tables.READMES[0].read_text(encoding="utf-8")


def test_the_picture_is_that_of_the_results(bench: Any) -> None:
    """By the numbers that it carries and shows; another matplotlib draws other lines."""
    rows = bench.plot.sharded(bench.tables.beside_others())
    picture = bench.plot.PICTURE.read_text(encoding="utf-8")
    assert bench.plot.said(rows) in picture, "run benchmarks/plot.py"
    for row in rows:
        for rate, _ in row.fastest.values():
            assert f">{rate:,.0f}<" in picture


@pytest.mark.parametrize("program", ["plot.py", "tables.py"])
def test_help(bench: Any, program: str) -> None:
    path = bench.tables.ROOT / "benchmarks" / program
    command = [sys.executable, str(path), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert re.match(rf"usage: {program}", done.stdout)
