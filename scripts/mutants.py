"""Plant faults in the source, one at a time, each in a copy of the tree, and see whether a test
notices.

    make mutants [ARGS="--path src/bmtrain/shard --count 12 --seed 0"]

A fault that no test notices is dead code or a missing test. The table is written to
docs/mutants.md; what stands there in the column "word" about a survivor is kept as long as the
fault is the same.
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import copy
import dataclasses
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

ROOT = pathlib.Path(__file__).parents[1]
TABLE = ROOT / "docs" / "mutants.md"
UNNOTICED = ("survived", "unreached")
COPIED = ("src", "tests", "examples", "scripts", "docs", "pyproject.toml", "README.md", "Makefile")
# Calls whose loss no test of values need notice at once: waits, releases, agreements.
GUARDS = re.compile(
    r"(^|_)(wait|waits|release|forget|fence|barrier|agree|attempt|flush|settle|discard|synchronize|mark_written|mark_set|"
    r"clear|detach|record|check|join|close|hold|drop|lend|finish)(_|$)|^_?check"
)
# Tests that stand near a folder: quick ones first. Random programs and idioms stand near all that
# computes.
QUICK = [
    "tests/unit/test_layout.py",
    "tests/unit/test_ring.py",
    "tests/unit/test_schedule.py",
    "tests/unit/test_exchange.py",
]
TRAINING = [
    "tests/ranks/test_idioms.py",
    "tests/ranks/test_blocks.py",
    "tests/ranks/test_wrapper.py",
    "tests/programs",
]
NEAREST = {
    "shard": [
        *QUICK,
        "tests/ranks/test_cleared_gradients.py",
        "tests/ranks/test_writes.py",
        "tests/ranks/test_parting.py",
        *TRAINING,
        "tests/ranks/test_placement.py",
        "tests/ranks/test_transport.py",
        "tests/ranks/test_stream_order.py",
        "tests/ranks/test_optim_gradients.py",
        "tests/ranks/test_overflow.py",
        "tests/ranks/test_tensor_parallel.py",
        "tests/ranks/test_pipeline.py",
        "tests/ranks/test_graph.py",
    ],
    "recompute": [
        "tests/unit/test_recompute_plan.py",
        "tests/ranks/test_replay.py",
        *TRAINING,
        "tests/ranks/test_recompute.py",
        "tests/ranks/test_inner_checkpoint.py",
        "tests/ranks/test_recompute_plans.py",
        "tests/ranks/test_recompute_memory.py",
        "tests/ranks/test_compile.py",
    ],
    "compile": [
        "tests/unit/test_fusions.py",
        "tests/unit/test_heads.py",
        "tests/unit/test_fp8.py",
        "tests/ranks/test_compile.py",
        "tests/ranks/test_fp8.py",
        "tests/ranks/test_compiled_dropout.py",
        "tests/ranks/test_compiled_models.py",
    ],
    "block": [
        "tests/ranks/test_binding.py",
        *TRAINING,
        "tests/ranks/test_replay.py",
        "tests/ranks/test_graph.py",
    ],
    "parallel": ["tests/unit/test_microbatch.py", "tests/ranks/test_pipeline.py"],
    "optim": [
        "tests/unit/test_adam.py",
        "tests/unit/test_loss_scale.py",
        "tests/ranks/test_optim.py",
        "tests/ranks/test_overflow.py",
        "tests/ranks/test_optim_gradients.py",
        *TRAINING,
        "tests/ranks/test_checkpoint.py",
        "tests/ranks/test_seeds.py",
    ],
    "distributed": [
        "tests/unit/test_topology.py",
        "tests/ranks/test_communication.py",
        "tests/ranks/test_parting.py",
        "tests/ranks/test_transport.py",
        "tests/ranks/test_tensor_parallel.py",
        *TRAINING,
    ],
    "runtime": [
        "tests/unit/test_utils.py",
        "tests/ranks/test_bad_input.py",
        "tests/ranks/test_default_device.py",
        "tests/ranks/test_communication.py",
        "tests/ranks/test_compat.py",
        *TRAINING,
    ],
    "checkpoint": [
        "tests/ranks/test_checkpoint.py",
        "tests/ranks/test_background_save.py",
        "tests/ranks/test_old_files.py",
    ],
    "inspect": ["tests/ranks/test_inspect.py", "tests/unit/test_inspect_format.py"],
    "loss": [
        "tests/unit/test_cross_entropy.py",
        "tests/unit/test_linear_cross_entropy.py",
        "tests/ranks/test_parallel_loss.py",
        "tests/ranks/test_linear_cross_entropy.py",
        "tests/ranks/test_token_mean.py",
    ],
    "lr_scheduler": ["tests/unit/test_lr_scheduler.py", "tests/unit/test_schedules.py"],
    "nn": [
        "tests/ranks/test_tensor_parallel.py",
        "tests/ranks/test_placement.py",
        "tests/ranks/test_seeds.py",
    ],
    "verification": ["tests/verification"],
}


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
class Result:
    """What became of a fault: killed by a test, survived, or unreached, where no test runs its line
    on a CPU.
    """

    fault: Fault
    outcome: str
    by: str
    seconds: float


@dataclasses.dataclass(frozen=True)
class TestFile:
    """Tests, and how long they take."""

    name: str
    seconds: float


def main() -> int:
    """Plant, test, write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--path",
        nargs="+",
        default=["src/bmtrain/shard"],
        help="folders or files of src/bmtrain (src/bmtrain/shard)",
    )
    parser.add_argument(
        "--count",
        type=int,
        default=12,
        help="how many faults of each, drawn from all that there are (12)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the draw (0)")
    parser.add_argument(
        "--tests", nargs="*", default=None, help="test files in place of the nearest"
    )
    parser.add_argument("--jobs", type=int, default=2, help="how many run beside each other (2)")
    parser.add_argument(
        "--list", action="store_true", help="print the faults drawn, and plant none"
    )
    args = parser.parse_args()
    faults = [fault for path in args.path for fault in drawn(path, args.count, args.seed)]
    if args.list:
        print("\n".join(map(str, faults)))
        return 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        base = pathlib.Path(folder, "base")
        copy_tree(ROOT, base)  # once: the files may be edited meanwhile
        how = f"--path {' '.join(args.path)} --count {args.count} --seed {args.seed}" + (
            f" --tests {' '.join(args.tests)}" if args.tests else ""
        )
        words = read_words()
        results: list[Result] = []
        with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
            groups = pool.map(lambda group: reaching(base, *group), grouped(faults, args.tests))
            reach = {fault: tests for group in groups for fault, tests in group.items()}
            for future in concurrent.futures.as_completed(
                [pool.submit(planted, base, fault, reach[fault]) for fault in faults]
            ):
                result = future.result()
                results = sorted(
                    [*results, result], key=lambda known: (known.fault.path, known.fault.first)
                )
                print(
                    f"{result.outcome:9s}{result.seconds:5.0f} s  {result.fault}  [{result.by}]",
                    flush=True,
                )
                write_table(results, how, words)  # what is known, should this be interrupted
    print(counted(results))
    return 0


