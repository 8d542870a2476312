"""Markdown and plots from records, old and new."""

import contextlib
import json

import pytest

COMMON = json.loads("""{"shape": "2.7b", "gpus": 2, "seq": 1024, "batch": 8, "compile": true,
"recompute": "none", "offload": false, "tp": 1, "zero_level": 3, "transport": "auto", "fp8": false,
"cuda_graph": false, "fused_head": false, "mfu": 0.5, "reserved_gib": 60.0, "device_gib": 64.0,
"host_gib": 7.5, "fastest": 1.0, "loss": 9.876}""")
MACHINE = json.loads("""{"num_gpus": 2, "gpu": "NVIDIA H200", "torch": "2.11", "cuda": "13.0",
"nccl": "2.28", "deepspeed": "0.19"}""")


def value(text):
    """A word of JSON, or the word itself."""
    with contextlib.suppress(ValueError):
        return json.loads(text)
    return text


def records(table):
    """As throughput.py writes them; of lines such as "fsdp2 500 batch=24"."""
    found = []
    for backend, rate, *others in map(str.split, table.strip().splitlines()):
        given = {name: value(word) for name, word in (each.split("=") for each in others)}
        found.append(
            {"backend": backend, "tokens_per_second_per_gpu": float(rate), **COMMON, **given}
        )
    return found


def report(*records, gpu="NVIDIA H200"):
    found = {"machine": MACHINE | {"gpu": gpu}, "date": "2026-11-21", "command": "x"}
    return found | {"commit": "0123456789abcdef", "records": list(records)}


def failed(backend, why):
    (whole,) = records(f"{backend} 0")
    kept = ("backend", "shape", "gpus", "seq", "batch", "compile", "recompute", "offload")
    return {name: whole[name] for name in kept} | {"failure": why}


def lines_of(bench, *records, **others):
    return bench.tables.tables_of(report(*records, **others)).splitlines()


MODES = """
=> compile
compile=false recompute=all offload=true => eager + recompute + offload
recompute=auto fp8=true cuda_graph=true => compile + recompute as needed + fp8 + cuda graph
transport=nccl tp=2 zero_level=2 => compile + zero_level 2 + tp 2 + nccl
recompute=true => compile + recompute
recompute=false => compile
recompute=auto memory_limit=68.0 => compile + recompute as needed + at most 68 GiB
recompute=auto master_weights=split => compile + recompute as needed + split masters
recompute=selective memory_limit=null master_weights=fp32 => compile + recompute selectively
"""


def test_modes(bench):
    for line in MODES.strip().splitlines():
        words, expected = line.split("=> ")
        (found,) = records(f"bmtrain 1 {words}")
        assert bench.tables.mode_of(found) == f"bmtrain + {expected}"


KERNELS = {"span": 10.04, "kinds": {"matmul": 8.0, "communication": 3.0}, "communication": 3.0}
KERNELS |= {"exposed": 1.5, "hidden": 0.625, "idle": 0.5}
ROW = "2.7b, 1024 tokens | 2 | 8"
REST = "50.0% | 60.0 | 64.0 | 7.5 | 9.88"


OF_ROWS = """
bmtrain 1000
bmtrain 1200
bmtrain 1100
bmtrain 900 transport=nccl
bmtrain 3000 fp8=true
fsdp2 550
"""


