"""Masks of attention in the form that torch's fast kernels take.

A model of transformers that is traced whole builds its mask of `arange`: ones for a BERT, a
triangle for a Llama. Given any mask, torch takes a slower kernel; for the strides of an expanded
one, or of the position bias of T5, the path that holds all scores in fp32.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

from bmtrain.compile.graph import can_wait, given, may_write, memories, value_of

# Functions and methods that compute a mask of numbers.
_PURE = {
    *(torch.arange, torch.full, torch.ones, torch.where, torch.zeros),
    *(operator.add, operator.and_, operator.eq, operator.ge, operator.getitem, operator.gt),
    *(operator.invert, operator.le, operator.lt, operator.ne, operator.or_, operator.sub),
    *("bool", "expand", "new_ones", "to", "unsqueeze", "view"),
}
_MOST = 2**28  # elements of a mask that is computed here


def rewrite(graph: GraphModule, wanted: Callable[[torch.Tensor], bool]) -> None:
    """Simplify the masks of a graph traced by Dynamo, in place; values stay the same.

    A mask that depends on no input is left out where it masks nothing, or becomes `is_causal`; the
    last dimension of any other becomes contiguous.

    Args:
        wanted: given the result of attention, says whether to change its mask.
    """
    attend, known = F.scaled_dot_product_attention, dict[Node, "torch.Tensor | None"]()
    judged: dict[Node, bool | None] = {}  # one mask serves all layers
    for node in graph.graph.find_nodes(op="call_function", target=attend):
        arguments, result = given(node), value_of(node)
        mask = arguments.get("attn_mask")
        if mask is None or result is None or not wanted(result) or arguments.get("is_causal"):
            continue
        if mask.target is torch.where and len(mask.args) == 3:
            condition, bias, _ = mask.args
            is_masked = _is_causal(_constant(condition, known)) is not False
            if not is_masked and _are_alike(bias, mask) and can_wait(mask, node):
                mask = bias  # which need not be expanded
        if mask not in judged:
            judged[mask] = _is_causal(_constant(mask, known))
        is_causal, value = judged[mask], value_of(mask)
        if is_causal is not None:
            mask, arguments = None, arguments | ({"is_causal": True} if is_causal else {})
        elif value is not None and value.stride(-1) != 1:
            with graph.graph.inserting_before(node):
                made = graph.graph.call_method("contiguous", (mask,))
            made.meta = {**mask.meta, "example_value": value.contiguous()}
            mask = made
        node.args, node.kwargs = (), {**arguments, "attn_mask": mask}
    graph.recompile()


def _constant(node: Any, known: dict[Node, torch.Tensor | None]) -> torch.Tensor | None:
    """The value, on the CPU, of a node that is computed of numbers alone; expanded dimensions have
    the size one.

    None for other nodes, and where something may write what the node lies in.
    """
    if not isinstance(node, Node):
        return None
    if node not in known:
        known[node] = None
        value = value_of(node)
        if value is not None and node.target in _PURE and _is_small(value):
            constant = all(_constant(each, known) is not None for each in node.all_input_nodes)
            if constant and not _is_written(node):
                known[node] = _computed(node, known)
    value = known[node]
    if value is not None:
        for dim, (size, stride) in enumerate(zip(value.shape, value.stride(), strict=True)):
            value = value.narrow(dim, 0, 1) if size > 1 and stride == 0 else value
    return value


def _computed(node: Node, known: dict[Node, torch.Tensor | None]) -> torch.Tensor:
    def here(value: Any) -> Any:
        if isinstance(value, Node):
            return known[value]
        return torch.device("cpu") if isinstance(value, (torch.device, str)) else value

    args, kwargs = map_aggregate(node.args, here), map_aggregate(node.kwargs, here)
    is_method = node.op == "call_method"
    target: Any = getattr(args[0], str(node.target)) if is_method else node.target
    value: torch.Tensor = target(*(args[1:] if is_method else args), **kwargs)
    return value


def _is_small(value: torch.Tensor) -> bool:
    sizes = [size for size, stride in zip(value.shape, value.stride(), strict=True) if stride != 0]
    return all(isinstance(size, int) for size in value.shape) and math.prod(sizes) <= _MOST


def _is_written(node: Node) -> bool:
    own = memories([node])
    return any(
        may_write(each) and own & memories(each.all_input_nodes) for each in node.graph.nodes
    )


def _is_causal(allowed: torch.Tensor | None) -> bool | None:
    """True if each query may see the keys up to its own; False if all may see all; None otherwise.

    Args:
        allowed: (..., queries, keys), of bools or of what is added to the scores; None if unknown.
    """
    if allowed is None or (allowed.is_floating_point() and bool(allowed.any())):
        return None
    allowed = allowed == 0 if allowed.is_floating_point() else allowed
    if bool(allowed.all()):
        return False
    # A mask of n by n that is no single row or column belongs to n queries and n keys.
    is_square = allowed.dim() > 1 and allowed.shape[-2] == allowed.shape[-1]
    return True if is_square and (allowed == torch.ones_like(allowed).tril()).all() else None


def _are_alike(bias: Any, mask: Node) -> bool:
    """Whether the bias may stand for the mask."""
    first, second = value_of(bias), value_of(mask)
    if first is None or second is None:
        return False
    return first.dtype == second.dtype and first.dim() == second.dim()