def drawn(path: str, count: int, seed: int) -> list[Fault]:
    """A sample of all faults below a path, as many of each kind as there is room for, in a fixed
    order.
    """
    place = ROOT / path
    files = sorted(place.rglob("*.py")) if place.is_dir() else [place]
    by_kind: dict[str, list[Fault]] = {}
    for file in files:
        for fault in faults_of(file):
            by_kind.setdefault(fault.kind, []).append(fault)
    chosen: list[Fault] = []
    generator = random.Random(seed)
    piles = [generator.sample(pile, len(pile)) for _, pile in sorted(by_kind.items())]
    while len(chosen) < count and any(piles):
        for pile in piles:
            if pile and len(chosen) < count:
                chosen.append(pile.pop())
    return sorted(chosen, key=lambda fault: (fault.path, fault.first))


def faults_of(file: pathlib.Path) -> Iterator[Fault]:
    """Every fault that can be planted in a file, one statement or expression each."""
    text = file.read_text(encoding="utf-8")
    name = file.relative_to(ROOT).as_posix()
    for node in ast.walk(ast.parse(text)):
        for kind, new in edits(node):
            old = ast.get_source_segment(text, node)
            if old is not None and isinstance(node, ast.stmt | ast.expr):
                last = node.end_lineno or node.lineno
                yield Fault(name, kind, node.lineno, last, " ".join(old.split()), _spliced(new))


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


def tests_near(path: str) -> list[str]:
    """Of a file of src/bmtrain: those of its folder."""
    room = pathlib.PurePosixPath(path).parts[2]
    return NEAREST.get(room, ["tests/ranks"])


def copy_tree(source: pathlib.Path, target: pathlib.Path) -> None:
    """What the tests need of the repository."""
    target.mkdir(parents=True)
    for name in COPIED:
        if (source / name).is_dir():
            shutil.copytree(
                source / name, target / name, ignore=shutil.ignore_patterns("__pycache__")
            )
        elif (source / name).exists():
            shutil.copy2(source / name, target / name)


def grouped(
    faults: Sequence[Fault], tests: Sequence[str] | None
) -> Iterator[tuple[list[Fault], Sequence[str]]]:
    """Faults that the same tests stand near, and those tests."""
    groups: dict[tuple[str, ...], list[Fault]] = {}
    for fault in faults:
        groups.setdefault(tuple(tests or tests_near(fault.path)), []).append(fault)
    for near, found in groups.items():
        yield found, near


