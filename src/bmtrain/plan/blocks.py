"""One block without memory: what it keeps from forward to backward at each level, and its peaks."""

from __future__ import annotations

import dataclasses
import types
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from bmtrain.compile import backend
from bmtrain.compile.programs import recomputing
from bmtrain.errors import first_line
from bmtrain.plan import lifetimes
from bmtrain.plan.meter import Meter
from bmtrain.recompute.level import Level
from bmtrain.recompute.memory import Saved, storages_of
from bmtrain.recompute.recomputation import Selective, call
from bmtrain.torch_internals import tensors_of

COUNTED = (Level.NOTHING, Level.CHEAP, Level.BLOCK)


@dataclasses.dataclass(frozen=True)
class Cost:
    """Bytes of one call of a block at one level, arguments included, parameters not.

    kept: from forward to backward. forward, backward: the peaks in these; the latter with the full
    gradients of the block's parameters.
    """

    kept: int
    forward: int
    backward: int


@dataclasses.dataclass(frozen=True)
class BlockCosts:
    """A call of a block.

    Attributes:
        levels: costs by level.
        inputs: bytes of arguments that can move to the host.
        reason: why it runs uncompiled; empty if it does not, or was not asked to.
    """

    levels: dict[Level, Cost]
    inputs: int
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of a block, all of it without memory.

    Attributes:
        module, args, kwargs: of the call.
        own: tensors among the arguments that are kept for this block alone; others do not count.
    """

    module: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    own: Sequence[torch.Tensor]

    @property
    def spare(self) -> list[torch.Tensor]:
        """Tensors that do not count."""
        given = tensors_of((self.args, self.kwargs))
        others = [x for x in given if all(x is not own for own in self.own)]
        return [*self.module.parameters(), *self.module.buffers(), *others]

    @property
    def num_own(self) -> int:
        """Bytes of `own`."""
        return sum(storage.nbytes() for storage in storages_of(self.own).values())


def costs(case: Case, *, compiled: bool, keeps: bool = False) -> BlockCosts:
    """Costs of a call at each level.

    Args:
        case: the call.
        compiled: whether it runs through inductor, as a Block does on a GPU if it is one graph.
        keeps: whether all is kept at every level.
    """
    found, reason = dict[Level, Cost](), ""
    if compiled:
        try:
            found = {level: _compiled(case, level) for level in (COUNTED[:1] if keeps else COUNTED)}
        except Exception as error:  # whatever the compiler raises, a Block then runs uncompiled
            reason = first_line(error)
    found = found or _eager(case)
    if keeps:
        return BlockCosts(dict.fromkeys(Level, found[Level.NOTHING]), 0, reason)
    inputs = sum(x.nbytes for x in case.own if x.is_floating_point())
    block = found[Level.BLOCK]
    found[Level.OFFLOADED] = Cost(
        max(block.kept - inputs, 0), block.forward, block.backward + inputs
    )
    return BlockCosts(found, inputs, reason)


def _eager(case: Case) -> dict[Level, Cost]:
    """Costs of the module run operator by operator."""
    saved, meter = Saved(case.spare), Meter([*case.spare, *case.own])
    given = [*case.module.parameters(), *tensors_of((case.args, case.kwargs))]
    with meter:
        with saved:
            out = call(case.module, case.args, case.kwargs)
        ends = [x for x in tensors_of(out) if x.requires_grad]
        del out
        forward = meter.take_peak()
        if ends:
            wanted, grads = [x for x in given if x.requires_grad], list(map(torch.empty_like, ends))
            torch.autograd.grad(ends, wanted, grads, allow_unused=True)
    keeping = Selective(call)
    with torch.no_grad():
        keeping(case.module, case.args, case.kwargs)
    own = case.num_own
    cheap, most = own + keeping.num_bytes(), max(forward, meter.peak) + own
    return {
        # Arguments count even where autograd does not save them: the caller holds them meanwhile.
        Level.NOTHING: Cost(saved.num_bytes, forward + own, meter.peak + own),
        Level.CHEAP: Cost(cheap, forward + cheap, most),
        Level.BLOCK: Cost(own, forward + own, most),
    }


def _compiled(case: Case, level: Level) -> Cost:
    """Costs of the module compiled by inductor; raises what the compiler does."""
    forward = backward = 0
    params: set[str] = set()

    def note(graph: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        nonlocal forward, backward
        if options.get("is_backward"):
            most = lifetimes.peak(graph.graph, lambda node: node.name not in params)
            backward = max(backward, most)
        else:
            forward = max(forward, lifetimes.peak(graph.graph, lambda node: False))
        return graph

    def lower(graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor], **options: Any) -> Any:
        names = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
        # AOTAutograd calls the inputs primals_1, primals_2 and so on, in this order.
        params.clear()
        params.update(f"primals_{n + 1}" for n, name in enumerate(names) if "_parameters_" in name)
        return backend.traced(graph, inputs, take=note)

    function = recomputing(level)
    # A code object of its own: torch limits recompilations by code.
    own = types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
    run = torch.compile(own, backend=backend.AtOnce(lower), fullgraph=True, dynamic=False)
    saved = Saved(case.spare)
    with warnings.catch_warnings(), saved:
        warnings.simplefilter("ignore")
        run(case.module, case.args, case.kwargs)
    # At BLOCK the arguments are kept, whether or not backward reads them.
    kept = max(saved.num_bytes, case.num_own if level is Level.BLOCK else 0)
    return Cost(kept, forward + case.num_own, backward)
