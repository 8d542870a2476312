"""Does a model learn as well with smaller states of Adam, and what do they cost? On one GPU:

    python benchmarks/small_states.py --commit $(git rev-parse HEAD)

trains a GPT on the bytes of Python's standard library, once for each seed and form of the states,
from the same first weights and in the same order. Before that it steps a large set of bf16
parameters, which lies on the GPU, and a smaller one whose states are in host memory. Writes
`results/small-states-1gpu.json`; what failed is in it with its reason.
"""

from __future__ import annotations

import argparse
import gc
import pathlib
import statistics
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "src"))

from machine import machine, machine_from_outside
from reports import report_of, write
from tables import tables_of

import bmtrain as bmt
from models import Shape

ROOT = pathlib.Path(__file__).parents[1]
EXACT = "fp32"
# Arguments of AdamOptimizer.
FORMS: dict[str, dict[str, str]] = {
    EXACT: {},
    "8-bit moments": {"moments": "8bit"},
    "split masters": {"master_weights": "split"},
    "no masters": {"master_weights": "none"},
    "8-bit moments, split masters": {"moments": "8bit", "master_weights": "split"},
}
# The last is both of two, and says nothing about learning that they do not.
LEARNING = list(FORMS)[:4]
WIDTH = 4096  # of the matrices that are stepped
LAST = 50  # training losses are of single batches: so many are averaged
WARM = 2  # steps that are not timed

Record = dict[str, Any]


