r"""Run several backends on the same machine one after another; write JSON with machine, versions
and commit, a table and a plot.

make bench                               what fits this machine and its number of GPUs; then the
                                         programs without an option of as_written.py
make bench ARGS="--suite quick"          minutes
make bench ARGS="--suite as-written"     those programs alone
make bench ARGS="--list"                 the suites, and how long each takes here
make bench ARGS="--gpus 2 --suite 2.7b"  fewer GPUs than there are

Other comparisons are made of runs, whose words are arguments of throughput.py:

python benchmarks/compare.py --gpus 4 --name 13b \
    --run "--backend fsdp2 --shape 13b --batch 8 24 --recompute" \
    --run "--backend bmtrain --shape 13b --batch 8 24"
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import math
import pathlib
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from command_line import available, end_runs_too, facts, parser_of
from plot import draw
from reports import report_of, write
from runs import left_out, run
from suites import SUITES, Suite, chosen
from tables import failure_of, mode_of, tables_of

from options import from_words

AS_WRITTEN = "as-written"
SHORTEST = 40.0  # seconds: little is measured in less


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What makes one file of results: runs, each on every one of these numbers of GPUs; `command`
    makes it again.

    repeat: how often, the whole list again for each, so that a drift of the machine shows.
    """

    name: str
    counts: Sequence[int]
    runs: Sequence[str]
    repeat: int
    command: str


def job_of(suite: Suite, available: int, repeat: int | None) -> Job:
    """A suite on this machine; `repeat` in place of its own number."""
    counts = suite.counts(available)
    command = (
        f"make bench ARGS='--suite {suite.name} --gpus "
        f"{counts[-1]}{'' if repeat is None else f' --repeat {repeat}'}'"
    )
    runs = [
        words
        for words, options in zip(suite.runs, suite.options(), strict=True)
        if is_installed(options.backend)
    ]
    return Job(
        name=f"{suite.name}-{counts[-1]}gpu",
        counts=counts,
        runs=runs,
        repeat=suite.repeat if repeat is None else repeat,
        command=command,
    )


def is_installed(backend: str) -> bool:
    """All but DeepSpeed come with torch or this library."""
    return backend != "deepspeed" or importlib.util.find_spec("deepspeed") is not None


def measure(job: Job, args: argparse.Namespace) -> dict[str, Any]:
    """All runs of a job, said and written as they come; what would begin after --within is left
    out, and said to be.
    """
    records: list[dict[str, Any]] = []
    report = report_of(records, commit=args.commit, command=job.command, machine=facts(args))
    todo = [(count, words) for _ in range(job.repeat) for words in job.runs for count in job.counts]
    began = time.monotonic()
    for number, (count, words) in enumerate(todo, 1):
        print(
            f"[{job.name} {number}/{len(todo)}, {time.monotonic() - began:.0f} s] {count} "
            f"x {words}",
            flush=True,
        )
        left = args.within - (time.monotonic() - began)
        for record in (
            run(words, count, min(args.timeout, left))
            if left > SHORTEST
            else left_out(words, count, args.within)
        ):
            print("    " + in_a_line(record), flush=True)
            records.append(record)
        print(
            "".join(f"    note: {note}\n" for note in records[-1].get("notes", [])),
            end="",
            flush=True,
        )
        write(report, args.folder / f"{job.name}.json")
    return report


def in_a_line(record: dict[str, Any]) -> str:
    """What matters of a record, for the terminal."""
    head = f"{mode_of(record)}, {record['shape']}, batch {record['batch']}: "
    if failure_of(record):
        return head + failure_of(record)
    share = "" if record["mfu"] is None else f", MFU {record['mfu']:.1%}"
    return (
        f"{head}{record['tokens_per_second_per_gpu']} tokens/s a GPU{share}, loss {record['loss']}"
    )


