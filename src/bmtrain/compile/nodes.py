"""What passes over a joint graph share: results of nodes, and nodes made or changed by a pass."""

from __future__ import annotations

import operator
from typing import Any, cast

import torch
from torch.fx import Graph, Node


def value(node: Node) -> Any:
    """The fake tensor, or tensors, that the compiler has recorded for a node."""
    return node.meta["val"]


def output(node: Node, index: int) -> Node | None:
    """The node that takes result `index` of a node with several results; None if none does."""
    return next(
        (user for user in node.users if user.target is operator.getitem and user.args[1] == index),
        None,
    )


def call(graph: Graph, target: Any, *args: Any) -> Node:
    """A new node that calls `target`, with its fake result, at the place where `graph` inserts."""
    node = graph.call_function(target, args)
    node.meta["val"] = computed(node)
    return node


def computed(node: Node) -> Any:
    """The fake result of the node: its function applied to the fake tensors of its arguments."""
    return cast(Any, node.target)(*torch.fx.map_arg(node.args, value))


def note_arguments(node: Node) -> None:
    """Record the values of the new arguments, to which inductor matches the inputs' layouts."""
    node.meta["eager_input_vals"] = torch.fx.map_arg((node.args, node.kwargs), value)
