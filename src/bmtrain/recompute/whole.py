"""Recomputes a block: by torch's checkpoint, or by a second graph where TorchScript runs."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from bmtrain.errors import RecomputationError
from bmtrain.recompute.replay import Replay
from bmtrain.recompute.scripts import Scripts
from bmtrain.shard.outputs import before_backward_of, map_tensors, tensors_of
from bmtrain.shard.slices import Slices
from bmtrain.torch_internals import next_node_number, node_number, will_run

# Runs a module, with parameters tied to the graph or, if the flag is set, as leaves outside of it.
# Returns the output and the parameters.
Body = Callable[[tuple[Any, ...], dict[str, Any], bool], tuple[Any, Sequence[torch.Tensor]]]


def recomputed(
    body: Body,
    replay: Replay,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    scripts: Scripts,
    on_script: Callable[[], None],
) -> tuple[Any, Sequence[torch.Tensor]]:
    """Run `body` now and again when backward reaches its output.

    torch's checkpoint matches the tensors that the second run saves with those of the first by
    their order, and stops at the last one. TorchScript changes that order between calls. If it has
    run, the graph of the first run is replaced by one node, which computes all gradients in the
    graph of a second run.

    Args:
        replay: replays this call.
        scripts: counts calls of TorchScript functions.
        on_script: called if the second run will compute all gradients.

    Raises:
        RecomputationError: for a TorchScript module that reads a non-leaf tensor which is none of
            its arguments.
    """
    before, first_node = scripts.count(), next_node_number()
    params: list[Sequence[torch.Tensor]] = []

    def run(*own: Any) -> Any:
        is_first = replay.is_first
        with replay.run(own, kwargs) as (given, named):
            out, used = body(given, named, False)
        if is_first:
            params.append(used)
        return out

    # The replay restores random states.
    out = checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False)
    # `run` lives as long as the graph: left in `params`, full parameters would stay resident.
    used = params.pop()
    if scripts.count() != before:
        on_script()
        out = _as_one_node(out, _Again(body, replay, args, kwargs), used, first_node)
        _refuse_backward_of(replay.attributes(), first_node)
    # The hook below lives as long as the graph. A strong reference would keep the arguments
    # resident after backward has freed what it saved; then there is nothing left to check.
    alive = weakref.ref(replay)

    def check() -> None:
        own = alive()
        if own is not None:
            own.check()

    before_backward_of(out, first_node, check)
    return out, used


class _Again:
    """A call that can run once more, to take the gradients of its inputs.

    Attributes:
        positional: the tensors among `args`, which autograd saves.
        inputs: the distinct tensors among all arguments that require grad.
    """

    def __init__(
        self, body: Body, replay: Replay, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._body, self._replay = body, replay
        self.positional = [arg for arg in args if isinstance(arg, torch.Tensor)]
        self._others = [None if isinstance(arg, torch.Tensor) else arg for arg in args]
        self._is_tensor = [isinstance(arg, torch.Tensor) for arg in args]
        self._kwargs = kwargs
        found = tensors_of((args, kwargs))
        self._places: list[int | None] = []
        numbers: dict[int, int] = {}
        self.inputs: list[torch.Tensor] = []
        for tensor in found:
            if tensor.requires_grad and id(tensor) not in numbers:
                numbers[id(tensor)] = len(self.inputs)
                self.inputs.append(tensor)
            self._places.append(numbers.get(id(tensor)))

    def forget_tensors(self) -> None:
        """Drop the references: autograd has saved what the second run needs."""
        self.positional, self.inputs = [], []

    def run(
        self, positional: Sequence[torch.Tensor]
    ) -> tuple[Any, list[torch.Tensor], Sequence[torch.Tensor]]:
        """Run again; returns the output, leaves that stand in for `inputs`, and the parameters."""
        tensors = iter(positional)
        args = tuple(
            next(tensors) if is_tensor else other
            for is_tensor, other in zip(self._is_tensor, self._others, strict=True)
        )
        stand_ins: dict[int, torch.Tensor] = {}
        places = iter(self._places)

        def apart(tensor: torch.Tensor) -> torch.Tensor:
            place = next(places)
            if place is None:
                return tensor
            if place not in stand_ins:
                stand_ins[place] = tensor.detach().requires_grad_()
            return stand_ins[place]

        with torch.enable_grad(), self._replay.run(args, self._kwargs) as arguments:
            given, named = map_tensors(apart, arguments)
            out, params = self._body(given, named, True)
        return out, [stand_ins[number] for number in range(len(stand_ins))], params


@dataclasses.dataclass(frozen=True)
class _Replacement:
    """One node that replaces a graph.

    made: indices, among all tensors of the output, of those that the graph made.
    captured: other leaves that the module reads, such as parameters of blocks inside it.
    is_reentrant: whether the module contains reentrant checkpoints, which refuse a backward pass
    for some inputs only.
    """

    again: _Again
    made: Sequence[int]
    captured: Sequence[torch.Tensor]
    is_reentrant: bool

    def gradients(
        self, positional: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Gradients of the inputs, the parameters and the captured leaves, from a second run."""
        out, inputs, params = self.again.run(positional)
        found = tensors_of(out)
        if len(found) <= max(self.made):
            raise RecomputationError(
                f"the recomputation of a block returned {len(found)} tensors, its "
                "forward pass more: let it depend on its "
                "arguments, parameters and attributes alone, or give the block "
                "use_checkpoint=False."
            )
        ends = [
            (found[place], grad)
            for place, grad in zip(self.made, grads, strict=True)
            if grad is not None and found[place].requires_grad
        ]
        wanted = [*inputs, *(param for param in params if param.requires_grad), *self.captured]
        if not (ends and wanted):
            return [None] * len(wanted)
        outputs, given = zip(*ends, strict=True)
        if not all(will_run(get_gradient_edge(leaf).node) for leaf in self.captured):
            raise RecomputationError(
                "gradients of some tensors only were asked for through a block that "
                "runs TorchScript, has a block or a reentrant "
                "checkpoint inside and is recomputed: call backward(), or give the "
                "block use_checkpoint=False."
            )
        # Reentrant checkpoints need a full pass. Otherwise `inputs` keeps the pass from
        # accumulating into leaves elsewhere. Blocks inside reduce their own gradients.
        torch.autograd.backward(outputs, given, inputs=None if self.is_reentrant else wanted)
        num_own = len(wanted) - len(self.captured)  # the pass has accumulated into the others
        return [leaf.grad for leaf in wanted[:num_own]] + [None] * len(self.captured)


