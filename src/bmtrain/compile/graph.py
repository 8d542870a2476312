"""The graph of a block as Dynamo has traced it, and the graphs that it holds."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from bmtrain.recompute.memory import storages_of
from bmtrain.torch_internals import HigherOrderOperator, is_mutable, overloads


def parts(graph: torch.fx.GraphModule) -> Iterator[torch.fx.GraphModule]:
    """The graph and its subgraphs: recomputed regions, and the passes of autograd functions."""
    return (part for part in graph.modules() if isinstance(part, torch.fx.GraphModule))


def calls(graph: torch.fx.GraphModule) -> Iterator[torch.fx.Node]:
    """The nodes of all parts that call a function or an operator."""
    for part in parts(graph):
        yield from (node for node in part.graph.nodes if node.op == "call_function")


def value_of(node: Any) -> torch.Tensor | None:
    """The example tensor that Dynamo has recorded for a node; None if it is not a tensor."""
    value = node.meta.get("example_value") if isinstance(node, torch.fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def refuse_shared(graph: torch.fx.GraphModule) -> None:
    """NotImplementedError if results lie in one place of the memory that `copies` cannot copy, as a
    tensor and its view: copied one by one they would part.
    """
    results: Any = graph.graph.output_node().args[0]
    nodes = [node for node in graph.graph.nodes if node.op == "placeholder"]
    given = memories(nodes)
    groups: dict[int, list[torch.Tensor]] = {}
    for x in map(value_of, {*results}):
        if x is not None:
            groups.setdefault(id(x.untyped_storage()), []).append(x)
    for place, members in groups.items():
        # texts, as sizes may be symbols
        kinds = {str((x.shape, x.stride(), x.storage_offset())) for x in members}
        if sum(x.requires_grad for x in members) > 1 or (len(kinds) > 1 and place not in given):
            raise NotImplementedError("one result lies in the memory of another")


def copies(results: Sequence[Any], arguments: Iterable[Any]) -> list[Any]:
    """The results, their tensors copied but for those in the memory of an argument.

    A result and the same detached stay in one place of the memory.
    """
    given = storages_of(x for x in arguments if isinstance(x, torch.Tensor))
    made: dict[int, torch.Tensor] = {}
    out = list(results)
    found = [(n, x, x.untyped_storage()) for n, x in enumerate(out) if isinstance(x, torch.Tensor)]
    for n, x, place in sorted(found, key=lambda each: not each[1].requires_grad):
        if id(place) not in given:
            known = made.get(id(place))
            out[n] = made[id(place)] = x.clone() if known is None else known.detach()
    return out


def given(node: torch.fx.Node) -> dict[str, Any]:
    """The arguments of a call of a known function, by the names of their parameters."""
    return dict(zip(_PARAMETERS.get(node.target, ()), node.args, strict=False)) | node.kwargs


_NORM = ("input", "normalized_shape", "weight", "bias")
_PARAMETERS: dict[Any, tuple[str, ...]] = {
    F.dropout: ("input", "p", "training"),
    F.embedding: (
        *("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq"),
        "sparse",
    ),
    F.scaled_dot_product_attention: (
        *("query", "key", "value", "attn_mask", "dropout_p", "is_causal"),
        *("scale", "enable_gqa"),
    ),
    F.linear: ("input", "weight", "bias"),
    F.layer_norm: _NORM,
    torch.layer_norm: _NORM,
    F.rms_norm: _NORM[:3],
    torch.rms_norm: _NORM[:3],
    F.cross_entropy: (
        *("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction"),
        "label_smoothing",
    ),
}


def can_wait(node: torch.fx.Node, until: torch.fx.Node) -> bool:
    """Whether `node` could be computed where a later node stands, with the same values and
    gradients: no tensor that it reads is written before, and no mode is changed.
    """
    read = memories(node.all_input_nodes)
    nodes = itertools.dropwhile(lambda each: each is not node, node.graph.nodes)
    between = itertools.takewhile(lambda each: each is not until, itertools.islice(nodes, 1, None))
    # what turns gradients, autocast or the like on or off
    modes = ("_set_", "_enter_", "_exit_")
    return not any(
        (each.op == "call_function" and name_of(each).startswith(modes))
        or (may_write(each) and read & memories(each.all_input_nodes))
        for each in between
    )


def memories(nodes: Iterable[torch.fx.Node]) -> set[int]:
    """What the tensors of these nodes lie in: the same for those that share memory."""
    values = map(value_of, nodes)
    return {id(value.untyped_storage()) for value in values if value is not None}


def may_write(node: torch.fx.Node) -> bool:
    """Whether it may write what it is given."""
    name = name_of(node)
    # `__setitem__` too
    is_in_place = name.endswith("_") or name in _IN_PLACE
    if node.op == "call_method":
        return is_in_place
    return node.op == "call_module" or (
        node.op == "call_function"
        and (
            is_in_place
            or isinstance(node.target, HigherOrderOperator)
            or any(map(is_mutable, overloads(node.target)))
            or "out" in node.kwargs
            or any(each is True for each in (*node.args, node.kwargs.get("inplace")))
        )
    )


def name_of(node: torch.fx.Node) -> str:
    """What a node calls: the same on all ranks, whose functions have other addresses."""
    target: Any = node.target
    return target if isinstance(target, str) else str(getattr(target, "__name__", ""))


# Of Python's operators, and some that write nothing.
_IN_PLACE = {name for name in vars(operator) if name.startswith("i")} | {"setitem"}
