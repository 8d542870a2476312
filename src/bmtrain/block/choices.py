"""Modules that choose, by their rows, which members of their lists they call: mixtures of experts.

Ranks have other rows and would choose other members. Were each a Block, ranks would gather other
weights; the module that chooses becomes the Block instead.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import types
from typing import Any

import torch

from bmtrain.recompute.recomputation import names_in

# What routes rows. A stack of layers that leaves some out by an argument has none of it: as one
# Block it would be gathered whole.
_ROUTES = frozenset({"argmax", "topk", "multinomial", "nonzero", "bincount", "argsort"})
_JUMPS = (ast.Continue, ast.Break, ast.Return)
_OF_KINDS = frozenset({"isinstance", "hasattr", "callable"})
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)


def chosen_lists(module: torch.nn.Module) -> frozenset[str]:
    """Names of the module's lists and dicts of modules of which it calls some, by its rows.

    Read in the source of its methods: they route rows, and call under an `if` or after a `continue`
    that depends on their arguments, or by an index that does. A module without source is taken to
    call all.
    """
    lists = frozenset(
        name
        for name, child in module._modules.items()
        if isinstance(child, torch.nn.ModuleList | torch.nn.ModuleDict)
        and any(True for _ in child.parameters())
    )
    if not lists:
        return lists
    kind: Any = type(module)
    codes: dict[str, types.CodeType] = {}
    for base in kind.__mro__[: kind.__mro__.index(torch.nn.Module)]:
        for name, method in vars(base).items():
            plain = inspect.unwrap(method) if callable(method) else method
            if isinstance(plain, types.FunctionType) and name != "__init__":
                codes.setdefault(name, plain.__code__)
    if _ROUTES.isdisjoint(name for code in codes.values() for name in names_in(code)):
        return frozenset()
    return frozenset(
        name
        for name in lists
        for code in codes.values()
        if name in names_in(code) and _chooses(code, name)
    )


@functools.cache
def _chooses(code: types.CodeType, name: str) -> bool:
    """Whether the source of a method calls members of the list `name` of its module by its rows.

    Names are followed without order: what is ever made of the rows may hold them, and what is ever
    taken from the list may be a member.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code))).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):
        return False
    if not isinstance(tree, ast.FunctionDef):
        return False
    own, *rest = [*tree.args.posonlyargs, *tree.args.args] or [ast.arg("")]
    given = [*rest, *tree.args.kwonlyargs, tree.args.vararg, tree.args.kwarg]
    arguments = {x.arg for x in given if x is not None}
    rows, members = set(arguments), set[str]()  # names that may hold them

    def is_list(node: ast.AST) -> bool:
        return ast.unparse(node) == f"{own.arg}.{name}"

    def is_member(node: ast.AST) -> bool:
        if isinstance(node, ast.Attribute):  # expert.forward
            return is_member(node.value)
        if isinstance(node, ast.Subscript):
            return is_list(node.value)
        return isinstance(node, ast.Name) and node.id in members

    def has_rows(node: ast.AST) -> bool:
        return any(isinstance(x, ast.Name) and x.id in rows for x in ast.walk(node))

    def asks(test: ast.expr) -> bool:
        """Whether a condition depends on values, more than on which arguments there are."""
        if isinstance(test, ast.BoolOp):
            return any(map(asks, test.values))
        if isinstance(test, ast.UnaryOp):
            return asks(test.operand)
        if isinstance(test, ast.Name):
            return test.id in rows - arguments
        if isinstance(test, ast.Call) and ast.unparse(test.func) in _OF_KINDS:
            return False
        is_none = isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Is | ast.IsNot)
        return not is_none and not isinstance(test, ast.Attribute) and has_rows(test)

    def calls(*nodes: ast.AST) -> bool:
        """Whether a member of the list is called below, or handed to a function."""
        return any(
            isinstance(call, ast.Call) and any(map(is_member, (call.func, *call.args)))
            for node in nodes
            for call in ast.walk(node)
        )

    def is_choice(node: ast.AST) -> bool:
        if isinstance(node, ast.Subscript):
            is_slice = isinstance(node.slice, ast.Slice)
            return is_list(node.value) and not is_slice and has_rows(node.slice)
        if isinstance(node, ast.IfExp):
            return asks(node.test) and calls(node.body) is not calls(node.orelse)
        if isinstance(node, ast.If):
            return asks(node.test) and calls(*node.body) is not calls(*node.orelse)
        if isinstance(node, ast.For | ast.While) and calls(*node.body):
            # an `if` on rows goes on with the next member, or ends the loop
            return (isinstance(node, ast.While) and asks(node.test)) or any(
                isinstance(x, ast.If)
                and asks(x.test)
                and any(isinstance(y, _JUMPS) for y in ast.walk(x))
                for part in node.body
                for x in ast.walk(part)
            )
        if isinstance(node, _COMPREHENSIONS) and calls(node):
            return any(map(asks, [test for part in node.generators for test in part.ifs]))
        return False

    nodes = list(ast.walk(tree))
    before = -1
    while len(rows) + len(members) != before:
        before = len(rows) + len(members)
        for node in nodes:
            is_loop = False
            if isinstance(node, ast.For | ast.comprehension):
                targets, value, is_loop = [node.target], node.iter, True
            elif isinstance(node, ast.Assign):
                targets, value = node.targets, node.value
            elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.NamedExpr) and node.value:
                targets, value = [node.target], node.value
            else:
                continue
            names = {x.id for each in targets for x in ast.walk(each) if isinstance(x, ast.Name)}
            is_taken = any(map(is_list, ast.walk(value))) if is_loop else is_member(value)
            if is_taken:
                members |= names
            if has_rows(value) and (is_loop or not is_taken):
                rows |= names
    return any(map(is_choice, nodes))