def test_rows(bench):
    """Medians of repeats, compared with our fastest in the same precision; what failed has its reason in
    place of numbers. What was not begun is named below, by its mode, unless that was measured elsewhere
    in the file, and with the number of GPUs if there are several.
    """
    measured = records(OF_ROWS)
    measured[-1]["profile"] = KERNELS
    measured += [failed("plain", "out of memory"), failed("deepspeed", "it said a | b")]
    lines = bench.tables.throughput_table(measured).splitlines()
    assert lines[0] == (
        "| backend | model | GPUs | batch a GPU | tokens/s a GPU | MFU | GiB reserved "
        "| GiB on the GPU | GiB of the host | loss "
        "| communication hidden | ours, same options | ours, fastest |"
    )
    assert lines[2:] == [
        f"| bmtrain + compile | {ROW} | 1100 (1000 to 1200) | {REST} |  |  |  |",
        f"| bmtrain + compile + nccl | {ROW} | 900 | {REST} |  |  |  |",
        f"| bmtrain + compile + fp8 | {ROW} | 3000 | {REST} |  |  |  |",
        f"| fsdp2 + compile | {ROW} | 550 | {REST} | 62% | 2.00 x | 2.00 x (compile) |",
        f"| plain + compile | {ROW} | out of memory |  |  |  |  |  |  |  |  |",
        f"| deepspeed + compile | {ROW} | it said a / b |  |  |  |  |  |  |  |  |",
    ]
    why = "not tried: the 7 s of --within were over"
    ours, theirs = records("bmtrain 1000\nfsdp2 1000 gpus=1")
    assert lines_of(bench, ours, failed("bmtrain", why), failed("fsdp2", why))[2:] == [
        f"| bmtrain + compile | {ROW} | 1000 | {REST} |",
        "",
        "Not begun, for want of time: fsdp2 + compile.",
    ]
    last = lines_of(bench, theirs, failed("fsdp2", why))[-1]
    assert last == "Not begun, for want of time: fsdp2 + compile on 2 GPUs."
    text = "\n".join(lines_of(bench, ours | {"profile": KERNELS}, theirs))
    heads = "matmul | communication | communication exposed | nothing |"
    assert f"| backend | model | whole step | {heads}" in text
    assert "| bmtrain + compile | 2.7b, 2 x 8 | 10.0 | 8.0 | 3.0 | 1.5 | 0.5 |" in text
    assert "<details>" not in bench.tables.tables_of(report(theirs))
    versions = "2 x NVIDIA H200, torch 2.11, CUDA 13.0, NCCL 2.28, deepspeed 0.19"
    assert bench.tables.origin_of(report()) == f"{versions}, 2026-11-21, commit 0123456789ab"


ALIKE = """
bmtrain 1000
bmtrain 800 recompute=all
bmtrain 1200 recompute=auto transport=nccl
bmtrain 3000 fp8=true
bmtrain 7000 batch=16
fsdp2 500
fsdp2 400 recompute=all
fsdp2 600 recompute=selective
fsdp2 600 batch=24
"""


def test_like_is_compared_with_like(bench):
    """With ours that has the same options, where it was measured, and with our fastest, which is named;
    FP8 with nothing.
    """
    lines = bench.tables.throughput_table(records(ALIKE)).splitlines()[2:]
    rows, best = (
        [line.split(" | ")[-2:] for line in lines],
        "x (compile + recompute as needed + nccl) |",
    )
    assert rows[5:8] == [
        ["2.00 x", f"2.40 {best}"],
        ["2.00 x", f"3.00 {best}"],
        ["", f"2.00 {best}"],
    ]
    assert all(both[1].strip(" |") == "" for both in (*rows[:5], rows[8]))


def written(backend, rate, model, rows, gpus=1, mode=None, **others):
    found = {"what": "as written", "backend": backend, "model": model, "rows": rows, "gpus": gpus}
    found |= {"mode": mode, "tokens_per_s": rate, "peak_gib": 6.25, "recomputes": rows == 3}
    return found | others


