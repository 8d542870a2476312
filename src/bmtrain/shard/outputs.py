"""What a block takes and returns: tensors in containers and dataclasses of any depth, and where
backward goes from them.
"""

from __future__ import annotations

import collections
import dataclasses
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from bmtrain.torch_internals import node_number, tree_flatten, tree_unflatten

_NO_TENSORS = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size})
_PLAIN = _NO_TENSORS | {torch.Tensor}


def tensors_of(out: Any) -> list[torch.Tensor]:
    """The tensors of `out`."""
    found: list[torch.Tensor] = []

    def note(x: torch.Tensor) -> torch.Tensor:
        found.append(x)
        return x

    map_tensors(note, out)
    return found


def has_plain_tensors(values: Iterable[Any]) -> bool:
    """Whether these are ordinary tensors and values without tensors, and nothing else."""
    return _PLAIN.issuperset(map(type, values))


def map_tensors(fn: Callable[[Any], Any], out: Any) -> Any:
    """`out` with `fn` applied to its tensors; the same object if none changes."""
    kind = type(out)
    if isinstance(out, torch.Tensor):
        return fn(out)
    if kind in _NO_TENSORS:
        return out
    # every call of a block meets these: torch's trees take ten times as long
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
            if field.init
        ]
        changed = {
            name: new for name, value in fields if (new := map_tensors(fn, value)) is not value
        }
        return dataclasses.replace(out, **changed) if changed else out
    leaves, spec = tree_flatten(out)
    is_leaf = len(leaves) == 1 and leaves[0] is out
    mapped = leaves if is_leaf else [map_tensors(fn, leaf) for leaf in leaves]
    return out if all(map(operator.is_, mapped, leaves)) else tree_unflatten(mapped, spec)


def before_backward_of(out: Any, since: int, do: Callable[[], None]) -> None:
    """`do` whenever backward comes to a tensor of `out` whose node has a number from `since` on: it
    is no argument passed on.
    """

    def watch(x: torch.Tensor) -> torch.Tensor:
        if x.grad_fn is not None and node_number(x.grad_fn) >= since:
            x.grad_fn.register_prehook(lambda _: do())
        return x

    map_tensors(watch, out)


class _Tie(torch.autograd.Function):
    """A copy of `x` whose backward pass goes on to the node that made `end` too, with no gradient
    for it.

    A copy, because torch refuses to write into views that a Function has made, and programs write
    into what a block returns.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, end: torch.Tensor | None) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        return grad, None


def tied_to(
    views: Sequence[torch.Tensor], out: Any, arguments: Any, since: int, *, is_gathered_again: bool
) -> Any:
    """`out`, from where backward finds the way to the gathers and the reductions of this call, as
    it does on the other ranks.

    On some ranks the outputs of a block may have been computed without its parameters: `return x if
    x.sum() > 0 else layer(x)`. There nothing would gather for the backward pass or reduce, and the
    other ranks would wait.

    Args:
        views: the gathered parameters of the call.
        arguments: what the block was called with.
        since: number of the first node of the call.
        is_gathered_again: whether backward gathers what forward has gathered already.
    """
    tensors = tensors_of(out)
    end = next((view for view in views if view.requires_grad), None)
    roots = [x.grad_fn for x in tensors if x.grad_fn is not None]
    if end is None:
        # Frozen parameters are gathered in backward by whatever node of the call it comes to.
        if not is_gathered_again or any(node_number(root) >= since for root in roots):
            return out
    elif end.grad_fn is None or _leads_to(end.grad_fn, roots, since):
        return out
    wanted = {id(x) for x in tensors if x.requires_grad}
    if not wanted and end is not None:  # an argument that needs no gradient here has been passed on
        given = {id(x) for x in tensors_of(arguments)}
        wanted = {id(x) for x in tensors if id(x) in given and x.is_floating_point()}
    return map_tensors(lambda x: _Tie.apply(x, end) if id(x) in wanted else x, out)


def _leads_to(
    end: torch.autograd.graph.Node, roots: Sequence[torch.autograd.graph.Node], since: int
) -> bool:
    """Whether backward from `roots` comes to `end`.

    What was there before the call, and before `end`, cannot lead there.
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


def detached_from(owns: Callable[[torch.Tensor], bool], out: Any) -> Any:
    """Copies in place of outputs of which it `owns` the memory: a full buffer, which other blocks
    will overwrite.
    """

    def copy(value: Any) -> Any:
        return value.clone() if isinstance(value, torch.Tensor) and owns(value) else value

    return map_tensors(copy, out)
