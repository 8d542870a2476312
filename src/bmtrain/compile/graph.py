"""Walks over the graph of a block, into the graphs that it holds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from bmtrain.torch_internals import is_mutable, is_region, overloads


def parts(graph: torch.fx.GraphModule) -> Iterator[torch.fx.GraphModule]:
    """The graph and its subgraphs: recomputed regions, and the passes of autograd functions."""
    return (part for part in graph.modules() if isinstance(part, torch.fx.GraphModule))


def calls(graph: torch.fx.GraphModule) -> Iterator[torch.fx.Node]:
    """The nodes of all parts that call a function or an operator."""
    for part in parts(graph):
        yield from (node for node in part.graph.nodes if node.op == "call_function")


def can_wait(node: torch.fx.Node, until: torch.fx.Node) -> bool:
    """Whether `node` could be computed where a later node stands, with the same values and
    gradients: no tensor that it reads is written before, and no mode is changed.
    """
    read = {_memory(each) for each in node.all_input_nodes} - {None}
    nodes = itertools.dropwhile(lambda each: each is not node, node.graph.nodes)
    between = itertools.takewhile(lambda each: each is not until, itertools.islice(nodes, 1, None))
    return not any(
        _sets_mode(each)
        or (_may_write(each) and read & {_memory(other) for other in each.all_input_nodes})
        for each in between
    )


def _memory(node: torch.fx.Node) -> int | None:
    """What is the same for tensors that share memory; None for what is no tensor."""
    value = node.meta.get("example_value")
    return id(value.untyped_storage()) if isinstance(value, torch.Tensor) else None


def _sets_mode(node: torch.fx.Node) -> bool:
    """Whether it turns gradients, autocast or the like on or off."""
    return node.op == "call_function" and _name(node).startswith(("_set_", "_enter_", "_exit_"))


def _may_write(node: torch.fx.Node) -> bool:
    """Whether it may write what it is given."""
    if node.op == "call_method":
        return _is_in_place(_name(node))
    return node.op == "call_module" or (
        node.op == "call_function"
        and (
            _is_in_place(_name(node))
            or is_region(node.target)
            or any(map(is_mutable, overloads(node.target)))
            or "out" in node.kwargs
            or any(each is True for each in (*node.args, node.kwargs.get("inplace")))
        )
    )


def _is_in_place(name: str) -> bool:
    """Whether methods and functions of this name write their first argument, `__setitem__` too."""
    return name.endswith("_") or name in _IN_PLACE


def _name(node: torch.fx.Node) -> str:
    target: Any = node.target
    return target if isinstance(target, str) else str(getattr(target, "__name__", ""))


# Of Python's operators.
_IN_PLACE = {
    *("setitem", "iadd", "iand", "ifloordiv", "ilshift", "imatmul", "imod", "imul", "ior", "ipow"),
    *("irshift", "isub", "itruediv", "ixor"),
}
