"""Plant faults in the source, one at a time, each in a copy of the tree, and see whether a test
notices.

    make mutants [ARGS="--rooms shard optim --count 10 --seed 34"]

A run of all tests with a probe in front of each fault says which tests reach it, and how long they
take. Then each fault is judged by those tests, the quickest first, until one notices: by those of
`make test`, and if it lives by those of `make test-long`. The table is written to docs/mutants.md;
what stands there in the column "word" about a fault that lives is kept as long as the fault is the
same. A fault that no test notices is dead code or a missing test.
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import contextlib
import copy
import dataclasses
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence

import pytest

ROOT = pathlib.Path(__file__).parents[1]
TABLE = ROOT / "docs" / "mutants.md"
COPIED = (
    "src",
    "tests",
    "examples",
    "scripts",
    "benchmarks",
    "docs",
    "pyproject.toml",
    "README.md",
    "README-zh.md",
    "CHANGELOG.md",
    "Makefile",
)
ROOMS = {
    **{
        name: f"src/bmtrain/{name}"
        for name in ("shard", "block", "optim", "checkpoint", "recompute", "distributed", "compile")
    },
    **{name: f"src/model_center/{name}" for name in ("layer", "model", "weights", "dataset")},
}
SPARE = 2  # how many times the count are drawn: some lie on lines that no test reaches on a CPU
# Calls whose loss no test of values need notice at once: waits, releases, agreements.
GUARDS = re.compile(
    r"(^|_)(wait|waits|release|forget|fence|barrier|agree|attempt|flush|settle|discard|synchronize|mark_written|mark_set|"
    r"clear|detach|record|check|join|close|hold|drop|lend|finish)(_|$)|^_?check"
)


@dataclasses.dataclass(frozen=True)
class Fault:
    """An edit of one file: the new text of the lines from `first` to `last`, in words, and
    where.
    """

    path: str
    kind: str
    first: int
    last: int
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.path}:{self.first} {self.kind}: {self.before} -> {self.after}"


@dataclasses.dataclass(frozen=True)
class Test:
    """A test that reaches a fault."""

    name: str
    seconds: float
    is_long: bool


@dataclasses.dataclass(frozen=True)
class Result:
    """What became of a fault.

    Attributes:
        outcome: "short" or "long", the suite that noticed it, or "lives".
        by: the test that did; of one that lives, how many tests were run.
        more: of one that lives, how many tests that reach it were not run for lack of time.
    """

    fault: Fault
    outcome: str
    by: str
    seconds: float
    more: int = 0


def main() -> int:
    """Draw, map, plant, write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rooms", nargs="+", default=list(ROOMS), choices=ROOMS)
    parser.add_argument("--count", type=int, default=10, help="faults of each room (10)")
    parser.add_argument("--seed", type=int, default=34, help="of the draw (34)")
    parser.add_argument("--jobs", type=int, default=2, help="how many run beside each other (2)")
    parser.add_argument(
        "--map", type=pathlib.Path, help="a file for the map: read if it is there, else written"
    )
    parser.add_argument(
        "--results", type=pathlib.Path, help="a file of results, read and added to: goes on there"
    )
    parser.add_argument(
        "--short-limit", type=float, default=3600.0, help="seconds of short tests a fault (3600)"
    )
    parser.add_argument(
        "--long-limit",
        type=float,
        default=600.0,
        help="seconds of long tests a fault (600; 0: none)",
    )
    parser.add_argument(
        "--faults", type=pathlib.Path, help="a file of faults, as --list prints them, drawn earlier"
    )
    parser.add_argument("--list", action="store_true", help="print the faults, and plant none")
    args = parser.parse_args()
    if args.faults:
        rows = map(json.loads, args.faults.read_text().splitlines())
        found = [located(Fault(**row)) for row in rows]
        faults = [fault for fault in found if fault is not None]
        gone = len(found) - len(faults)
        print(f"{gone} of {len(found)} faults have no place any more", file=sys.stderr)
    else:
        faults = [x for room in args.rooms for x in drawn(room, SPARE * args.count, args.seed)]
    if args.list:
        print("\n".join(json.dumps(dataclasses.asdict(fault)) for fault in faults))
        return 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        base = pathlib.Path(folder, "base")
        copy_tree(ROOT, base)  # once: the files may be edited meanwhile
        reach = mapped(base, faults, args.jobs, args.map, has_long=args.long_limit > 0)
        chosen = [
            fault
            for room in args.rooms
            for fault in [x for x in faults if x.path.startswith(ROOMS[room] + "/") and reach[x]][
                : args.count
            ]
        ]
        how = (
            f"--faults {args.faults}"
            if args.faults
            else f"--rooms {' '.join(args.rooms)} --count {args.count} --seed {args.seed}"
        )
        limits = {"short": args.short_limit, "long": args.long_limit}
        results = read_results(args.results, chosen)
        left = [fault for fault in chosen if fault not in {result.fault for result in results}]
        with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
            for future in concurrent.futures.as_completed(
                [pool.submit(judged, base, x, reach[x], limits) for x in left]
            ):
                result = future.result()
                results.append(result)
                print(
                    f"{result.outcome:6s}{result.seconds:5.0f} s  {result.fault}  [{result.by}]",
                    flush=True,
                )
                if args.results:
                    with args.results.open("a") as file:
                        file.write(json.dumps(dataclasses.asdict(result)) + "\n")
    results.sort(key=lambda known: chosen.index(known.fault))
    write_table(results, how, read_words())
    print(counted(results))
    return 0


