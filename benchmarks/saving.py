"""How long training stands still for a checkpoint, and how long until it is on the disk.

    python benchmarks/saving.py --name saving-1gpu --commit $(git rev-parse HEAD)

trains a GPT in bf16 with Adam and saves it while it trains: by `bmtrain.CheckpointManager`, in the
background and not, and by `torch.distributed.checkpoint.async_save` of the same tensors, as it
comes and with page-locked staging buffers. Each method has a process of its own and saves twice
where it keeps memory: the first time that is new. Every rank saves its own part: with one rank that
is all of it.

Of each save: `stands_still_s` is what all steps until the checkpoint is written took longer than
the median of those before; `call_s` the call, `next_step_s` what the step after it took longer,
`written_s` the time until the checkpoint counts, `host_gb` the growth of resident memory (10^9
bytes).
"""

from __future__ import annotations

import argparse
import json
import pathlib
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import psutil
import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import async_save

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "src"))

from machine import machine, machine_from_outside

import bmtrain as bmt
from bmtrain.checkpoint.state import model_parts, optimizer_parts
from models import Shape

NUM_BEFORE, MOST_STEPS = 8, 2000


class Trainer:
    """A GPT and its step."""

    def __init__(self, args: argparse.Namespace) -> None:
        shape = Shape(args.layers, args.dim, args.dim // 128, args.length)
        self.num_parameters = shape.num_parameters
        with torch.device("meta"):
            model = shape.model().bfloat16()
        blocks = [bmt.Block(block, use_checkpoint=args.recompute) for block in model.blocks]
        model.blocks = bmt.TransformerBlockList(blocks)  # type: ignore[assignment]
        self.model = bmt.BMTrainModelWrapper(model)
        bmt.init_parameters(self.model)
        self.manager = bmt.optim.OptimManager()
        self.manager.add_optimizer(bmt.optim.AdamOptimizer(self.model.parameters(), lr=1e-5))
        rows = (args.sequences, args.length)
        self.ids = torch.randint(shape.vocab, rows, device=bmt.device())

    def step(self) -> float:
        """Seconds of one step, the device's end included."""
        begin = time.perf_counter()
        self.manager.zero_grad()
        self.manager.backward(self.model(self.ids, self.ids))
        self.manager.step()
        bmt.synchronize()
        return time.perf_counter() - begin


class Method(ABC):
    """A way to save."""

    num_saves = 2

    def __init__(self, trainer: Trainer, folder: pathlib.Path) -> None:
        self.trainer, self.folder = trainer, folder

    @abstractmethod
    def save(self, number: int) -> None: ...

    @abstractmethod
    def before_step(self) -> None:
        """Wait for what must be done before weights are written."""

    @abstractmethod
    def is_written(self) -> bool: ...


class Ours(Method):
    """By threads, while it trains."""

    background = True

    def __init__(self, trainer: Trainer, folder: pathlib.Path) -> None:
        super().__init__(trainer, folder)
        self.checkpoints = bmt.CheckpointManager(folder, keep=1, background=self.background)
        self.checkpoints.reserve(trainer.model, trainer.manager)

    def save(self, number: int) -> None:
        self.writing = self.checkpoints.save(number, self.trainer.model, self.trainer.manager)

    def before_step(self) -> None:
        """The optimizer's step does so itself."""

    def is_written(self) -> bool:
        if self.writing.done:
            self.writing.wait()
        return self.writing.done


class Blocking(Ours):
    """While training stands still."""

    background = False


class Dcp(Method):
    """DCP's asynchronous save of this rank's tensors."""

    num_saves = 1  # it reuses nothing
    stager: DefaultStager | None = None

    def save(self, number: int) -> None:
        parts, _ = model_parts(self.trainer.model, None)
        parts += optimizer_parts(self.trainer.manager)[0]
        state = {f"{bmt.rank()}/{part.section}/{part.name}": part.values for part in parts}
        target = self.folder / f"step-{number:08d}"
        self.answer: Any = async_save(state, checkpoint_id=target, async_stager=self.stager)

    def before_step(self) -> None:
        staged = getattr(self.answer, "staging_completion", None)
        if staged is not None:
            staged.result()

    def is_written(self) -> bool:
        answer = getattr(self.answer, "upload_completion", self.answer)
        if answer.done():
            answer.result()
        return bool(answer.done())


class StagedDcp(Dcp):
    """With copies into page-locked memory that a thread makes."""

    num_saves = 2

    def __init__(self, trainer: Trainer, folder: pathlib.Path) -> None:
        super().__init__(trainer, folder)
        self.stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=True,
                use_shared_memory=False,
                use_async_staging=True,
                use_non_blocking_copy=True,
            )
        )


