"""Budgets of the source: files of at most 400 lines, functions of at most 60 and of 10 at the median."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from tests.arch.source import length, modules, parse

MAX_FILE = 400
MAX_FUNCTION = 60
MEDIAN_FUNCTION = 10


def test_no_file_is_too_long() -> None:
    """At most 400 lines a file."""
    long = {str(module.path): lines for module in modules() if (lines := module.text.count("\n")) > MAX_FILE}
    assert not long, f"files over {MAX_FILE} lines: {long}"


def test_no_function_is_too_long() -> None:
    """At most 60 lines from `def` to the end, docstring included."""
    long = [
        module.where(function, f"{function.name} has {lines} lines")
        for module in modules()
        for function in module.functions()
        if (lines := (function.end_lineno or function.lineno) - function.lineno + 1) > MAX_FUNCTION
    ]
    assert not long, "\n".join(long)


def test_functions_are_short_at_the_median(record_property: Callable[[str, object], None]) -> None:
    """At most 10 lines at the median, docstrings not counted; the figure is printed (pytest -s) and reported."""
    lengths = [length(function) for module in modules() for function in module.functions()]
    median = statistics.median(lengths)
    record_property("median_function_length", median)
    print(f"{len(lengths)} functions in {len(modules())} files, {median:g} lines at the median, {max(lengths)} at most")
    assert median <= MEDIAN_FUNCTION


def test_docstrings_do_not_count_as_length() -> None:
    """`length` sees code and comments only."""
    function = next(parse('def f() -> int:\n    """One.\n\n    Two.\n    """\n    # why\n    return 1\n').functions())
    assert length(function) == 3
