"""Fusion of sums into the norm kernels, in the joint forward and backward graph of a block.

A residual is added to the norm's input, gradients of a tensor with several users are added up, and
the gradient of a bias is a column sum: each is one pass over memory. The kernels of norms and of
their gradients read or write these tensors anyway, so they take the terms as inputs and also return
the sum or the column sums.
"""

from __future__ import annotations

import operator
from typing import Any, cast

import torch
from torch.fx import Graph, Node

from bmtrain.kernels.norm import MOST_GRADS, MOST_INPUTS, WIDE

aten = torch.ops.aten
_VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)


def join(graph: Graph) -> None:
    """Fuse sums into norm kernels, in place.

    Results are unchanged, except that a fused sum is rounded once instead of after each term.
    """
    forward, backward = torch.ops.bmtrain.norm.default, torch.ops.bmtrain.norm_backward.default
    found = [*graph.find_nodes(op="call_function", target=forward)]
    for node in found:
        _join_inputs(graph, node)
    for node in graph.find_nodes(op="call_function", target=backward):
        grads, inputs, *rest = node.args
        node.args = _terms(grads[0], MOST_GRADS, node), _terms(inputs[0], MOST_INPUTS, None), *rest
        outputs = (user for user in node.users if user.target is operator.getitem)
        result = next((user for user in outputs if user.args[1] == 0), None)
        _join_residual(graph, node, result)
        _join_column_sums(graph, node, result)
        found.append(node)
    for node in found:  # inductor matches the inputs' layouts to the values noted here
        node.meta["eager_input_vals"] = torch.fx.map_arg((node.args, node.kwargs), _value)


def _join_inputs(graph: Graph, node: Node) -> None:
    """If the norm's input is a sum, let the kernel compute it, also for the sum's other users."""
    (total,) = cast(list[Node], node.args[0])
    terms = _terms(total, MOST_INPUTS, None)
    if terms != [total] and all(node < user for user in total.users if user is not node):
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
    if most < 2 or not addends or (only_user is not None and set(node.users) != {only_user}):
        return [node]
    user = None if only_user is None else node
    left = _terms(addends[0], most - 1, user)
    return [*left, *_terms(addends[1], most - len(left), user)]


def _addends(node: Node) -> list[Node]:
    """The two tensors whose sum this node is, if both have its shape and dtype; else nothing."""
    if node.target is not aten.add.Tensor or node.kwargs:
        return []
    values = [_value(x) if isinstance(x, Node) else None for x in (node, *node.args)]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]  # not symbolic sizes
    is_alike = all(x.shape == tensors[0].shape and x.dtype == tensors[0].dtype for x in tensors)
    return cast(list[Node], [*node.args]) if is_alike and len(tensors) == 3 else []


def _join_residual(graph: Graph, node: Node, result: Node | None) -> None:
    """If the only use of the gradient is to add it to an earlier tensor, let the kernel add it."""
    if result is None or len(result.users) != 1:
        return
    (total,) = result.users
    others = [addend for addend in _addends(total) if addend is not result]
    if len(others) == 1 and others[0] < node:
        node.args = (*node.args[:5], others[0])
        total.replace_all_uses_with(result)
        graph.erase_node(total)


def _join_column_sums(graph: Graph, node: Node, result: Node | None) -> None:
    """Let the kernel compute column sums of the gradient and of the residual, where used."""
    residual = node.args[5] if len(node.args) > 5 else None
    found = [_column_sum(tensor) for tensor in (result, residual)]
    if found == [None, None] or _value(cast(Node, node.args[2])).shape[0] > WIDE:
        return
    node.args = (*node.args[:5], residual, *(each is not None for each in found))
    node.meta["val"] = _computed(node)
    with graph.inserting_after(node):
        sums = _call(graph, operator.getitem, node, 2)
    for index, (total, last) in enumerate(each for each in found if each is not None):
        # by the kernel's partial sums, added up, in the form of the bias's gradient
        value = _value(last)
        with graph.inserting_before(sums.next):
            part = _call(graph, aten.select.int, sums, 0, index)
            whole = _call(graph, aten.sum.dim_IntList, part, [0])
            convert = torch.ops.prims.convert_element_type.default
            rounded = _call(graph, convert, whole, value.dtype)
            shaped = _call(graph, aten.view.default, rounded, list(value.shape))
        last.replace_all_uses_with(shaped)
        for old in dict.fromkeys((last, total)):
            graph.erase_node(old)


def _column_sum(tensor: Any) -> tuple[Node, Node] | None:
    """A sum over all dims but the last whose only use is as an output of the graph, as the gradient
    of a bias is; and that output, in its final shape.
    """
    if not isinstance(tensor, Node):
        return None
    for part in (tensor, *(user for user in tensor.users if user.target in _VIEWS)):
        value = _value(part)
        if value.dim() != 2 or value.shape[-1] != _value(tensor).shape[-1]:
            continue
        for total in part.users:
            is_sum = total.target is aten.sum.dim_IntList and total.args[1] == [0]
            if is_sum and not total.kwargs:
                users = list(total.users)
                last = users[0] if len(users) == 1 and users[0].target in _VIEWS else total
                if [user.op for user in last.users] == ["output"]:
                    return total, last
    return None


def _call(graph: Graph, target: Any, *args: Any) -> Node:
    node = graph.call_function(target, args)
    node.meta["val"] = _computed(node)
    return node


def _value(node: Node) -> Any:
    """The fake tensor, or tensors, that the compiler has recorded for a node."""
    return node.meta["val"]


def _computed(node: Node) -> Any:
    """The fake result of the node: its function applied to the fake tensors of its arguments."""
    return cast(Any, node.target)(*torch.fx.map_arg(node.args, _value))