METHODS: dict[str, Callable[[Trainer, pathlib.Path], Method]] = {
    "ours": Ours,
    "ours, blocking": Blocking,
    "dcp": Dcp,
    "dcp, staged": StagedDcp,
}


def measure(args: argparse.Namespace) -> None:
    """One method in this process; a line of JSON for each save."""
    bmt.init_distributed(seed=0)
    trainer = Trainer(args)
    for _ in range(3):
        trainer.step()
    folder = pathlib.Path(args.folder)
    method = METHODS[args.method](trainer, folder)
    time.sleep(args.reserve_s)
    usual = statistics.median(trainer.step() for _ in range(NUM_BEFORE))
    for number in range(1, method.num_saves + 1):
        for path in folder.glob("step-*"):
            shutil.rmtree(path)
        resident = psutil.Process().memory_info().rss
        begin = time.perf_counter()
        method.save(number)
        call = time.perf_counter() - begin
        extra: list[float] = []
        while not method.is_written() and len(extra) < MOST_STEPS:
            waited = time.perf_counter()
            method.before_step()
            extra.append(time.perf_counter() - waited + trainer.step() - usual)
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        record = {
            "what": "saving",
            "method": args.method,
            "save": number,
            "parameters": trainer.num_parameters,
            "gigabytes": round(size / 1e9, 2),
            "step_s": round(usual, 3),
            "call_s": round(call, 3),
            "next_step_s": round(extra[0], 3) if extra else 0.0,
            "stands_still_s": round(call + sum(extra), 3),
            "steps_meanwhile": len(extra),
            "written_s": round(time.perf_counter() - begin, 2),
            "host_gb": round((psutil.Process().memory_info().rss - resident) / 1e9, 2),
        }
        print(json.dumps(record), flush=True)


def main() -> None:
    """Measure each method, and save the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=18)
    parser.add_argument("--dim", type=int, default=4096)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--reserve-s", type=float, default=40.0, help="before the first save")
    parser.add_argument("--folder", help="on the disk to be measured (default: a temporary one)")
    parser.add_argument("--only", nargs="*", default=list(METHODS), choices=METHODS)
    parser.add_argument("--name", default="saving")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--out", default=str(pathlib.Path(__file__).parent / "results"))
    parser.add_argument("--method", choices=METHODS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.method is not None:
        measure(args)
        return
    records = []
    facts = machine_from_outside() if torch.cuda.is_available() else machine("cpu")
    for method in args.only:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            command = [sys.executable, __file__, *sys.argv[1:], "--method", method]
            done = subprocess.run(
                [*command, "--folder", folder], stdout=subprocess.PIPE, text=True, check=False
            )
        for line in done.stdout.splitlines():
            if line.startswith("{"):
                print(line, flush=True)
                records.append(json.loads(line))
        if done.returncode:
            reason = f"exit code {done.returncode}, see the output"
            records.append({"what": "saving", "method": method, "failed": reason})
        result = {
            "commit": args.commit,
            "date": time.strftime("%Y-%m-%d"),
            "machine": facts,
            "command": shlex.join(["benchmarks/saving.py", *sys.argv[1:]]),
            "records": records,
        }
        target = pathlib.Path(args.out, f"{args.name}.json")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