def reaching(
    base: pathlib.Path, faults: Sequence[Fault], tests: Sequence[str]
) -> dict[Fault, list[TestFile]]:
    """Of the test files those that run a fault's statement, the quickest first.

    The script ends if one fails without a fault.
    """
    found: dict[Fault, list[TestFile]] = {fault: [] for fault in faults}
    with tempfile.TemporaryDirectory(prefix="reach-") as folder:
        tree, traces = pathlib.Path(folder, "tree"), pathlib.Path(folder, "traces")
        copy_tree(base, tree)
        for path in {fault.path for fault in faults}:
            probes = {
                number: f"__import__('pathlib').Path({str(traces / str(number))!r}).touch()"
                for number, fault in enumerate(faults)
                if fault.path == path
            }
            file = tree / path
            file.write_text(
                with_probes(
                    file.read_text(encoding="utf-8"),
                    {faults[n].first: x for n, x in probes.items()},
                )
            )
        for test in tests:
            traces.mkdir()
            began = time.monotonic()
            outcome, by = _tested(tree, test, 3600.0)
            if outcome != "survived":
                sys.exit(f"the tests fail without a fault: {by}")
            reached = TestFile(test, time.monotonic() - began)
            for trace in traces.iterdir():
                found[faults[int(trace.name)]].append(reached)
            print(
                f"without a fault{reached.seconds:5.0f} s  {test}: reaches "
                f"{len(list(traces.iterdir()))}",
                flush=True,
            )
            shutil.rmtree(traces)
    return {fault: sorted(files, key=lambda file: file.seconds) for fault, files in found.items()}


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


def planted(base: pathlib.Path, fault: Fault, tests: Sequence[TestFile]) -> Result:
    """Run the tests that reach it on a copy of the tree with the fault in it, until the first
    fails.
    """
    if not tests:
        return Result(fault, "unreached", "", 0.0)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        tree = pathlib.Path(folder, "tree")
        copy_tree(base, tree)
        file = tree / fault.path
        file.write_text(with_fault(file.read_text(encoding="utf-8"), fault), encoding="utf-8")
        for test in tests:
            outcome, by = _tested(tree, test.name, 3 * test.seconds + 10)
            if outcome != "survived":
                break
    return Result(fault, outcome, by, time.monotonic() - began)


def _tested(tree: pathlib.Path, test: str, limit: float) -> tuple[str, str]:
    environment = {
        **os.environ,
        "PYTHONPATH": f"{tree / 'src'}{os.pathsep}{tree}",
        "OMP_NUM_THREADS": "1",
    }
    environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", test]
    process = subprocess.Popen(
        command,
        cwd=tree,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        printed, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the processes that tests have started, too
        process.communicate()
        return "hang", f"more than {limit:.0f} s"
    if process.returncode == 0:
        return "survived", ""
    found = re.findall(r"^(?:FAILED|ERROR) (\S+)", printed, re.MULTILINE)
    return "killed", found[0].partition("[")[0] if found else f"exit status {process.returncode}"


def write_table(results: list[Result], how: str, words: dict[tuple[str, str], str]) -> None:
    """docs/mutants.md."""
    lines = [
        "# Planted faults",
        "",
        f'Written by `make mutants ARGS="{how}"`: faults planted one at a time, and '
        "the test that noticed each. "
        f"{counted(results)}. A hang is noticed too: the tests take less than their "
        "limit without a fault. Unreached lines run on "
        "GPUs only, or in tests that stand further off.",
        "",
        "| where | fault | before | after | outcome | word |",
        "|---|---|---|---|---|---|",
    ]
    for result in results:
        fault = result.fault
        cells = [
            fault.path.removeprefix("src/bmtrain/") + f":{fault.first}",
            fault.kind,
            _code(fault.before),
            _code(fault.after),
        ]
        said = f"{result.outcome}: {result.by}" if result.by else result.outcome
        word = (
            words.get((fault.kind, _code(fault.before)), "") if result.outcome in UNNOTICED else ""
        )
        lines.append("| " + " | ".join([*cells, said, word]) + " |")
    TABLE.write_text("\n".join(lines) + "\n", encoding="utf-8")


def counted(results: list[Result]) -> str:
    """How many tests have noticed, of those whose lines they run."""
    reached = [result for result in results if result.outcome != "unreached"]
    killed = sum(result.outcome != "survived" for result in reached)
    return (
        f"{killed} of {len(reached)} were noticed, and {len(results) - len(reached)} were "
        "not reached"
    )


def read_words() -> dict[tuple[str, str], str]:
    """What has been said about survivors, by kind and code."""
    found: dict[tuple[str, str], str] = {}
    if not TABLE.exists():
        return found
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 6 and cells[4] in UNNOTICED:
            found[cells[1], cells[2]] = cells[5]
    return found


def _code(text: str) -> str:
    short = text if len(text) <= 90 else text[:87] + "..."
    return "`" + short.replace("|", "\\|").replace("`", "'") + "`"


if __name__ == "__main__":
    sys.exit(main())
