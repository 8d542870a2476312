"""The size of the engine, which may shrink: a ceiling is lowered with each change that makes it smaller.

The aims are 150,000 tokens, 42,000 of them in the spine, and 350 functions of one statement.
"""

import ast
import io
import tokenize

from tests.arch.source import ROOT

ENGINE = ROOT / "src" / "bmtrain"
SPINE = ("shard", "block", "recompute")
MOST_TOKENS, MOST_SPINE_TOKENS = 208_131, 66_662
MOST_OF_ONE_STATEMENT, MOST_SMALL_FILES = 349, 22
_COUNTED = {tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING}


def _is_docstring(node):
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _documented(tree):
    yield tree.body
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.body


def num_tokens(text):
    """Names, operators, numbers and strings, without docstrings."""
    skipped = {
        line
        for body in _documented(ast.parse(text))
        if body and _is_docstring(body[0])
        for line in range(body[0].lineno, (body[0].end_lineno or 0) + 1)
    }
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(x.type in _COUNTED and x.start[0] not in skipped for x in tokens)


def num_of_one_statement(text):
    """Functions whose body is one statement, and not a block of its own."""
    bodies = [
        node.body[_is_docstring(node.body[0]) :]
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    blocks = ast.With | ast.For | ast.If | ast.Try
    return sum(len(x) <= 1 and not any(isinstance(y, blocks) for y in x) for x in bodies)


def test_the_engine_does_not_grow():
    files = {path.relative_to(ENGINE): path.read_text(encoding="utf-8") for path in _files()}
    tokens = {path: num_tokens(text) for path, text in files.items()}
    assert sum(tokens.values()) <= MOST_TOKENS
    assert sum(n for path, n in tokens.items() if path.parts[0] in SPINE) <= MOST_SPINE_TOKENS
    assert sum(map(num_of_one_statement, files.values())) <= MOST_OF_ONE_STATEMENT
    assert sum(len(text.splitlines()) < 60 for text in files.values()) <= MOST_SMALL_FILES


def _files():
    return sorted(ENGINE.rglob("*.py"))


def test_what_is_counted():
    text = '"""Not counted."""\ndef f(x):\n    """Nor this."""\n    return x + 1  # nor this\n'
    assert num_tokens(text) == 10
    assert num_of_one_statement(text) == 1
    assert num_of_one_statement("def f():\n    for x in ():\n        pass\n") == 0
