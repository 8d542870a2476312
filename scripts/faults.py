"""Let faults happen to tiny programs at two ranks, resume them, and write what became of each.

    make faults [ARGS="--kind SIGKILL --moment saving --kills 10"]
    make faults ARGS="--rest --kills 0 --seconds 240"   # what of the table is red or missing

The table goes to benchmarks/results/faults.md and faults.json, or where --out says. The rule for
green and red is in it. Exit status: 0 if nothing is red, 1 otherwise.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import pathlib
import shutil
import sys
import tempfile
import threading
import time

from scripts.fault_matrix.cells import Bench, Cell, cells
from scripts.fault_matrix.jobs import ROOT
from scripts.fault_matrix.kills import Chain, Kill
from scripts.fault_matrix.programs import GPT2, TRAIN, Program, make_programs
from scripts.fault_matrix.tables import Table, commit, read

# Longer runs, which can be killed a few times each.
LONG = {GPT2: ["--steps", "120"], TRAIN: ["--train-iters", "90"]}


class Matrix:
    """What is found, written after each cell, should this be interrupted.

    Args:
        before: a table whose results stay, but for those of cells that are run again.
    """

    def __init__(self, out: pathlib.Path, before: Table) -> None:
        self.table = before
        self._out, self._lock = out, threading.Lock()
        self._results = {result.key: result for result in before.results}
        self._again = list(before.again)
        self._kills: list[Kill] = list(before.kills)
        self._broken: list[str] = list(before.broken)
        self._num_runs = before.num_runs
        self._commit = commit()

    def run(self, bench: Bench, cell: Cell, number: int, end: float) -> None:
        """One cell, unless it is too late."""
        if time.monotonic() > end:
            return
        result = dataclasses.replace(bench.result(cell, number), commit=self._commit)
        verdict = "green" if result.is_green else f"RED: {result.wrong}"
        with self._lock:
            earlier = self._results.get(result.key)
            if earlier is not None and not earlier.is_green:
                self._again.append(earlier)
            self._results[result.key] = result
            who = "all" if result.rank is None else result.rank
            print(f"{result.program} {cell.kind}, {cell.moment}, {who}: {verdict}", flush=True)
            self._write()

    def kill(self, program: Program, folder: pathlib.Path, count: int, seed: int) -> None:
        """So many kills at random times."""
        chain = Chain(program, LONG[program.name], folder / f"kills-{program.folder}", seed)
        found = chain.kills(count)
        with self._lock:
            self._kills += found
            self._broken += chain.wrong
            self._num_runs += chain.num_runs
            wrong = [text for kill in found for text in kill.wrong] + chain.wrong
            print(f"{program.name}: {len(found)} kills, wrong: {wrong or 'nothing'}", flush=True)
            self._write()

    def _write(self) -> None:
        order = {cell.key: number for number, cell in enumerate(cells())}
        results = sorted(self._results.values(), key=lambda one: (one.program, order[one.key[1:]]))
        self.table = Table(
            results, tuple(self._kills), tuple(self._broken), self._num_runs, tuple(self._again)
        )
        self.table.write(self._out)


def main() -> int:
    """Run the matrix, write the table."""
    args = parse_args()
    chosen = {number: cell for number, cell in enumerate(cells()) if is_chosen(cell, args)}
    if args.list:
        for cell in chosen.values():
            print(f"{cell.kind}, {cell.moment}, {'all' if cell.rank is None else cell.rank}")
        return 0
    folder = pathlib.Path(tempfile.mkdtemp(prefix="faults-"))
    programs = [one for one in make_programs(folder / "data") if args.program in one.name]
    is_there = args.rest and args.out.with_suffix(".json").exists()
    before = read(args.out) if is_there else Table([], [], [], 0)
    matrix = Matrix(args.out, before)
    green = {result.key for result in before.results if result.is_green}
    end = time.monotonic() + args.seconds
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        futures = []
        killed = [program for program in programs if args.kills and program.name in LONG]
        for program in killed:
            count = args.kills // len(killed)
            futures.append(pool.submit(matrix.kill, program, folder, count, args.seed))
        asked = [
            (program, number, cell)
            for number, cell in chosen.items()
            for program in programs
            if program.name in cell.programs and (program.name, *cell.key) not in green
        ]
        names = {program.name for program, _, _ in asked}
        benches = {
            one.name: Bench(one, folder / one.folder) for one in programs if one.name in names
        }
        for program, number, cell in asked:
            futures.append(pool.submit(matrix.run, benches[program.name], cell, number, end))
        for future in concurrent.futures.as_completed(futures):
            future.result()
    if matrix.table.red == 0:
        shutil.rmtree(folder)
    print(f"{matrix.table.red} red: see {args.out}.md" + (f", {folder}" if folder.exists() else ""))
    return int(matrix.table.red > 0)


def is_chosen(cell: Cell, args: argparse.Namespace) -> bool:
    """Whether the arguments ask for it."""
    return args.kind in cell.kind and args.moment in cell.moment


def parse_args() -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kind", default="", help="faults whose names contain this")
    parser.add_argument("--moment", default="", help="moments whose names contain this")
    parser.add_argument("--program", default="", help="programs whose paths contain this")
    parser.add_argument("--kills", type=int, default=100, help="at random times, in all (100)")
    parser.add_argument("--seed", type=int, default=0, help="of the kills (0)")
    parser.add_argument("--jobs", type=int, default=3, help="how many run beside each other (3)")
    parser.add_argument(
        "--rest",
        action="store_true",
        help="keep what is in the table at --out, and run the cells that are not green there",
    )
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="begin no cell after this time"
    )
    parser.add_argument("--list", action="store_true", help="print the cells, and run none")
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        default=ROOT / "benchmarks" / "results" / "faults",
        help="the table's path, without .md and .json",
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
