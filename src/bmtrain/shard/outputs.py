"""What a block returns: tensors in containers and dataclasses of any depth."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bmtrain.shard.trees import map_tensors, tensors_of
from bmtrain.shard.unshard import Use
from bmtrain.torch_internals import node_number


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


def tied_to(use: Use, views: Sequence[torch.Tensor], out: Any, arguments: Any, since: int) -> Any:
    """`out`, from where backward finds the way to the gathers and the reductions of this call, as
    it does on the other ranks.

    On some ranks the outputs of a block may have been computed without its parameters: `return x if
    x.sum() > 0 else layer(x)`. There nothing would gather for the backward pass or reduce, and the
    other ranks would wait.

    Args:
        use, views: the parameters of the call.
        arguments: what the block was called with.
        since: number of the first node of the call.
    """
    if not use.is_shared_by_ranks:
        return out
    tensors = tensors_of(out)
    end = next((view for view in views if view.requires_grad), None)
    roots = [x.grad_fn for x in tensors if x.grad_fn is not None]
    if end is None:
        # Frozen parameters are gathered in backward by whatever node of the call it comes to.
        if not use.is_gathered_again or any(node_number(root) >= since for root in roots):
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


def detached_from(use: Use, out: Any) -> Any:
    """Copies in place of outputs that lie in a full buffer, which other blocks will overwrite."""

    def copy(value: Any) -> Any:
        return value.clone() if isinstance(value, torch.Tensor) and use.owns(value) else value

    return map_tensors(copy, out)