def text() -> torch.Tensor:
    """The bytes of Python's standard library: (n,) uint8."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    files = (path for path in sorted(root.rglob("*.py")) if "site-packages" not in path.parts)
    content = bytearray(b"".join(path.read_bytes() for path in files))
    return torch.frombuffer(content, dtype=torch.uint8)


class Rows:
    """Rows of bytes and of the bytes that follow them; the last twentieth is held out."""

    def __init__(self, length: int, batch: int) -> None:
        whole = text().to(bmt.device())
        cut = whole.numel() * 19 // 20
        self._learnt, self._held_out = whole[:cut], whole[cut:]
        self._length, self._batch = length, batch

    def drawn(self, generator: torch.Generator, is_held_out: bool = False) -> list[torch.Tensor]:
        """Inputs and targets, both (batch, length)."""
        source = self._held_out if is_held_out else self._learnt
        most = source.numel() - self._length
        begins = torch.randint(most, (self._batch, 1), generator=generator)
        places = (begins + torch.arange(self._length + 1)).to(bmt.device())
        rows = source[places].long()
        return [rows[:, :-1].contiguous(), rows[:, 1:].contiguous()]


def learn(shape: Shape, rows: Rows, seed: int, steps: int, form: dict[str, str]) -> Record:
    """Losses of a run, and of the held-out text at its end."""
    torch.manual_seed(seed)
    plain = shape.model()
    for param in plain.parameters():
        if param.dim() > 1:
            torch.nn.init.normal_(param, std=0.02)
    plain.to(bmt.device(), torch.bfloat16)
    blocks = [bmt.Block(block, use_checkpoint=False) for block in plain.blocks]
    plain.blocks = bmt.TransformerBlockList(blocks)  # type: ignore[assignment]
    model = bmt.BMTrainModelWrapper(plain)
    kind: Any = bmt.optim.AdamOptimizer
    optimizer = kind(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, **form)
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(
        optimizer, bmt.lr_scheduler.Cosine(optimizer, 1e-3, steps // 20, steps, num_iter=0)
    )
    generator, began = torch.Generator().manual_seed(seed), time.perf_counter()
    losses = []
    for _ in range(steps):
        manager.zero_grad()
        loss = model(*rows.drawn(generator))
        manager.backward(loss)
        manager.clip_grad_norm(optimizer.param_groups, 1.0)
        manager.step()
        losses.append(loss.detach())
    generator.manual_seed(0)
    with torch.no_grad():
        held_out = [model(*rows.drawn(generator, is_held_out=True)) for _ in range(10)]
    found = [loss.item() for loss in losses]
    return {
        "training": statistics.fmean(found[-LAST:]),
        "validation": statistics.fmean(loss.item() for loss in held_out),
        "seconds": round(time.perf_counter() - began, 2),
        "losses": [round(loss, 5) for loss in found],
    }


def all_learn(args: argparse.Namespace, began: float) -> list[Record]:
    """A record for each seed; no seed is begun that `--within` leaves no time for."""
    shape = Shape(args.layers, args.dim, args.dim // 64, args.seq, vocab=256)
    rows, records = Rows(args.seq, args.batch), []
    longest = 0.0
    for seed in args.seeds:
        before = time.perf_counter()
        if before + longest - began > args.within:
            print(f"seed {seed} and later ones are left out: {args.within} s are over")
            break
        kinds = {name: learn(shape, rows, seed, args.steps, FORMS[name]) for name in LEARNING}
        longest = max(longest, time.perf_counter() - before)
        records.append({"what": "small states losses", "seed": seed, "kinds": kinds})
    return records


def stepped(name: str, matrices: int, repeats: int, on_host: bool = False) -> list[Record]:
    """Time of a step of so many bf16 matrices of WIDTH x WIDTH, and memory of its states."""
    form, device = FORMS[name], bmt.device()
    base = memory()
    params = [
        torch.nn.Parameter(torch.zeros(WIDTH, WIDTH, dtype=torch.bfloat16, device=device))
        for _ in range(matrices)
    ]
    for param in params:
        param.grad = torch.randn(WIDTH, WIDTH, dtype=torch.bfloat16, device=device)
    before = memory()
    kind: Any = bmt.optim.AdamOffloadOptimizer if on_host else bmt.optim.AdamOptimizer
    optimizer = kind(params, lr=1e-3, weight_decay=0.1, **form)
    seconds = []
    for _ in range(WARM + repeats):
        bmt.synchronize()
        began = time.perf_counter()
        optimizer.step()
        bmt.synchronize()
        seconds.append(time.perf_counter() - began)
    numel = sum(param.numel() for param in params)
    states = [
        x
        for state in optimizer.state.values()
        for x in state.values()
        if isinstance(x, torch.Tensor)
    ]
    held, median = sum(x.nbytes for x in states), statistics.median(seconds[WARM:])
    # Gradients and weights in 16 bits; weights are read too where no fp32 master is.
    weights = 4 if form.get("master_weights", "fp32") == "fp32" else 6
    found = {
        "what": "small states step",
        "form": name,
        "on_host": on_host,
        "elements": numel,
        "ms": round(1000 * median, 3),
        "bytes_an_element": round(held / numel, 3),
        "gpu_bytes_an_element": round((memory() - before) / numel, 3),
        "weights_and_gradients_gib": round((before - base) / 2**30, 3),
        "terabytes_a_second": round((2 * held + weights * numel) / median / 1e12, 3),
    }
    print(found, flush=True)
    return [found]


def memory() -> int:
    """Bytes that tensors have on the GPU; 0 on a CPU."""
    if bmt.device().type == "cpu":
        return 0
    gc.collect()
    return torch.cuda.memory_allocated()


def attempted(work: Callable[..., list[Record]], facts: Record, *args: Any) -> list[Record]:
    """What `work(*args)` has measured, or the facts and why it has not; the rest goes on."""
    try:
        return work(*args)
    except Exception as error:
        traceback.print_exc()
        return [{**facts, "failed": repr(error)[:500]}]


def measured(args: argparse.Namespace) -> list[Record]:
    """All records."""
    began, records = time.perf_counter(), []
    for name in FORMS:
        facts = {"what": "small states step", "form": name, "on_host": False}
        records += attempted(stepped, facts, name, args.matrices, args.repeats)
    for name in (EXACT, "8-bit moments"):
        facts = {"what": "small states step", "form": name, "on_host": True}
        records += attempted(stepped, facts, name, args.host_matrices, 2, True)
    return records + attempted(all_learn, {"what": "small states losses"}, args, began)


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--dim", type=int, default=512, help="a multiple of 64")
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--matrices", type=int, default=90, help="to step, of 2^24 elements")
    parser.add_argument("--host-matrices", type=int, default=4, help="with states on the host")
    parser.add_argument("--repeats", type=int, default=10, help="steps that are timed")
    parser.add_argument("--within", type=float, default=140.0, help="seconds for all")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument(
        "--out", type=pathlib.Path, default=ROOT / "benchmarks/results/small-states-1gpu.json"
    )
    return parser.parse_args(arguments)


def main() -> None:
    """Measure all, write, show."""
    args = parsed()
    bmt.init_distributed(seed=0, compile=False)
    records = measured(args)
    facts = machine_from_outside() if torch.cuda.is_available() else machine("cpu")
    command = " ".join(["benchmarks/small_states.py", *sys.argv[1:]])
    report = report_of(records, commit=args.commit, command=command, machine=facts)
    write(report, args.out)
    print(tables_of(report))


if __name__ == "__main__":
    main()