def present(report: dict[str, Any], path: pathlib.Path) -> None:
    """Table and plot beside the numbers.

    They need no GPU: tables.py and plot.py make them of any such file.
    """
    table = tables_of(report)
    path.with_suffix(".md").write_text(table)
    print(f"\n{table}\n{path}, {path.with_suffix('.md').name}", flush=True)
    if importlib.util.find_spec("matplotlib") is None:
        print(
            "no plot: matplotlib is not installed; where it is, `python "
            f"benchmarks/plot.py {path}` draws it"
        )
    else:
        print(draw(report, path.with_suffix(".svg")))


def say_what_there_is(available: int) -> None:
    """For --list."""
    for suite in SUITES:
        counts = suite.counts(available)
        here = (
            f"about {suite.minutes(available):.0f} min with {counts} GPUs"
            if counts
            else f"needs {suite.least} GPUs"
        )
        print(f"{suite.name:19} {suite.about}; {len(suite.runs)} runs, {here}")
    about = "programs without an option beside others at their fastest; 1 and 2 GPUs"
    print(f"{AS_WRITTEN:19} {about}, about 40 min each")


def measure_as_written(args: argparse.Namespace, gpus: int) -> None:
    """The suites of as_written.py for one GPU and for two, each beside the results that are kept:
    what is more than 5 % slower is marked.
    """
    for count in (1, 2):
        if count <= gpus:
            path = args.folder / f"as-written-{count}gpu.json"
            words = ["--gpus", str(count), "--limit", f"{args.timeout:g}", "--out", str(path)]
            program = str(pathlib.Path(__file__).with_name("as_written.py"))
            command = [sys.executable, program, *words, "--warm", "--commit", args.commit]
            subprocess.run(command, check=True)
            print(tables_of(json.loads(path.read_text())), flush=True)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = parser_of(__doc__, timeout=900.0, more=(AS_WRITTEN,))
    parser.add_argument("--list", action="store_true", help="say which suites there are")
    parser.add_argument(
        "--repeat",
        type=int,
        help="measure everything so often, in turn; tables show medians and extremes",
    )
    parser.add_argument(
        "--within",
        type=float,
        default=math.inf,
        help="seconds that one suite may take: the rest is left out",
    )
    args = parser.parse_args()
    if (args.run is None) != (args.name is None):
        parser.error("--run and --name go together")
    if args.run and args.suite:
        parser.error("--run stands in place of a suite: leave out one of both")
    return args


def jobs_of(args: argparse.Namespace, gpus: int) -> list[Job]:
    """What the command line asks for."""
    if args.run:
        for words in args.run:
            from_words(words)  # better now than after an hour
        said = [
            f"benchmarks/compare.py --gpus {gpus} --name {args.name}",
            *(f"--run {shlex.quote(run)}" for run in args.run),
        ]
        said += [] if args.repeat is None else [f"--repeat {args.repeat}"]
        return [
            Job(
                name=args.name,
                counts=[gpus],
                runs=args.run,
                repeat=args.repeat or 1,
                command=" ".join(said),
            )
        ]
    suites = chosen(args.suite, gpus)
    if not all(is_installed(options.backend) for suite in suites for options in suite.options()):
        print("DeepSpeed is not installed: left out")
    minutes = sum(
        suite.minutes(gpus) / suite.repeat * (args.repeat or suite.repeat) for suite in suites
    )
    print(f"{', '.join(suite.name for suite in suites)}: about {minutes:.0f} minutes", flush=True)
    return [job_of(suite, gpus, args.repeat) for suite in suites]


def main() -> None:
    """Measure all that was asked for and save it, job by job."""
    args = parse()
    end_runs_too()
    if args.list:
        say_what_there_is(args.gpus or torch.cuda.device_count())
        return
    gpus = available(args)
    for job in jobs_of(args, gpus):
        present(measure(job, args), args.folder / f"{job.name}.json")
    if not args.run and (args.suite is None or AS_WRITTEN in args.suite):
        measure_as_written(args, gpus)


if __name__ == "__main__":
    main()
