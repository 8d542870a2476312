"""A block's arguments and outputs: their tensors at any depth, and their path in backward."""

from __future__ import annotations

import collections
import copy
import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bmtrain.torch_internals import node_number, tree_flatten, tree_unflatten

_NO_TENSORS = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size})
PLAIN = _NO_TENSORS | {torch.Tensor}


def tensors_of(out: Any) -> list[torch.Tensor]:
    """The tensors in `out`."""
    found: list[torch.Tensor] = []

    def note(x: torch.Tensor) -> torch.Tensor:
        found.append(x)
        return x

    map_tensors(note, out)
    return found


def map_tensors(fn: Callable[[Any], Any], out: Any) -> Any:
    """`out` with `fn` applied to its tensors; the same object if none changes."""
    kind = type(out)
    if isinstance(out, torch.Tensor):
        return fn(out)
    if kind in _NO_TENSORS:
        return out
    # Every call of a block comes here, and torch's pytree takes ten times as long.
    if kind in (tuple, list, dict):
        values = out.values() if kind is dict else out
        mapped = [map_tensors(fn, value) for value in values]
        if all(map(operator.is_, mapped, values)):
            return out
        return dict(zip(out, mapped, strict=True)) if kind is dict else kind(mapped)
    if dataclasses.is_dataclass(out) and not isinstance(out, type):
        fields = [
            (field.name, getattr(out, field.name))
            for field in dataclasses.fields(out)
            # a property may compute, together with other ranks
            if field.init and not isinstance(getattr(kind, field.name, None), property)
        ]
        changed = {
            name: new for name, value in fields if (new := map_tensors(fn, value)) is not value
        }
        # transformers' outputs hold their values as items too
        is_dict = isinstance(out, dict) and bool(changed)
        made = dataclasses.replace(out, **changed) if is_dict else copy.copy(out)
        for name, new in () if is_dict else changed.items():
            object.__setattr__(made, name, new)
        return made if changed else out
    leaves, spec = tree_flatten(out)
    is_leaf = len(leaves) == 1 and leaves[0] is out
    mapped = leaves if is_leaf else [map_tensors(fn, leaf) for leaf in leaves]
    return out if all(map(operator.is_, mapped, leaves)) else tree_unflatten(mapped, spec)


def before_backward_of(out: Any, since: int, do: Callable[[], None]) -> None:
    """Run `do` each time backward reaches a tensor of `out` that this call has computed.

    Its node has a number from `since` on; that of an argument which is passed on is older.
    """
    for x in tensors_of(out):
        if x.grad_fn is not None and node_number(x.grad_fn) >= since:
            x.grad_fn.register_prehook(lambda _: do())


class _Tie(torch.autograd.Function):
    """A copy of `x` whose backward leads to the node of `end` too, with no gradient for it.

    A copy, because torch refuses in-place writes to views that a Function returns, and programs
    write to what a block returns.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, end: torch.Tensor | None) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        return grad, None


def tied_to(
    end: torch.Tensor | None, out: Any, arguments: Any, since: int, *, is_gathered_again: bool
) -> Any:
    """`out`, tied to the graph so that backward reaches this call's gathers and reductions.

    On some ranks the outputs may have been computed without the block's parameters: `return x if
    x.sum() > 0 else layer(x)`. Backward would gather and reduce nothing there, and the other ranks
    would hang.

    Args:
        end: a gathered parameter of the call that requires grad; None if all are frozen.
        arguments: what the block was called with.
        since: number of the first node of the call.
        is_gathered_again: whether backward gathers again what forward has gathered.
    """
    tensors = tensors_of(out)
    roots = [x.grad_fn for x in tensors if x.grad_fn is not None]
    if end is None:
        # Frozen parameters are gathered by the first node of the call that backward reaches.
        if not is_gathered_again or any(node_number(root) >= since for root in roots):
            return out
    elif end.grad_fn is None or _leads_to(end.grad_fn, roots, since):
        return out
    wanted = {id(x) for x in tensors if x.requires_grad}
    if not wanted and end is not None:  # passed on: an argument without gradient
        given = {id(x) for x in tensors_of(arguments)}
        wanted = {id(x) for x in tensors if id(x) in given and x.is_floating_point()}
    return map_tensors(lambda x: _Tie.apply(x, end) if id(x) in wanted else x, out)


def _leads_to(
    end: torch.autograd.graph.Node, roots: Sequence[torch.autograd.graph.Node], since: int
) -> bool:
    """Whether backward from `roots` reaches `end`.

    Nodes older than both the call and `end` cannot lead there, so the search stops at them.
    """
    oldest = min(since, node_number(end))
    seen, waiting = set(roots), collections.deque(roots)
    while waiting:
        node = waiting.popleft()
        if node is end:
            return True
        for following, _ in node.next_functions:
            if following is not None and following not in seen and node_number(following) >= oldest:
                seen.add(following)
                waiting.append(following)
    return False
