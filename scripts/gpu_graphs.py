"""CUDA graphs on two GPUs: tests, then speed. For one machine with two GPUs; results under $OUT.

python scripts/gpu_graphs.py tests     bitwise comparisons on two GPUs, both transports
python scripts/gpu_graphs.py gpt2      GPT-2 124M: ours, DDP, FSDP2; one GPU beside it
python scripts/gpu_graphs.py language  BERT-large and T5-base beside transformers under DDP
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import time
import traceback

ROOT = pathlib.Path(__file__).resolve().parent.parent
OUT = pathlib.Path(os.environ.get("OUT", "/tmp/gpu_graphs"))
DEADLINE = time.monotonic() + float(os.environ.get("SECONDS_LEFT", "280"))
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}:{ROOT / 'benchmarks'}",
    "OMP_NUM_THREADS": "4",
}


def run(name: str, command: list[str], limit: float, **more: str) -> tuple[int, float]:
    """Run a command with a time limit; its output goes to $OUT/name.log."""
    left = min(limit, DEADLINE - time.monotonic())
    if left < 10:
        print(f"{name}: no time left", flush=True)
        return -1, 0.0
    began = time.monotonic()
    log = OUT / f"{name}.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**ENVIRONMENT, **more},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(left)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            code = 124
    seconds = time.monotonic() - began
    print(f"{name}: exit {code} after {seconds:.0f} s", flush=True)
    if code:
        print("\n".join(log.read_text().splitlines()[-25:]), flush=True)
    return code, seconds


def torchrun(ranks: int) -> list[str]:
    """The words that start so many ranks."""
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={ranks}",
    ]


TESTS = (
    "test_every_way_of_training[2-auto-256]",
    "test_every_way_of_training[2-collective-8]",
    "test_what_ranks_do_together_is_never_captured",
    "test_every_kind_of_block[3-False-True-2]",
    "test_every_kind_of_block[3-True-True-2]",
    "test_every_kind_of_block[2-False-False-2]",
    "test_dropout[True-True-2]",
    "test_dropout[False-False-2]",
    "test_replays_take_no_memory[2]",
    "test_replays_never_make_the_host_wait[2]",
    "test_every_way_of_training[1-auto-8]",
    "test_errors_inside_a_capture_leave_everything_usable",
)


def tests() -> None:
    """One pytest for each: one that hangs does not take the others with it."""
    found = {}
    for number, test in enumerate(TESTS):
        code, seconds = run(
            f"test{number}",
            [sys.executable, "-m", "pytest", "-q", "-x", f"tests/gpu/test_graph.py::{test}"],
            60,
        )
        found[test] = {"exit": code, "seconds": round(seconds)}
    (OUT / "tests.json").write_text(json.dumps(found, indent=1))
    for test, outcome in found.items():
        print(f"{outcome['exit']:4} {outcome['seconds']:4} s  {test}")


def gpt2() -> None:
    """Tokens a second and GPU by batch size."""
    out = OUT / "gpt2.jsonl"
    table = OUT / "kernels.txt"
    common = ["--shape", "gpt2", "--batch", "8", "32", "--steps", "20", "--out", str(out)]
    program = str(ROOT / "benchmarks" / "throughput.py")
    runs = (
        ("ours-graph", 2, ["--backend", "bmtrain", "--cuda-graph", "--profile", str(table)], 60),
        ("ddp", 2, ["--backend", "plain"], 75),
        ("ours", 2, ["--backend", "bmtrain"], 60),
        ("ours-graph-1", 1, ["--backend", "bmtrain", "--cuda-graph"], 50),
        ("fsdp2", 2, ["--backend", "fsdp2"], 60),
        ("ours-graph-again", 2, ["--backend", "bmtrain", "--cuda-graph"], 50),
        ("ddp-graph", 2, ["--backend", "plain", "--cuda-graph"], 60),
    )
    for name, ranks, arguments, limit in runs:
        run(name, [*torchrun(ranks), program, *arguments, *common], limit)
    for line in out.read_text().splitlines() if out.exists() else ():
        r = json.loads(line)
        print(
            f"{r['gpus']} GPU  {r['backend']:8} graph={r['cuda_graph']!s:5} batch {r['batch']:3}  "
            f"{r['tokens_per_second_per_gpu']:8} tokens/s/GPU  {1000 * r['step_seconds']:7.2f} ms  "
            f"loss {r['loss']}  {r['allocated_gib']} GiB"
        )


def language() -> None:
    """Seconds of a step of BERT-large and T5-base."""
    program = str(ROOT / "benchmarks" / "language_models.py")
    for what in ("t5", "bert"):
        run(
            what, [*torchrun(2), program, "--what", what, "--name", what, "--folder", str(OUT)], 200
        )
        log = OUT / f"{what}.log"
        for line in log.read_text().splitlines() if log.exists() else ():
            if line.startswith("{"):
                print(line)


EVENTS = """
import torch
s, side = torch.cuda.Stream(), torch.cuda.Stream()
x, y = torch.zeros(2**22, device="cuda"), torch.ones(2**26, device="cuda")
source, z = torch.zeros(2**22, device="cuda"), torch.zeros(2**22, device="cuda")
done, ready = torch.cuda.Event(external=True), torch.cuda.Event(external=True)
graph = torch.cuda.CUDAGraph()
torch.cuda.synchronize()
with torch.cuda.graph(graph, stream=s):
    torch.cuda.current_stream().wait_event(ready)
    x.add_(source)
    done.record()
    for _ in range(100):
        y.mul_(1.0001)
for number in range(4):
    early, late = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(50):
            source.add_(0.02)  # a gather
        ready.record()
    graph.replay()
    with torch.cuda.stream(side):
        side.wait_event(done)
        z.copy_(x)  # a reduction
        early.record()
    late.record()
    torch.cuda.synchronize()
    print("replay", number, "source", source[0].item(), "x", x[0].item(), "z", z[0].item(),
          "ms before the end", round(early.elapsed_time(late), 3), flush=True)
"""


def events() -> None:
    """Whether other streams can wait for a point inside of a graph, and a graph for them."""
    run("events", [sys.executable, "-c", EVENTS], 40)
    print((OUT / "events.log").read_text())


def main() -> None:
    """Run what was named, and go on after an error."""
    OUT.mkdir(parents=True, exist_ok=True)
    parts = {"tests": tests, "gpt2": gpt2, "language": language, "events": events}
    for name in sys.argv[1:] or ["tests"]:
        try:
            parts[name]()
        except Exception:
            traceback.print_exc()


if __name__ == "__main__":
    main()
