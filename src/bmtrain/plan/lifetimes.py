"""Peak memory of a graph that inductor compiles: how long each of its values lives.

Kernels of libraries (products, attention, this library's norms) write their results to memory.
Element-wise operators and reductions are fused: a value that only they read is never written. This
is what inductor does as a rule; where it splits a fusion, its peak is higher by that value.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from bmtrain.plan.meter import tensors_in, workspace
from bmtrain.torch_internals import overloads

_VIEWS = frozenset(
    {
        "view",
        "_unsafe_view",
        "reshape",
        "permute",
        "transpose",
        "t",
        "expand",
        "slice",
        "select",
        "squeeze",
        "unsqueeze",
        "split",
        "split_with_sizes",
        "unbind",
        "alias",
        "detach",
        "as_strided",
        "_reshape_alias",
        "diagonal",
    }
)
_FUSED = frozenset(
    {
        "sum",
        "mean",
        "amax",
        "amin",
        "var_mean",
        "var",
        "max",
        "min",
        "any",
        "all",
        "prod",
        "cat",
        "clone",
        "convert_element_type",
        "_to_copy",
        "full",
        "full_like",
        "iota",
        "arange",
        "scalar_tensor",
        "gather",
        "constant_pad_nd",
        "inductor_lookup_seed",
        "inductor_random",
        "flip",
        "_softmax",
        "_log_softmax",
        "prepare_softmax_online",
    }
)


def peak(graph: torch.fx.Graph, is_counted: Callable[[Node], bool]) -> int:
    """Most bytes alive at any time, from the inputs that count to the results.

    Args:
        graph: of aten operators whose nodes have example values.
        is_counted: of an input: whether its memory counts, and is freed behind its last use.
    """
    nodes = list(graph.nodes)
    written = {node for node in nodes if _is_written(node)}
    last: dict[Node, int] = {}
    for place, node in enumerate(nodes):
        if node in written or node.op == "output":
            for source in _sources(node, written):
                last[source] = place
    live = most = sum(
        _bytes(node) for node in nodes if node.op == "placeholder" and is_counted(node)
    )
    ends: dict[int, list[Node]] = {}
    for source, place in last.items():
        ends.setdefault(place, []).append(source)
    for place, node in enumerate(nodes):
        if node not in written:
            continue
        done = [x for x in ends.get(place, ()) if x in written or is_counted(x)]
        own, reused = _bytes(node), 0
        if _is_fused(node):
            # A fused kernel writes over an intermediate result of the same size that it reads last.
            reused = max((_bytes(x) for x in done if x in written and _bytes(x) == own), default=0)
        live += own
        inside = workspace(node.target, torch.fx.map_arg(node.args, _value))
        most = max(most, live - reused + inside)
        live -= sum(map(_bytes, done))
    return most


def _sources(node: Node, written: set[Node]) -> set[Node]:
    """The written values and inputs that a kernel reads, also through what is fused into it."""
    found: set[Node] = set()
    waiting, seen = list(node.all_input_nodes), set[Node]()
    while waiting:
        one = waiting.pop()
        if one in seen:
            continue
        seen.add(one)
        if one in written or one.op == "placeholder":
            found.add(one)
        else:
            waiting += one.all_input_nodes
    return found


def _name(node: Node) -> str:
    target: Any = node.target
    return str(target).rsplit("::", 1)[-1].split(".")[1] if "." in str(target) else str(target)


def _is_view(node: Node) -> bool:
    return node.op == "call_function" and (node.target is operator.getitem or _name(node) in _VIEWS)


def _is_fused(node: Node) -> bool:
    target: Any = node.target
    if node.op != "call_function" or target is operator.getitem:
        return False
    forms = overloads(target)
    return bool(forms) and (torch.Tag.pointwise in forms[0].tags or _name(node) in _FUSED)


def _is_written(node: Node) -> bool:
    """Whether a value gets memory: made by a library's kernel, or read by one or by the caller."""
    if node.op != "call_function" or _is_view(node):
        return False
    return not _is_fused(node) or any(
        user.op == "output" or (not _is_fused(user) and not _is_view(user)) for user in _users(node)
    )


def _users(node: Node) -> list[Node]:
    """All that read the value, through views too."""
    found: list[Node] = []
    for user in node.users:
        found += _users(user) if _is_view(user) else [user]
        if _is_view(user):
            found += [end for end in user.users if end.op == "output"]
    return found


def _value(node: Node) -> Any:
    return node.meta.get("val")


def _bytes(node: Node) -> int:
    """Of the storages of the node's value."""
    value = node.meta.get("val")
    return sum(x.numel() * x.element_size() for x in tensors_in(value))