def drawn(room: str, count: int, seed: int) -> list[Fault]:
    """A sample of all faults in the bodies of a room's functions, as many of each kind as there is
    room for, in an order of chance.
    """
    by_kind: dict[str, list[Fault]] = {}
    for file in sorted((ROOT / ROOMS[room]).rglob("*.py")):
        for fault in faults_of(file):
            by_kind.setdefault(fault.kind, []).append(fault)
    generator = random.Random(f"{seed}{room}")
    piles = [generator.sample(pile, len(pile)) for _, pile in sorted(by_kind.items())]
    chosen: list[Fault] = []
    while len(chosen) < count and any(piles):
        for pile in piles:
            if pile and len(chosen) < count:
                chosen.append(pile.pop())
    return chosen


def located(fault: Fault) -> Fault | None:
    """The same fault where its code is now; None where it is gone."""
    file = ROOT / fault.path
    same = [
        x
        for x in (faults_of(file) if file.exists() else ())
        if (x.kind, x.before, x.after) == (fault.kind, fault.before, fault.after)
    ]
    return min(same, key=lambda x: abs(x.first - fault.first), default=None)


def faults_of(file: pathlib.Path) -> Iterator[Fault]:
    """Every fault that can be planted in the functions of a file, one statement or expression
    each.
    """
    text = file.read_text(encoding="utf-8")
    name, tree = file.relative_to(ROOT).as_posix(), ast.parse(text)
    bodies = [
        (node.body[0].lineno, node.end_lineno or 0)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    for node in ast.walk(tree):
        for kind, new in edits(node):
            old = ast.get_source_segment(text, node)
            if old is not None and isinstance(node, ast.stmt | ast.expr):
                first, last = node.lineno, node.end_lineno or node.lineno
                if any(begin <= first and last <= end for begin, end in bodies):
                    yield Fault(name, kind, first, last, " ".join(old.split()), _spliced(new))


def edits(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """(kind of fault, what stands in the place of `node`)."""
    match node:
        case ast.Expr(value=ast.Call(func=function)) if GUARDS.search(_last_name(function)):
            yield "call removed", ast.Pass()
        case ast.BoolOp(op=op, values=values):
            yield (
                "and/or flipped",
                ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values),
            )
            yield "second half dropped", values[0]
        case ast.If(test=test, body=body, orelse=orelse) if not isinstance(test, ast.UnaryOp):
            yield "condition negated", ast.If(ast.UnaryOp(ast.Not(), test), body, orelse)
        case ast.BinOp(left=left, op=ast.Mult() | ast.Div()):
            yield "scale dropped", left
        case ast.Slice(lower=lower, upper=upper, step=step) if upper is not None:
            yield (
                "slice off by one",
                ast.Slice(lower, ast.BinOp(upper, ast.Sub(), ast.Constant(1)), step),
            )
        case ast.Compare(left=left, ops=[ast.Lt()], comparators=right):
            yield "comparison off by one", ast.Compare(left, [ast.LtE()], right)
        case ast.Compare(left=left, ops=[ast.GtE()], comparators=right):
            yield "comparison off by one", ast.Compare(left, [ast.Gt()], right)
        case ast.AugAssign(target=target, op=ast.Add(), value=value):
            yield "sum replaced", ast.Assign([copy.deepcopy(target)], value)


def _last_name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _spliced(new: ast.AST) -> str:
    return " ".join(ast.unparse(ast.fix_missing_locations(new)).split())


def with_fault(text: str, fault: Fault) -> str:
    """The file's text with the fault in it: the tree, edited, written out."""

    class Planter(ast.NodeTransformer):
        done = False

        def visit(self, node: ast.AST) -> ast.AST:
            if (
                not self.done
                and getattr(node, "lineno", 0) == fault.first
                and getattr(node, "end_lineno", 0) == fault.last
            ):
                source = ast.get_source_segment(text, node)
                if source is not None and " ".join(source.split()) == fault.before:
                    for kind, new in edits(node):
                        if kind == fault.kind:
                            self.done = True
                            return ast.copy_location(new, node)
            return self.generic_visit(node)

    tree = ast.fix_missing_locations(Planter().visit(ast.parse(text)))
    return ast.unparse(tree)


def copy_tree(source: pathlib.Path, target: pathlib.Path) -> None:
    """What the tests need of the repository."""
    target.mkdir(parents=True)
    for name in COPIED:
        if (source / name).is_dir():
            shutil.copytree(source / name, target / name)  # compiled modules save time, too
        elif (source / name).exists():
            shutil.copy2(source / name, target / name)


# Imported by the probes: which test runs is in the environment, also on ranks.
_REACHED = """import os
seen = set()
def at(*numbers):
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    for number in numbers:
        if (number, test) not in seen:
            seen.add((number, test))
            with open(f"{folder!s}/{os.getpid()}", "a") as file:
                file.write(f"{number} {test}" + chr(10))
"""


def mapped(
    base: pathlib.Path,
    faults: Sequence[Fault],
    jobs: int,
    kept: pathlib.Path | None,
    *,
    has_long: bool,
) -> dict[Fault, list[Test]]:
    """The tests that reach each fault, the quickest first; those of the long suite if it is to
    run.
    """
    if kept is not None and kept.exists():
        rows = json.loads(kept.read_text())
        known = {Fault(**row["fault"]): [Test(**test) for test in row["tests"]] for row in rows}
        if set(faults) <= set(known):
            return {fault: known[fault] for fault in faults}
    with tempfile.TemporaryDirectory(prefix="reach-") as folder:
        tree, traces = pathlib.Path(folder, "tree"), pathlib.Path(folder, "traces")
        traces.mkdir()
        copy_tree(base, tree)
        (tree / "src" / "_reached.py").write_text(f"folder = {str(traces)!r}\n" + _REACHED)
        by_file: dict[str, dict[int, list[int]]] = {}
        for number, fault in enumerate(faults):
            by_file.setdefault(fault.path, {}).setdefault(fault.first, []).append(number)
        for path, lines in by_file.items():
            calls = {
                line: f"__import__('_reached').at({', '.join(map(str, numbers))})"
                for line, numbers in lines.items()
            }
            file = tree / path
            file.write_text(with_probes(file.read_text(encoding="utf-8"), calls))
        took = _timed(tree, jobs, "not long", is_long=False)
        if has_long:
            took |= _timed(tree, jobs, "long", is_long=True)
        reached: dict[Fault, set[str]] = {fault: set() for fault in faults}
        for trace in traces.iterdir():
            for line in trace.read_text().splitlines():
                place, _, test = line.partition(" ")
                reached[faults[int(place)]].add(test)
    reach = {
        fault: sorted((took[test] for test in tests if test in took), key=lambda x: x.seconds)
        for fault, tests in reached.items()
    }
    if kept is not None:
        rows = [
            {"fault": dataclasses.asdict(fault), "tests": [dataclasses.asdict(x) for x in tests]}
            for fault, tests in reach.items()
        ]
        kept.write_text(json.dumps(rows))
    return reach


def _timed(tree: pathlib.Path, jobs: int, suite: str, *, is_long: bool) -> dict[str, Test]:
    """Run a suite with the probes: its tests, and how long each takes."""
    options = ["-m", suite, "-n", str(jobs), "--dist=worksteal", "--durations=0", "-vv"]
    left_out = ["--ignore=tests/gpu", "--ignore=tests/ray_train", "--ignore=tests/arch"]
    printed, _ = _pytest(tree, [*options, *left_out], limit=4 * 3600.0)
    found = {}
    for seconds, name in re.findall(r"^([\d.]+)s call +(\S.*)$", printed, re.MULTILINE):
        if str(tree) not in name:  # else it has another name in every copy
            found[name.strip()] = Test(name.strip(), float(seconds), is_long)
    print(f"{suite}: {len(found)} tests; {printed.strip().splitlines()[-1]}", flush=True)
    return found


def with_probes(text: str, probes: Mapping[int, str]) -> str:
    """The file's text with a statement in front of the innermost one at each of these lines."""
    tree = ast.parse(text)
    for line, probe in probes.items():
        found: tuple[list[ast.stmt], ast.stmt] | None = None
        for node in ast.walk(tree):  # from outside inwards
            for block in (value for _, value in ast.iter_fields(node) if isinstance(value, list)):
                held = [
                    x
                    for x in block
                    if isinstance(x, ast.stmt) and x.lineno <= line <= (x.end_lineno or x.lineno)
                ]
                found = (block, held[-1]) if held else found
        if found is not None:
            found[0].insert(found[0].index(found[1]), ast.parse(probe).body[0])
    return ast.unparse(ast.fix_missing_locations(tree))


def judged(
    base: pathlib.Path, fault: Fault, tests: Sequence[Test], limits: Mapping[str, float]
) -> Result:
    """Run the tests that reach it on a copy of the tree with the fault in it, until one fails;
    of each suite as many as are begun in so many seconds, the quickest first.
    """
    began, num_run = time.monotonic(), 0
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        tree = pathlib.Path(folder, "tree")
        copy_tree(base, tree)
        file = tree / fault.path
        file.write_text(with_fault(file.read_text(encoding="utf-8"), fault), encoding="utf-8")
        for suite, limit in limits.items():
            own = [test for test in tests if test.is_long == (suite == "long")]
            own = [x for i, x in enumerate(own) if sum(y.seconds for y in own[:i]) < limit]
            if not own:
                continue
            by = _noticed(tree, own)
            if by is not None:
                return Result(fault, suite, by, time.monotonic() - began)
            num_run += len(own)
    seconds, more = time.monotonic() - began, len(tests) - num_run
    return Result(fault, "lives", f"{num_run} tests", seconds, more)


def _noticed(tree: pathlib.Path, tests: Sequence[Test]) -> str | None:
    """The first test that fails; None if none does."""
    names = tree / "names.txt"
    names.write_text("\n".join(test.name for test in tests))
    limit = 60.0 + 5 * max(test.seconds for test in tests)
    exits = ("faulthandler_exit_on_timeout=true", f"faulthandler_timeout={limit}")
    options = ["-q", "-x", *(word for x in exits for word in ("-o", x)), f"@{names}"]
    printed, code = _pytest(tree, options, limit * len(tests))
    found = re.findall(r"^(?:FAILED|ERROR) (\S+)", printed, re.MULTILINE)
    if code == 0:
        return None
    if found:
        return found[0].partition("[")[0]
    if code == pytest.ExitCode.USAGE_ERROR:
        raise RuntimeError(printed)  # a name that no test has
    is_hung = code is None or "Timeout (" in printed
    return f"a hang: more than {limit:.0f} s" if is_hung else f"exit status {code}"


def _pytest(tree: pathlib.Path, options: Sequence[str], limit: float) -> tuple[str, int | None]:
    """What pytest prints, and its exit status; None after a hang."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{tree / 'src'}{os.pathsep}{tree}",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    with tempfile.TemporaryFile("w+") as file:  # a process that is left would hold a pipe open
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options],
            cwd=tree,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(limit)
        code = process.poll()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the processes that tests have started, too
        process.wait()
        file.seek(0)
        return file.read(), code


def read_results(path: pathlib.Path | None, faults: Sequence[Fault]) -> list[Result]:
    """What an interrupted run has found."""
    if path is None or not path.exists():
        return []
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    found = [Result(**{**row, "fault": Fault(**row["fault"])}) for row in rows]
    return [result for result in found if result.fault in faults]


def write_table(results: list[Result], how: str, words: dict[tuple[str, str], str]) -> None:
    """docs/mutants.md; its later sections, which are written by hand, stay."""
    known = TABLE.read_text(encoding="utf-8") if TABLE.exists() else ""
    _, heading, sections = known.partition("\n## ")
    lines = [
        "# Planted faults",
        "",
        f'Written by `make mutants ARGS="{how}"`: faults planted one at a time, in lines that a '
        f"test reaches on a CPU, and the suite and the test that noticed each. {counted(results)}. "
        "A hang is noticed too: the tests take less than a fifth of their limit without a fault.",
        "",
        "| where | fault | before | after | noticed by | word |",
        "|---|---|---|---|---|---|",
    ]
    for result in results:
        fault, lives = result.fault, result.outcome == "lives"
        where = fault.path.removeprefix("src/") + f":{fault.first}"
        more = f", {result.more} not run" if result.more else ""
        noticed = f"lives: {result.by}{more}" if lives else f"{result.outcome}: {result.by}"
        word = words.get((fault.kind, _code(fault.before)), "") if lives else ""
        cells = [where, fault.kind, _code(fault.before), _code(fault.after), noticed, word]
        lines.append("| " + " | ".join(cells) + " |")
    TABLE.write_text("\n".join(lines) + "\n" + heading + sections, encoding="utf-8")


def counted(results: list[Result]) -> str:
    """How many were noticed by which suite."""
    short = sum(result.outcome == "short" for result in results)
    long = sum(result.outcome == "long" for result in results)
    return (
        f"Of {len(results)}, `make test` noticed {short}, `make test-long` {long} more, and "
        f"{len(results) - short - long} live"
    )


def read_words() -> dict[tuple[str, str], str]:
    """What has been said about faults that live, by kind and code."""
    found: dict[tuple[str, str], str] = {}
    if not TABLE.exists():
        return found
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 6 and cells[5]:
            found[cells[1], cells[2]] = cells[5]
    return found


def _code(text: str) -> str:
    short = text if len(text) <= 90 else text[:87] + "..."
    return "`" + short.replace("|", "\\|").replace("`", "'") + "`"


if __name__ == "__main__":
    sys.exit(main())