def test_this_library_beside_others(bench, tmp_path, monkeypatch):
    """The fastest other of each model, number of GPUs and rows, in the newest results; nothing where
    none was measured. Options of ours have a column, and rows of another kind a line.
    """
    ours, others = "ours", [("plain", None), ("plain", "reduce-overhead"), ("fsdp2", None)]
    for name, found in {
        "x": report(
            *[written(ours, rate, "gpt2", rows) for rate, rows in ((1000, 8), (1500, 32))],
            *[
                written(who, 800 + 50 * n, "gpt2", 8, mode=mode)
                for n, (who, mode) in enumerate(others)
            ],
            written("plain", 2000, "gpt2", 32, mode="reduce-overhead"),
            {"what": "as written", "backend": "plain", "model": "t5-base", "failed": "longer"},
        ),
        "y": report(
            written(ours, 300, "gpt2", 8, 2), written("plain", 200, "gpt2", 8, 2), gpu="NVIDIA H100"
        ),
        "z": report(written(ours, 300, "llama-8b", 3, 2)),
        "zz": report(
            written(ours, 9, "llama-8b", 3, 2),
            written(ours, 12, "llama-8b", 3, 2, options="fp8"),
            written("center", 99, "llama-8b", 3, 2),
            written("fsdp2", 6, "llama-8b", 3, 2, symmetric=True),
            written(ours, 2, "t5-base", 16, padded=True),
            written("plain", 1, "t5-base", 16, padded=True),
            written(ours, 3, "t5-base", 16),
            written("plain", 1, "t5-base", 16),
        ),
        "older": report(written(ours, 9, "t5-base", 16), written("plain", 1, "t5-base", 16))
        | {"time": "", "date": "2026-11-20"},
        "trees": {"what": "trees", "records": []},
    }.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(found))
    monkeypatch.setattr(bench.tables, "RESULTS", tmp_path)
    rows = bench.tables.beside_others()
    lines = bench.tables.short_table(rows).splitlines()
    assert (
        lines[0] == "| model, rows x tokens a GPU | GPUs | bmtrain | fastest other | ratio "
        "| ours with options | GiB |"
    )
    assert lines[2:] == [
        "| t5-base, 16 x 512 | 1 x H200 | 3 | PyTorch compile 1 | 3.00 |  | 6.2, 6.2 |",
        "| gpt2, 8 x 1024 | 1 x H200 | 1,000 | FSDP2 compile 900 | 1.11 |  | 6.2, 6.2 |",
        "| gpt2, 32 x 1024 | 1 x H200 | 1,500 | PyTorch reduce-overhead 2,000 | 0.75 |  | 6.2, 6.2 |",
        "| gpt2, 8 x 1024 | 2 x H100 | 300 | DDP compile 200 | 1.50 |  | 6.2, 6.2 |",
        "| llama-8b, 3 x 4096 | 2 x H200 | 9 | FSDP2 symmetric recomputed 6 | 1.50 | fp8 1.33 x | 6.2, 6.2 |",
        "| t5-base, 16 x 512 padded | 1 x H200 | 2 | PyTorch compile 1 | 2.00 |  | 6.2, 6.2 |",
    ]
    bars = bench.tables.text_picture(rows).splitlines()
    assert [bar[41:].strip() for bar in bars[2:-1]] == [
        f"{'█' * 15}     | 0.75 x PyTorch reduce-overhead",
        f"{'█' * 20}|{'█' * 10} 1.50 x DDP compile",
        f"{'█' * 20}|{'█' * 10} 1.50 x FSDP2 symmetric recomputed",
        f"{'█' * 20}|{'█' * 20} 2.00 x PyTorch compile",
    ]
    pytest.importorskip("matplotlib")
    first, second = (
        bench.plot.draw_beside(rows, tmp_path / name).read_text() for name in ("a.svg", "b.svg")
    )
    words = (">1.50 x DDP compile<", ">2 x H100, gpt2, 8 x 1024 tokens<", bench.plot.said(rows))
    assert first == second and all(word in first for word in words)


def test_pages_and_picture_are_those_of_the_results(bench):
    """`python benchmarks/tables.py` would change nothing. The picture by the numbers that it carries and
    shows; another matplotlib draws other lines.
    """
    for path, text in bench.tables.pages().items():
        assert path.read_text(encoding="utf-8") == text, f"{path}: run benchmarks/tables.py"
    assert bench.tables.SHORT_BEGIN in bench.tables.READMES[0].read_text(encoding="utf-8")
    rows = bench.tables.beside_others()
    picture = bench.plot.PICTURE.read_text(encoding="utf-8")
    assert bench.plot.said(rows) in picture, "run benchmarks/plot.py"
    for row in rows:
        assert f">{row.ratio:.2f} x {row.peer}<" in picture
