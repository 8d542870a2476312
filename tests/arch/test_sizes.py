"""A file holds at most 400 statements.

Those of a function, its branches, returns and parameters have their limits in pyproject.toml, where
ruff reads them.
"""

from __future__ import annotations

import ast

from tests.arch.source import Module, modules, parse

MAX_STATEMENTS = 400


def statements(module: Module) -> int:
    """Statements of a module, nested ones too; docstrings are none."""
    return sum(isinstance(node, ast.stmt) and not _is_text(node) for node in ast.walk(module.tree))


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def test_no_file_is_too_long() -> None:
    """What a reader has to hold in the head, whatever the width of the lines."""
    long = {
        str(module.path): count
        for module in modules()
        if (count := statements(module)) > MAX_STATEMENTS
    }
    assert not long, f"files over {MAX_STATEMENTS} statements: {long}"


def test_docstrings_do_not_count() -> None:
    """`statements` sees code only."""
    text = '"""Module."""\ndef f() -> int:\n    """One."""\n    # why\n    return 1\n'
    assert statements(parse(text)) == 2
