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
from collections.abc import Iterable
from typing import Any

import torch

from bmtrain.recompute.host_state import names_in

# What routes rows. A stack of layers that leaves some out by an argument has none of it: as one
# Block it would be gathered whole.
_ROUTES = frozenset({"argmax", "topk", "multinomial", "nonzero", "bincount", "argsort"})
_LOOPS = (ast.For, ast.While)
_JUMPS = (ast.Continue, ast.Break, ast.Return)
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
    kind: Any = type(module)
    return _chosen(kind, lists) if lists else lists


@functools.cache
def _chosen(kind: type, lists: frozenset[str]) -> frozenset[str]:
    methods: dict[str, types.FunctionType] = {}
    for base in kind.__mro__[: kind.__mro__.index(torch.nn.Module)]:
        for name, method in vars(base).items():
            plain = inspect.unwrap(method) if callable(method) else method
            if isinstance(plain, types.FunctionType) and name != "__init__":
                methods.setdefault(name, plain)
    if _ROUTES.isdisjoint(name for x in methods.values() for name in names_in(x.__code__)):
        return frozenset()
    return frozenset(
        name
        for name in lists
        for method in methods.values()
        if name in names_in(method.__code__) and _Method.chooses(method, name)
    )


class _Method:
    """One method's source, searched for uses of the list `name` of its module.

    Names are followed without order: what is ever made of the rows may hold them.
    """

    def __init__(self, tree: ast.FunctionDef, name: str) -> None:
        own, *rest = [*tree.args.posonlyargs, *tree.args.args] or [ast.arg("")]
        given = [*rest, *tree.args.kwonlyargs, tree.args.vararg, tree.args.kwarg]
        self._tree, self._list, self._self = tree, name, own.arg
        self._arguments = {x.arg for x in given if x is not None}
        self._rows = set(self._arguments)  # names of what depends on the arguments
        self._members: set[str] = set()  # names of members of the list
        before = -1
        while len(self._rows) + len(self._members) != before:
            before = len(self._rows) + len(self._members)
            self._follow()

    @classmethod
    def chooses(cls, method: types.FunctionType, name: str) -> bool:
        """Whether the method calls members of the list `name` by its rows."""
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(method))).body[0]
        except (OSError, TypeError, SyntaxError, IndexError):
            return False
        if not isinstance(tree, ast.FunctionDef):
            return False
        found = cls(tree, name)  # a member is called or not by the rows
        return any(found._is_choice(node) for node in ast.walk(tree))

    def _follow(self) -> None:
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    self._bind(target, node.value)
            elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.NamedExpr):
                if node.value is not None:
                    self._bind(node.target, node.value)
            elif isinstance(node, ast.For | ast.comprehension):
                self._bind_each(node.target, node.iter)

    def _bind(self, target: ast.expr, value: ast.expr) -> None:
        names = {x.id for x in ast.walk(target) if isinstance(x, ast.Name)}
        if self._is_member(value):
            self._members |= names
        elif self._has_rows(value):
            self._rows |= names

    def _bind_each(self, target: ast.expr, source: ast.expr) -> None:
        """The elements of `source` are bound to `target`, one after another."""
        called = source.func if isinstance(source, ast.Call) else None
        name = called.id if isinstance(called, ast.Name) else None
        parts = target.elts if isinstance(target, ast.Tuple) else []
        if isinstance(source, ast.Call) and name == "enumerate" and len(parts) == 2:
            self._bind_each(parts[1], source.args[0])
        elif isinstance(source, ast.Call) and name == "zip":
            for part, own in zip(parts, source.args, strict=False):
                self._bind_each(part, own)
        elif any(map(self._is_list, ast.walk(source))):
            is_items = isinstance(called, ast.Attribute) and called.attr == "items" and parts
            taken = ast.walk(parts[-1] if is_items else target)
            self._members |= {x.id for x in taken if isinstance(x, ast.Name)}
        else:
            self._bind(target, source)

    def _is_list(self, node: ast.AST) -> bool:
        return (
            isinstance(node, ast.Attribute)
            and node.attr == self._list
            and isinstance(node.value, ast.Name)
            and node.value.id == self._self
        )

    def _is_member(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Attribute):  # expert.forward
            return self._is_member(node.value)
        if isinstance(node, ast.Subscript):
            return self._is_list(node.value)
        return isinstance(node, ast.Name) and node.id in self._members

    def _has_rows(self, node: ast.AST) -> bool:
        return any(isinstance(x, ast.Name) and x.id in self._rows for x in ast.walk(node))

    def _asks_rows(self, test: ast.expr) -> bool:
        """Whether a condition depends on values, more than on which arguments there are."""
        if isinstance(test, ast.BoolOp):
            return any(map(self._asks_rows, test.values))
        if isinstance(test, ast.UnaryOp):
            return self._asks_rows(test.operand)
        if isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Is | ast.IsNot):
            return False
        if isinstance(test, ast.Name):
            return test.id in self._rows - self._arguments
        if isinstance(test, ast.Call) and isinstance(test.func, ast.Name):
            return test.func.id not in ("isinstance", "hasattr", "callable") and self._has_rows(
                test
            )
        return not isinstance(test, ast.Attribute) and self._has_rows(test)

    def _calls(self, nodes: Iterable[ast.AST]) -> bool:
        """Whether a member of the list is called below, or handed to a function."""
        return any(
            isinstance(call, ast.Call) and any(map(self._is_member, (call.func, *call.args)))
            for node in nodes
            for call in ast.walk(node)
        )

    def _is_choice(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Subscript):
            is_slice = isinstance(node.slice, ast.Slice)
            return self._is_list(node.value) and not is_slice and self._has_rows(node.slice)
        if isinstance(node, ast.If) and self._asks_rows(node.test):
            return self._calls(node.body) is not self._calls(node.orelse)
        if isinstance(node, ast.IfExp) and self._asks_rows(node.test):
            return self._calls([node.body]) is not self._calls([node.orelse])
        if isinstance(node, _LOOPS) and self._calls(node.body):
            ends_by_rows = isinstance(node, ast.While) and self._asks_rows(node.test)
            return ends_by_rows or any(
                map(self._leaves, [x for part in node.body for x in ast.walk(part)])
            )
        if isinstance(node, _COMPREHENSIONS) and self._calls([node]):
            tests = [test for part in node.generators for test in part.ifs]
            return any(map(self._asks_rows, tests))
        return False

    def _leaves(self, node: ast.AST) -> bool:
        """Whether it is an `if` on rows that goes on with the next member, or ends the loop."""
        return (
            isinstance(node, ast.If)
            and self._asks_rows(node.test)
            and any(isinstance(x, _JUMPS) for x in ast.walk(node))
        )
