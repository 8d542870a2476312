r"""Seconds to the end of the first step, with the compiler's caches cold and warm.

python benchmarks/startup.py --suite gpt2 2.7b --timeout 300 --commit $(git rev-parse HEAD)
python benchmarks/startup.py --backends bmtrain              ours alone, in all suites that fit
python benchmarks/startup.py --run "--backend bmtrain --shape gpt2 --batch 8"

Every run of a suite that compiles is started twice, with its smallest batch and caches in a new
folder: the first start finds nothing there, the second what the first has left. Seconds count from
the beginning of a rank's process. Beside them is how many files of machine code each start has
added to the folder: none, where it has compiled nothing. Writes `results/startup-<GPUs>gpu.json`
after each run; a run that fails or takes more than --timeout is in it with the reason.
"""

from __future__ import annotations

import argparse
import pathlib
import shlex
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from command_line import available, end_runs_too, facts, parser_of
from reports import report_of, write
from runs import run
from suites import chosen
from tables import failure_of, startup_cells, table_of

from options import BACKENDS, from_words

CODE = {".cubin", ".hsaco", ".so"}  # endings of what compilers make


class Start(NamedTuple):
    """A run of throughput.py.

    Attributes:
        suite: the suite that has it; "-" if it was given by --run.
        gpus: how many it uses.
        words: arguments of throughput.py, for one step with one batch.
    """

    suite: str
    gpus: int
    words: str


def first_step_of(words: str) -> str:
    """The arguments for the first step alone: the smallest batch, no profile."""
    batch = min(from_words(words).batch)
    kept = [word for word in shlex.split(words) if word != "--profile"]
    return shlex.join([*kept, "--batch", str(batch), "--warmup", "0", "--steps", "1"])


def starts_of(args: argparse.Namespace, gpus: int) -> Iterator[Start]:
    """What the command line asks for, of what compiles; each once for every suite."""
    if args.run:
        lines = [("-", gpus, words) for words in args.run]
    else:
        lines = [
            (suite.name, suite.counts(gpus)[-1], words)
            for suite in chosen(args.suite, gpus)
            for words in suite.runs
        ]
    for suite, count, words in dict.fromkeys(lines):
        options = from_words(words)
        if options.compile and options.backend in args.backends:
            yield Start(suite, count, first_step_of(words))


def code_in(folder: pathlib.Path) -> set[pathlib.Path]:
    """The files of machine code below it."""
    return {path for path in folder.rglob("*") if path.suffix in CODE}


def measure(start: Start, timeout: float) -> dict[str, Any]:
    """The record of both starts; up to the one that fails."""
    options = from_words(start.words)
    record: dict[str, Any] = {
        "what": "start-up",
        "suite": start.suite,
        **options.mode(),
        "gpus": start.gpus,
        "seq": options.geometry.seq,
        "batch": options.batch[0],
    }
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        variables = {"TORCHINDUCTOR_CACHE_DIR": name, "TRITON_CACHE_DIR": str(folder / "triton")}
        for state in ("cold", "warm"):
            before = code_in(folder)
            (found,) = run(start.words, start.gpus, timeout, variables)
            if failure_of(found):
                return record | {"failure": f"cache {state}: {failure_of(found)}"}
            record[f"{state}_s"] = found["first_step_s"]
            record[f"{state}_compiled"] = len(code_in(folder) - before)
            record[f"{state}_loss"] = found["loss"]
    return record


def command_of(args: argparse.Namespace, gpus: int) -> str:
    """What measures this again, without the places of this machine."""
    words = ["benchmarks/startup.py", "--gpus", str(gpus), "--timeout", f"{args.timeout:g}"]
    words += ["--suite", *args.suite] if args.suite else []
    words += ["--backends", *args.backends] if args.backends != list(BACKENDS) else []
    return shlex.join([*words, *(word for run in args.run or () for word in ("--run", run))])


def measure_all(starts: Sequence[Start], report: dict[str, Any], args: argparse.Namespace) -> None:
    """One start after another; all that was measured is written after each."""
    for number, start in enumerate(starts, 1):
        print(f"[{number}/{len(starts)}] {start.suite}: {start.gpus} x {start.words}", flush=True)
        record = measure(start, args.timeout)
        print(table_of(startup_cells([record])), flush=True)
        report["records"].append(record)
        write(report, args.folder / f"{args.name}.json")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = parser_of(__doc__, timeout=300.0)
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=list(BACKENDS))
    return parser.parse_args()


def main() -> None:
    """Measure, write, say."""
    args = parse()
    end_runs_too()
    gpus = available(args)
    args.name = args.name or f"startup-{gpus}gpu"
    command = command_of(args, gpus)
    report = report_of([], commit=args.commit, command=command, machine=facts(args))
    measure_all(list(starts_of(args, gpus)), report, args)
    print(table_of(startup_cells(report["records"])), args.folder / f"{args.name}.json", sep="\n")


if __name__ == "__main__":
    main()
