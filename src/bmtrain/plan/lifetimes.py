"""Peak memory of a graph that inductor compiles: how long each of its values lives.

Kernels of libraries (products, attention, this library's norms) write their results to memory.
Element-wise operators and reductions are fused: a value that only they read is never written. This
is what inductor does as a rule; where it splits a fusion, its peak is higher by that value.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable

import torch
from torch.fx import Node

from bmtrain.plan.meter import workspace
from bmtrain.torch_internals import overloads, tensors_of

# Operators that are fused though torch does not tag them as element-wise.
_FUSED = frozenset(
    re.findall(
        r"\w+",
        """sum mean amax amin var_mean var max min any all prod cat clone convert_element_type
        _to_copy full full_like iota arange scalar_tensor gather constant_pad_nd flip _softmax
        inductor_lookup_seed inductor_random _log_softmax prepare_softmax_online""",
    )
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
    ends: dict[int, list[Node]] = {}
    for source, place in last.items():
        if source in written or is_counted(source):
            ends.setdefault(place, []).append(source)
    live = most = sum(_bytes(x) for x in nodes if x.op == "placeholder" and is_counted(x))
    for place, node in enumerate(nodes):
        if node not in written:
            continue
        done, own, reused = ends.get(place, []), _bytes(node), 0
        if _is_fused(node):
            # A fused kernel writes over an intermediate result of the same size that it reads last.
            reused = own if any(x in written and _bytes(x) == own for x in done) else 0
        live += own
        inside = workspace(node.target, torch.fx.map_arg(node.args, lambda x: x.meta.get("val")))
        most = max(most, live - reused + inside)
        live -= sum(map(_bytes, done))
    return most


def _sources(node: Node, written: set[Node]) -> set[Node]:
    """The written values and inputs that a kernel reads, also through what is fused into it."""
    found: set[Node] = set()
    waiting = list(node.all_input_nodes)
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.add(one)
            if one not in written and one.op != "placeholder":
                waiting += one.all_input_nodes
    return {one for one in found if one in written or one.op == "placeholder"}


def _is_view(node: Node) -> bool:
    if node.op != "call_function":
        return False
    forms = overloads(node.target)
    return node.target is operator.getitem or any(
        form.is_view or "_unsafe_view" in str(form) for form in forms[:1]
    )


def _is_fused(node: Node) -> bool:
    forms = overloads(node.target) if node.op == "call_function" else []
    name = str(forms[0]).split(".")[1] if forms else ""
    return bool(forms) and (torch.Tag.pointwise in forms[0].tags or name in _FUSED)


def _is_written(node: Node) -> bool:
    """Whether a value gets memory: made by a library's kernel, or read by one or by the caller."""
    if node.op != "call_function" or _is_view(node):
        return False
    if not _is_fused(node):
        return True
    readers = list(node.users)
    for reader in readers:  # grows: what reads a view reads the value
        if _is_view(reader):
            readers += reader.users
        elif not _is_fused(reader):
            return True
    return False


def _bytes(node: Node) -> int:
    """Of the storages of the node's value."""
    return sum(x.numel() * x.element_size() for x in tensors_of(node.meta.get("val")))
