"""Codes for forward and transposed codes for backward apart, where backward computes them again.

`fp8_encode` writes both in one pass. With selective recomputation, forward multiplies the codes and
keeps the product; backward needs the transposed codes alone, and recomputes them. Apart, neither
pass writes what it does not read, and the compiler can fuse the codes with what computes the
tensor.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from bmtrain.compile import nodes

aten, prims = torch.ops.aten, torch.ops.prims
_AGAIN = (CheckpointPolicy.PREFER_RECOMPUTE, CheckpointPolicy.MUST_RECOMPUTE)


def split(graph: Graph) -> None:
    """Split `fp8_encode` in a joint graph, in place.

    Results are the same, except that codes which the compiler fuses with what computes the tensor
    are not rounded to the tensor's dtype first.
    """
    for node in graph.find_nodes(op="call_function", target=torch.ops.bmtrain.fp8_encode.default):
        codes, turned = (nodes.output(node, index) for index in range(2))
        if codes is None or turned is None or not _is_split(node, codes):
            continue
        with graph.inserting_before(node):
            codes.replace_all_uses_with(_codes(graph, node))
        graph.erase_node(codes)
        node.args = (*node.args[:3], False, True, False)
        node.meta["val"] = nodes.computed(node)
        nodes.note_arguments(node)


def _is_split(node: Node, codes: Node) -> bool:
    """Whether backward computes the node again, but has no use for the codes."""
    return _recomputed(node) in _AGAIN and all(
        _recomputed(user) is CheckpointPolicy.MUST_SAVE for user in codes.users
    )


def _recomputed(node: Node) -> Any:
    return node.meta.get("recompute")


def _codes(graph: Graph, node: Node) -> Node:
    """`kernels.fp8.codes_of` in operators that the compiler fuses."""
    x, unit, kind = cast(tuple[Node, Node, torch.dtype], node.args[:3])
    limit = torch.finfo(kind).max
    wide = nodes.call(graph, prims.convert_element_type.default, x, torch.float32)
    factor = nodes.call(graph, aten.reciprocal.default, unit)
    number = nodes.call(graph, aten.mul.Tensor, wide, factor)
    above = nodes.call(graph, aten.clamp_min.default, number, -limit)
    within = nodes.call(graph, aten.clamp_max.default, above, limit)
    result = nodes.call(graph, prims.convert_element_type.default, within, kind)
    for made in (wide, factor, number, above, within, result):
        made.meta = {**node.meta, "val": made.meta["val"]}  # to be recomputed, if need be
        made.meta.pop("eager_input_vals", None)
    return result
