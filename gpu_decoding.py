"""Not part of the project: what the decoding branch needs a GPU for, in one run of 4 minutes.

    OUT=/some/folder python gpu_decoding.py          # one GPU, or two for the sharded part
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import time
import traceback

HERE = pathlib.Path(__file__).parent
OUT = pathlib.Path(os.environ.get("OUT", "/tmp/decoding_out"))
OUT.mkdir(parents=True, exist_ok=True)
ENV = {**os.environ, "PYTHONPATH": f"{HERE / 'src'}:{HERE}"}
SUMMARY: list[str] = []


def part(name, command, limit):
    begin = time.time()
    try:
        done = subprocess.run(
            command, cwd=HERE, env=ENV, capture_output=True, text=True, timeout=limit
        )
        text, code = done.stdout + done.stderr, done.returncode
    except subprocess.TimeoutExpired as error:
        text = "".join(
            x.decode() if isinstance(x, bytes) else (x or "") for x in (error.stdout, error.stderr)
        )
        code = "timeout"
    except Exception:
        text, code = traceback.format_exc(), "error"
    (OUT / f"{name}.log").write_text(text)
    SUMMARY.append(f"{name}: {code}, {time.time() - begin:.0f} s")
    print(f"===== {name}: {code}\n{text[-3500:]}", flush=True)


def profile():
    """Where the time of a generation goes: on the host, and kernel by kernel in a step."""
    sys.path[:0] = [str(HERE / "src"), str(HERE / "benchmarks")]
    import torch

    import decoding
    from bmtrain.graphs import repeated
    from model_center.generation import passes

    spent = {}

    def timed(owner, name):
        original = getattr(owner, name)

        def wrapper(*args, **kwargs):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            out = original(*args, **kwargs)
            torch.cuda.synchronize()
            spent.setdefault(name, []).append(time.perf_counter() - begin)
            return out

        setattr(owner, name, wrapper)
        return lambda: setattr(owner, name, original)

    run = decoding.ours()
    facts = {}
    for rows in (1, 64):
        ids = torch.randint(0, decoding.VOCAB, (rows, 128), device="cuda")
        run(ids, 40)
        undo = [timed(passes.Passes, "first"), timed(passes.Passes, "next"),
                timed(repeated.CudaRecorder, "record")]
        spent.clear()
        run(ids, 40)
        for step in undo:
            step()
        facts[f"rows {rows}"] = {
            "first_ms": 1e3 * spent["first"][0],
            "aside_ms": 1e3 * spent["next"][0],
            "record_ms": 1e3 * spent["record"][0],
            "replay_ms": 1e3 * sorted(spent["next"][2:])[len(spent["next"][2:]) // 2],
        }
        print(rows, facts[f"rows {rows}"], flush=True)
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
        ) as prof:
            run(ids, 40)
            torch.cuda.synchronize()
        rows_of = [
            (event.key[:90], event.count, event.self_device_time_total)
            for event in prof.key_averages()
            if event.self_device_time_total > 0
        ]
        rows_of.sort(key=lambda row: -row[2])
        for key, count, total in rows_of[:30]:
            print(f"{total / 40:9.2f} us/token {count / 40:7.1f} /token {total / count:8.2f} us  {key}")
        facts[f"kernels {rows}"] = rows_of[:60]
    (OUT / "profile.json").write_text(json.dumps(facts, indent=1))


def attention():
    """The attention kernel with other sizes of blocks and parts."""
    sys.path[:0] = [str(HERE / "src")]
    import torch
    from triton.testing import do_bench

    from bmtrain.kernels import cached_attention as room

    found = []
    for rows, capacity in ((1, 384), (1, 4096), (1, 32768), (64, 384), (64, 4096)):
        query = torch.randn(rows, 32, 64, device="cuda", dtype=torch.bfloat16)
        keys, values = torch.randn(2, rows, 8, capacity, 64, device="cuda", dtype=torch.bfloat16)
        reach = torch.tensor([[0], [capacity]], device="cuda").expand(2, rows).contiguous()
        for block in (32, 64, 128):
            for least in (128, 256, 512, 1024):
                room.BLOCK_KEYS, room.KEYS_OF_PROGRAM = block, least
                work = lambda: room.cached_attention_by_triton(query, keys, values, reach, 0.125)
                work()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    for _ in range(10):
                        work()
                found.append((rows, capacity, block, least, do_bench(graph.replay, rep=20) * 100))
                print("attention rows %d capacity %d block %d least %d: %.2f us" % found[-1])
    (OUT / "attention.json").write_text(json.dumps(found))


if __name__ == "__main__":
    if sys.argv[1:]:
        {"profile": profile, "attention": attention}[sys.argv[1]]()
        sys.exit()
    me = [sys.executable, __file__]
    part("tests", [sys.executable, "-m", "pytest", "-q", "-x", "--maxfail=6", "tests/gpu/test_generation.py"], 150)
    part("profile", [*me, "profile"], 70)
    part("benchmark", [sys.executable, "benchmarks/decoding.py", "--out", str(OUT)], 200)
    part("attention", [*me, "attention"], 60)
    for name in ("benchmark",):
        for line in (OUT / f"{name}.log").read_text().splitlines():
            if line.startswith("{"):
                record = json.loads(line)
                print({key: record.get(key) for key in
                       ("method", "rows", "generation", "tokens_per_s", "step_ms", "peak_gib",
                        "kept_mib", "failed") if key in record})
    print("\n".join(SUMMARY))