class _Whole(torch.autograd.Function):
    """Returns the outputs of the first run on a graph of one node."""

    @staticmethod
    def forward(
        ctx: Any, plan: _Replacement, made: Sequence[torch.Tensor], *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.plan = plan
        ctx.save_for_backward(*plan.again.positional)
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in made)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RecomputationError(
                "gradients of gradients (create_graph=True) were asked for through a "
                "block that runs TorchScript and is "
                "recomputed: give the block use_checkpoint=False."
            )
        return None, None, *ctx.plan.gradients(ctx.saved_tensors, grads)


def _as_one_node(out: Any, again: _Again, params: Sequence[torch.Tensor], first_node: int) -> Any:
    found = tensors_of(out)
    made = [
        place
        for place, x in enumerate(found)
        if x.grad_fn is not None and node_number(x.grad_fn) >= first_node
    ]
    different = list({id(found[place]): place for place in reversed(made)}.values())[::-1]
    if not different:
        return out
    trained = [param for param in params if param.requires_grad]
    known = [*again.inputs, *trained]
    captured, is_reentrant = _captured([found[place] for place in different], known, first_node)
    plan = _Replacement(again, different, captured, is_reentrant)
    results = _Whole.apply(plan, [found[place] for place in different], *known, *captured)
    again.forget_tensors()
    renewed = {id(found[place]): result for place, result in zip(different, results, strict=True)}
    return map_tensors(lambda x: renewed.get(id(x), x), out)


def _captured(
    made: Sequence[torch.Tensor], known: Sequence[torch.Tensor], first_node: int
) -> tuple[list[torch.Tensor], bool]:
    """Leaves that the graph of `made` reaches beside `known`; whether it has reentrant checkpoints.

    Raises:
        RecomputationError: if it reaches a non-leaf that was made before the call.
    """
    edges = {(edge.node, edge.output_nr) for edge in map(get_gradient_edge, known)}
    leaves: dict[int, torch.Tensor] = {}
    ways: list[tuple[Node | None, int]] = [(x.grad_fn, x.output_nr) for x in made]
    seen: set[Node] = set()
    is_reentrant = False
    while ways:
        node, number = ways.pop()
        if node is None or node in seen or (node, number) in edges:
            continue
        leaf = getattr(node, "variable", None)
        # A sharded parameter: its gradient is reduced when backward reaches the engine's leaf,
        # which feeds the same node.
        if isinstance(leaf, Slices):
            continue
        if leaf is not None:
            leaves[id(leaf)] = leaf
        elif node_number(node) < first_node:
            raise RecomputationError(
                "a block that runs TorchScript and is recomputed reads a tensor with "
                f"a graph ({node.name()}) that is none of its "
                "arguments, nor in their lists, tuples, dicts and dataclasses: pass it "
                "as an argument, detach it, or give the "
                "block use_checkpoint=False."
            )
        else:
            seen.add(node)
            is_reentrant |= node.name() == f"{CheckpointFunction.__name__}Backward"
            ways.extend(node.next_functions)
    return list(leaves.values()), is_reentrant


def _refuse_backward_of(tensors: Iterable[torch.Tensor], first_node: int) -> None:
    """Raise in backward from `tensors`: their graph, of the first run, has been given up."""

    def refuse(_: object) -> None:
        raise RecomputationError(
            "a gradient came to a tensor that the forward pass of a block has left in "
            "an attribute of its module; the block runs "
            "TorchScript and is recomputed: let it return the tensor, or give the "
            "block use_checkpoint=False."
        )

    for tensor in tensors:
        if tensor.grad_fn is not None and node_number(tensor.grad_fn) >= first_node:
            tensor.grad_fn.register_prehook(refuse)
