"""Fusion of sums into the norm kernels, in the joint forward and backward graph of a block.

A residual is added to the norm's input, gradients of a tensor with several users are added up, and
the gradient of a bias is a column sum: each is one pass over memory. The kernels of norms and of
their gradients read or write these tensors anyway, so they take the terms as inputs and also return
the sum or the column sums.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
from torch.fx import Graph, Node

from bmtrain.kernels.norm import MOST_GRADS, MOST_INPUTS, WIDE

aten = torch.ops.aten
_VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)


def join(graph: Graph) -> None:
    """Fuse sums into norm kernels, in place.

    Results are unchanged, except that a fused sum is rounded once instead of after each term.
    """
    for node in graph.find_nodes(op="call_function", target=torch.ops.bmtrain.norm.default):
        _join_inputs(graph, node)
        _note_arguments(node)
    for node in graph.find_nodes(
        op="call_function", target=torch.ops.bmtrain.norm_backward.default
    ):
        grads, inputs, *rest = node.args
        node.args = (
            _terms(grads[0], MOST_GRADS, node),
            _terms(inputs[0], MOST_INPUTS, None),
            *rest,
        )
        _join_residual(graph, node)
        _join_column_sums(graph, node)
        _note_arguments(node)


def _note_arguments(node: Node) -> None:
    """Record the values of the new arguments, to which inductor matches the inputs' layouts."""
    node.meta["eager_input_vals"] = torch.fx.map_arg((node.args, node.kwargs), _value)


def _join_inputs(graph: Graph, node: Node) -> None:
    """If the norm's input is a sum, let the kernel compute it, also for the sum's other users."""
    (total,) = cast(list[Node], node.args[0])
    terms = _terms(total, MOST_INPUTS, None)
    if terms == [total] or not all(
        _comes_before(graph, node, user) for user in total.users if user is not node
    ):
        return
    node.args = (terms, *node.args[1:])
    node.meta["val"] = _computed(node)
    with graph.inserting_after(node):
        made = graph.call_function(operator.getitem, (node, 3))
    made.meta = dict(total.meta)  # includes whether to save or to recompute it
    total.replace_all_uses_with(made)
    graph.erase_node(total)


def _terms(node: Node, most: int, only_user: Node | None) -> list[Node]:
    """The terms of the sum that this node is: at most `most` nodes, the node itself if it is none.

    With `only_user`, a sum that has other users is one term.
    """
    addends = _addends(node)
    if most < 2 or addends is None or (only_user is not None and set(node.users) != {only_user}):
        return [node]
    user = None if only_user is None else node
    left = _terms(addends[0], most - 1, user)
    return [*left, *_terms(addends[1], most - len(left), user)]


def _addends(node: Node) -> tuple[Node, Node] | None:
    """The two tensors whose sum this node is, if both have its shape and dtype; else None."""
    if (
        node.target is not aten.add.Tensor
        or node.kwargs
        or not all(isinstance(argument, Node) for argument in node.args)
    ):
        return None
    left, right = cast(tuple[Node, Node], node.args)
    return (left, right) if _kind(left) == _kind(right) == _kind(node) else None


def _kind(node: Node) -> tuple[Any, Any]:
    value = _value(node)
    # symbolic sizes are nodes too
    return (value.shape, value.dtype) if isinstance(value, torch.Tensor) else (None, type(value))


def _value(node: Node) -> Any:
    """The fake tensor, or tensors, that the compiler has recorded for a node."""
    return node.meta["val"]


def _join_residual(graph: Graph, node: Node) -> None:
    """If the only use of the gradient is to add it to an earlier tensor, let the kernel add it."""
    result = _output(node, 0)
    total = next(iter(result.users)) if result is not None and len(result.users) == 1 else None
    addends = None if total is None else _addends(total)
    if result is None or total is None or addends is None or addends[0] is addends[1]:
        return
    other = addends[1] if addends[0] is result else addends[0]
    if _comes_before(graph, other, node):
        node.args = (*node.args[:5], other)
        total.replace_all_uses_with(result)
        graph.erase_node(total)


def _output(node: Node, index: int) -> Node | None:
    return next(
        (user for user in node.users if user.target is operator.getitem and user.args[1] == index),
        None,
    )


def _comes_before(graph: Graph, first: Node, second: Node) -> bool:
    return next(node for node in graph.nodes if node in (first, second)) is first


class ColumnSum(NamedTuple):
    """A bias's gradient: the sum `total` over the rows of a tensor, in its final shape `last`."""

    total: Node
    last: Node


def _join_column_sums(graph: Graph, node: Node) -> None:
    """Let the kernel compute column sums of the gradient and of the residual, where used."""
    result, residual = _output(node, 0), node.args[5] if len(node.args) > 5 else None
    found = [
        next(_column_sums(tensor), None) if isinstance(tensor, Node) else None
        for tensor in (result, residual)
    ]
    if found == [None, None] or _value(cast(Node, node.args[2])).shape[0] > WIDE:
        return
    node.args = (*node.args[:5], residual, *(each is not None for each in found))
    node.meta["val"] = _computed(node)
    with graph.inserting_after(node):
        sums = _call(graph, operator.getitem, node, 2)
    for index, each in enumerate(each for each in found if each is not None):
        _replace(graph, sums, index, each)


def _column_sums(tensor: Node) -> Iterator[ColumnSum]:
    """Sums over all dims but the last whose only use is as an output of the graph."""
    n = _value(tensor).shape[-1]
    parts = [part for part in (tensor, *tensor.users) if part is tensor or part.target in _VIEWS]
    for part in parts:
        if _value(part).dim() == 2 and _value(part).shape[-1] == n:
            for total in part.users:
                if (
                    total.target is aten.sum.dim_IntList
                    and total.args[1] == [0]
                    and not total.kwargs
                ):
                    users = list(total.users)
                    last = users[0] if len(users) == 1 and users[0].target in _VIEWS else total
                    if [user.op for user in last.users] == ["output"]:
                        yield ColumnSum(total, last)


def _replace(graph: Graph, sums: Node, index: int, wanted: ColumnSum) -> None:
    """Replace a column sum by row `index` of the kernel's partial sums, added up after `sums`."""
    value = _value(wanted.last)
    with graph.inserting_before(sums.next):
        part = _call(graph, aten.select.int, sums, 0, index)
        total = _call(graph, aten.sum.dim_IntList, part, [0])
        rounded = _call(graph, torch.ops.prims.convert_element_type.default, total, value.dtype)
        shaped = _call(graph, aten.view.default, rounded, list(value.shape))
    wanted.last.replace_all_uses_with(shaped)
    for node in dict.fromkeys((wanted.last, wanted.total)):
        graph.erase_node(node)


def _call(graph: Graph, target: Any, *args: Any) -> Node:
    node = graph.call_function(target, args)
    node.meta["val"] = _computed(node)
    return node


def _computed(node: Node) -> Any:
    """The fake result of the node: its function applied to the fake tensors of its arguments."""
    return cast(Any, node.target)(*torch.fx.map_arg(node.args, _value))
