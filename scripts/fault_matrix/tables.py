"""The table of the matrix: JSON for programs, Markdown for people."""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import pathlib
import platform
import subprocess
from collections.abc import Sequence
from typing import Any

import torch
from scripts.fault_matrix.cells import LEFT_OUT, RULE, Result
from scripts.fault_matrix.jobs import ROOT
from scripts.fault_matrix.kills import Kill


def commit() -> str:
    """That of the source, as git describes it."""
    told = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return told.stdout.strip() or "unknown"


def machine() -> dict[str, Any]:
    """What the runs were made on."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": f"{platform.system()} {platform.machine()}, {_num_cores()} cores",
    }


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))


@dataclasses.dataclass(frozen=True)
class Table:
    """All that was found.

    Attributes:
        results: of the cells.
        kills: at random times.
        broken: what was wrong with whole runs that were killed.
        num_runs: how many runs were killed until they ended.
        again: earlier results, red ones, of cells that were run again.
    """

    results: Sequence[Result]
    kills: Sequence[Kill]
    broken: Sequence[str]
    num_runs: int
    again: Sequence[Result] = ()

    @property
    def red(self) -> int:
        """How many cells, kills and runs are not as expected."""
        cells = sum(not result.is_green for result in self.results)
        return cells + sum(bool(kill.wrong) for kill in self.kills) + len(self.broken)

    def write(self, path: pathlib.Path) -> None:
        """`path`.json and `path`.md."""
        content = {
            "machine": machine(),
            "rule": RULE,
            "left out": LEFT_OUT,
            "red": self.red,
            "cells": [
                {**dataclasses.asdict(result), "green": result.is_green} for result in self.results
            ],
            "run again": [dataclasses.asdict(result) for result in self.again],
            "kills": [dataclasses.asdict(kill) for kill in self.kills],
            "runs killed": {"runs": self.num_runs, "wrong": list(self.broken)},
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        path.with_suffix(".md").write_text("\n".join(self._lines()) + "\n", encoding="utf-8")

    def _lines(self) -> list[str]:
        facts = machine()
        kinds = {result.kind for result in self.results}
        by_commit = collections.Counter(result.commit for result in self.results)
        commits = ", ".join(f"{name} ({count} cells)" for name, count in by_commit.items())
        lines = [
            "# Faults",
            "",
            f"Written by `make faults`: {len(self.results)} cells ({len(kinds)} kinds of fault, "
            "three programs, two ranks under torchrun, the library's defaults) and "
            f"{len(self.kills)} kills at random times; {self.red} red. {facts['machine']}; Python "
            f"{facts['python']}, torch {facts['torch']}; commits {commits}.",
            "",
            RULE,
            "",
            "Left out:",
            "",
            *(f"* {what}: {why}." for what, why in LEFT_OUT.items()),
        ]
        by_program: dict[str, list[Result]] = collections.defaultdict(list)
        for result in self.results:
            by_program[result.program].append(result)
        for program, results in by_program.items():
            lines += ["", f"## {program}", "", *_rows(results)]
        if self.again:
            lines += ["", "## Run again", "", "Red at first, and run again since:", ""]
            lines += _rows(self.again)
        return [*lines, "", "## Kills at random times", "", *self._kill_lines()]

    def _kill_lines(self) -> list[str]:
        lines = [
            "SIGKILL at a random time after the start of the launcher; the run is resumed and "
            f"killed again until it ends. {self.num_runs} runs came to their end, "
            f"{len(self.broken)} of them with another record than the run that nobody killed, or "
            "with a damaged checkpoint.",
            "",
            "| program | target | kills | of these before the first step | longest end, s | most "
            "steps lost | red |",
            "|---|---|---|---|---|---|---|",
        ]
        groups: dict[tuple[str, str], list[Kill]] = collections.defaultdict(list)
        for kill in self.kills:
            groups[kill.program, kill.target].append(kill)
        for (program, target), kills in sorted(groups.items()):
            lost = [kill.lost for kill in kills if kill.lost is not None]
            cells = [
                program,
                target,
                len(kills),
                sum(kill.steps == 0 for kill in kills),
                f"{max(kill.seconds for kill in kills):.1f}",
                max(lost, default="-"),
                sum(bool(kill.wrong) for kill in kills),
            ]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
        wrong = [text for kill in self.kills for text in kill.wrong]
        return [*lines, *(f"\n* {text}" for text in [*wrong, *self.broken])]


def read(path: pathlib.Path) -> Table:
    """The table that `Table.write` has written."""
    content = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    for one in content["cells"]:
        del one["green"]
    return Table(
        [Result(**one) for one in content["cells"]],
        [Kill(**one) for one in content["kills"]],
        content["runs killed"]["wrong"],
        content["runs killed"]["runs"],
        [Result(**one) for one in content.get("run again", [])],
    )


def _rows(results: Sequence[Result]) -> list[str]:
    lines = [
        "| fault | moment | of rank | exit code | ended in, s | named | named after, s | "
        "steps lost | bitwise equal | verdict |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        cells = [
            result.kind,
            result.moment,
            "both" if result.rank is None else result.rank,
            "killed" if result.code is None else result.code,
            "-" if result.seconds is None else f"{result.seconds:.1f}",
            ", ".join(map(str, result.named)) or "-",
            "-" if result.told is None else f"{result.told:.1f}",
            "-" if result.lost is None else result.lost,
            "yes" if result.equal else "no",
            "green" if result.is_green else "**red**: " + "; ".join(result.wrong).replace("|", "/"),
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines
