"""Heads of compiled blocks: the loss of a linear map's output, without the logits of all rows.

`rewrite` replaces `cross_entropy(linear(hidden, weight, bias), target)` by
`FusedLinearCrossEntropy` in the graph that Dynamo has traced. On a GPU the two took the same time
(docs/log.md); memory that chunks spare is there for what blocks keep. Products and roundings are
those of the plain head, except that the weight's gradient sums chunks of rows in fp32, in their
order, and that gradients are scaled after they have been summed. A head that is recomputed computes
its gradients in backward, any other in forward, which spares it computing the logits twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F

from bmtrain.compile.fusions import Wanted
from bmtrain.compile.graph import can_wait, given, value_of
from bmtrain.loss.linear_cross_entropy import FusedLinearCrossEntropy, chunk_rows
from bmtrain.loss.row_loss import columns_of
from bmtrain.torch_internals import size_at_hand

_HALF = (torch.bfloat16, torch.float16)
_DTYPES = (*_HALF, torch.float32)
# Methods and functions that keep the rows of logits, and their order, if they keep the last dim.
_RESHAPING = ("view", "reshape", "flatten", "contiguous", "float", "to", "type")


def cross_entropy_of_linear(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    options: dict[str, Any],
    dtype: torch.dtype,
    is_recomputed: bool,
) -> torch.Tensor:
    """`F.cross_entropy(F.linear(hidden, weight, bias), target, **options)` in `dtype`.

    hidden: (..., dim). target: (rows,), the rows of all leading dimensions. `is_recomputed`: the
    backward pass computes the logits, the forward pass keeps arguments only.
    """
    hidden = hidden.reshape(-1, hidden.shape[-1])
    own = {**options, "reduction": "none"} if is_recomputed else options
    loss = FusedLinearCrossEntropy(**own)
    out: torch.Tensor = loss(hidden, weight, target, bias)
    if is_recomputed:
        out = out.sum()
        if options["reduction"] == "mean":
            row_loss = loss.row_loss(columns_of(weight.shape[0], parallel=False), hidden.dtype)
            out = loss.average(out, row_loss, *loss.classes_of(target))
    return out.to(dtype)


def rewrite(graph: torch.fx.GraphModule, wanted: Wanted, *, is_recomputed: bool) -> None:
    """Replace heads that take less memory in chunks of rows, in place.

    Args:
        graph: traced by Dynamo.
        wanted: given the logits, says whether to replace the head.
        is_recomputed: whether the graph is a region that backward computes again.
    """
    for node in list(graph.graph.nodes):
        if node.op != "call_function" or node.target is not F.cross_entropy:
            continue
        arguments, loss = given(node), value_of(node)
        way, options = _way_to_linear(arguments["input"]), _options(arguments)
        if loss is None or options is None or not way or not can_wait(way[-1], node):
            continue
        if _is_replaced(arguments, way[-1], wanted):
            head = given(way[-1])
            own = head["input"], head["weight"], head.get("bias")
            with graph.graph.inserting_before(node):
                rest = arguments["target"], options, loss.dtype, is_recomputed
                fused = graph.graph.call_function(cross_entropy_of_linear, (*own, *rest))
            fused.meta = dict(node.meta)
            node.replace_all_uses_with(fused)
            for each in (node, *way):
                graph.graph.erase_node(each)
    graph.recompile()


def _options(arguments: dict[str, Any]) -> dict[str, Any] | None:
    """The arguments of FusedLinearCrossEntropy; None if it has not these or gains nothing."""
    options: dict[str, Any] = {
        "weight": arguments.get("weight"),
        "ignore_index": arguments.get("ignore_index", -100),
        "reduction": arguments.get("reduction", "mean"),
        "label_smoothing": arguments.get("label_smoothing", 0.0),
    }
    class_weight = value_of(options["weight"])
    # For losses of rows the logits would be computed twice.
    is_known = (
        arguments.get("size_average") is None
        and arguments.get("reduce") is None
        and options["reduction"] in ("mean", "sum")
        and isinstance(options["ignore_index"], int)
        and isinstance(options["label_smoothing"], float | int)
        and not (class_weight is not None and class_weight.requires_grad)
    )
    return options if is_known else None


def _way_to_linear(node: Any) -> list[torch.fx.Node]:
    """The node and those before it, up to the linear map whose output it is, reshaped or in fp32.

    Empty if it is something else, or if others read the logits.
    """
    way: list[torch.fx.Node] = []
    while isinstance(node, torch.fx.Node) and len(node.users) == 1:
        way.append(node)
        if node.op == "call_function" and node.target is F.linear:
            return way
        if not _keeps_rows(node):
            return []
        node = node.args[0]
    return []


def _keeps_rows(node: torch.fx.Node) -> bool:
    """Whether the node's rows are those of its first argument, and no value is rounded."""
    value, source = value_of(node), value_of(node.args[0] if node.args else None)
    name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    return (
        value is not None
        and source is not None
        and name in _RESHAPING
        and value.shape[-1:] == source.shape[-1:]
        and value.device == source.device
        and (
            value.dtype == source.dtype or (source.dtype in _HALF and value.dtype == torch.float32)
        )
    )


def _is_replaced(arguments: dict[str, Any], linear: torch.fx.Node, wanted: Wanted) -> bool:
    """Whether the loss is one of rows and classes, and the chunks take less memory.

    A chunk and the gradients in fp32 must be smaller than all logits and their gradient. Of sizes
    that vary the ones at hand count: what fits now in chunks must not come whole later.
    """
    read, target = value_of(arguments["input"]), value_of(arguments["target"])
    logits = value_of(linear)
    head = [value_of(part) for part in given(linear).values() if part is not None]
    if read is None or target is None or logits is None:
        return False
    tensors = [x for x in head if x is not None and x.dtype == logits.dtype]
    if (
        logits.dtype not in _DTYPES
        or len(tensors) < len(head)  # autocast would convert others
        or not any(x.requires_grad for x in tensors)
        or (read.dim(), target.dim()) != (2, 1)
        or (target.is_floating_point() or target.is_complex() or target.dtype == torch.bool)
        or not wanted(logits)
    ):
        return False
    row = _size(logits.shape[-1:]) * logits.element_size()
    rows = _size(read.shape[:1])
    if not row or chunk_rows(rows, row) == rows:
        return False
    gradients = sum(4 * _size(x.shape) for x in tensors if x.requires_grad)
    return chunk_rows(rows, row) * row + gradients < 2 * rows * row


def _size(shape: Iterable[Any]) -> int:
    """The product of sizes; 0 if one depends on data."""
    return math.prod(size_at_hand(size) or 0 for size in shape)
