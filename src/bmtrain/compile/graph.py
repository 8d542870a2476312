"""Walks over the graph of a block, into the graphs that it holds."""

from __future__ import annotations

from collections.abc import Iterator

import torch


def parts(graph: torch.fx.GraphModule) -> Iterator[torch.fx.GraphModule]:
    """The graph and its subgraphs: recomputed regions, and the passes of autograd functions."""
    return (part for part in graph.modules() if isinstance(part, torch.fx.GraphModule))


def calls(graph: torch.fx.GraphModule) -> Iterator[torch.fx.Node]:
    """The nodes of all parts that call a function or an operator."""
    for part in parts(graph):
        yield from (node for node in part.graph.nodes if node.op == "call_function")
