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
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F

from bmtrain.compile.fusions import Wanted, is_on_gpu
from bmtrain.compile.graph import can_wait
from bmtrain.loss.linear_cross_entropy import FusedLinearCrossEntropy, chunk_rows
from bmtrain.loss.row_loss import columns_of
from bmtrain.torch_internals import size_at_hand

_HALF = (torch.bfloat16, torch.float16)
_DTYPES = (*_HALF, torch.float32)
# Methods and functions that keep the rows of logits, and their order, if they keep the last dim.
_RESHAPING = ("view", "reshape", "flatten", "contiguous", "float", "to", "type")
_NAMES: dict[Any, tuple[str, ...]] = {
    F.linear: ("input", "weight", "bias"),
    F.cross_entropy: (
        *("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction"),
        "label_smoothing",
    ),
}


def cross_entropy_of_linear(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    options: dict[str, Any],
    dtype: torch.dtype,
) -> torch.Tensor:
    """`F.cross_entropy(F.linear(hidden, weight, bias), target, **options)` in `dtype`.

    hidden: (..., dim). target: (rows,), the rows of all leading dimensions.
    """
    loss = FusedLinearCrossEntropy(**options)
    out: torch.Tensor = loss(hidden.reshape(-1, hidden.shape[-1]), weight, target, bias)
    return out.to(dtype)


def recomputed_cross_entropy_of_linear(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    options: dict[str, Any],
    dtype: torch.dtype,
) -> torch.Tensor:
    """The same; its backward pass computes the logits, its forward pass keeps arguments only."""
    loss = FusedLinearCrossEntropy(**{**options, "reduction": "none"})
    out = loss(hidden.reshape(-1, hidden.shape[-1]), weight, target, bias).sum()
    if options["reduction"] == "mean":
        columns = columns_of(weight.shape[0], parallel=False)
        out = loss.average(out, loss.row_loss(columns, hidden.dtype), *loss.classes_of(target))
    return out.to(dtype)


def rewrite(
    graph: torch.fx.GraphModule, wanted: Wanted = is_on_gpu, *, is_recomputed: bool = False
) -> None:
    """Replace heads that take less memory in chunks of rows, in place.

    Args:
        graph: traced by Dynamo.
        wanted: given the logits, says whether to replace the head.
        is_recomputed: whether the graph is a region that backward computes again.
    """
    function = recomputed_cross_entropy_of_linear if is_recomputed else cross_entropy_of_linear
    for node in list(graph.graph.nodes):
        if node.op == "call_function" and node.target is F.cross_entropy:
            given, loss = _given(node), _value(node)
            way, options = _way_to_linear(given["input"]), _options(given)
            if loss is None or options is None or not way:
                continue
            if can_wait(way[-1], node) and _is_replaced(given, way[-1], wanted):
                _replace(node, way, function, (given["target"], options, loss.dtype))
    graph.recompile()


def _given(node: torch.fx.Node) -> dict[str, Any]:
    """The arguments of a call, by the names of their parameters."""
    return dict(zip(_NAMES[node.target], node.args, strict=False)) | node.kwargs


def _options(given: dict[str, Any]) -> dict[str, Any] | None:
    """The arguments of FusedLinearCrossEntropy; None if it has not these or gains nothing."""
    options: dict[str, Any] = {
        "weight": given.get("weight"),
        "ignore_index": given.get("ignore_index", -100),
        "reduction": given.get("reduction", "mean"),
        "label_smoothing": given.get("label_smoothing", 0.0),
    }
    class_weight = _value(options["weight"])
    # For losses of rows the logits would be computed twice.
    is_known = (
        given.get("size_average") is None
        and given.get("reduce") is None
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
    value, source = _value(node), _value(node.args[0] if node.args else None)
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


def _is_replaced(given: dict[str, Any], linear: torch.fx.Node, wanted: Wanted) -> bool:
    read, target, logits = _value(given["input"]), _value(given["target"]), _value(linear)
    head = [_value(part) for part in _given(linear).values() if part is not None]
    if read is None or target is None or logits is None:
        return False
    tensors = [x for x in head if x is not None and x.dtype == logits.dtype]
    return (
        logits.dtype in _DTYPES
        and len(tensors) == len(head)  # autocast would convert others
        and any(x.requires_grad for x in tensors)
        and read.dim() == 2
        and target.dim() == 1
        and not (target.is_floating_point() or target.is_complex() or target.dtype == torch.bool)
        and _is_smaller(read.shape[0], logits, tensors)
        and wanted(logits)
    )


def _is_smaller(rows: Any, logits: torch.Tensor, head: list[torch.Tensor]) -> bool:
    """Whether a chunk and the gradients in fp32 are smaller than all logits and their gradient.

    Of sizes that vary the ones at hand count: what fits now in chunks must not come whole later.
    """
    row = _size(logits.shape[-1:]) * logits.element_size()
    rows = _size([rows])
    if not row or chunk_rows(rows, row) == rows:
        return False
    gradients = sum(4 * _size(x.shape) for x in head if x.requires_grad)
    return chunk_rows(rows, row) * row + gradients < 2 * rows * row


def _size(shape: Iterable[Any]) -> int:
    """The product of sizes; 0 if one depends on data."""
    return math.prod(size_at_hand(size) or 0 for size in shape)


def _replace(
    node: torch.fx.Node,
    way: list[torch.fx.Node],
    function: Callable[..., torch.Tensor],
    rest: tuple[Any, ...],
) -> None:
    """Put `function` in; `rest` are its arguments behind those of the map."""
    parts = _given(way[-1])
    head = parts["input"], parts["weight"], parts.get("bias")
    with node.graph.inserting_before(node):
        fused = node.graph.call_function(function, (*head, *rest))
    fused.meta = dict(node.meta)
    node.replace_all_uses_with(fused)
    for each in (node, *way):
        node.graph.erase_node(each)


def _value(node: Any) -> torch.Tensor | None:
    """The example tensor that Dynamo has recorded for a node; None if it is not a tensor."""
    value = node.meta.get("example_value") if isinstance(node, torch.fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None
