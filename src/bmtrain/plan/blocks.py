"""One block without memory: what it keeps from forward to backward at each level, and its peaks."""

from __future__ import annotations

import dataclasses
import types
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from bmtrain.compile import backend, fp8
from bmtrain.compile.compiled import recomputing
from bmtrain.plan import lifetimes
from bmtrain.plan.meter import Meter, Saved, tensors_in
from bmtrain.recompute.level import Level, Selective
from bmtrain.recompute.runner import ModuleCall, call

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
        flops, attention: of the forward pass.
        reason: why it runs uncompiled; empty if it does not, or was not asked to.
    """

    levels: dict[Level, Cost]
    inputs: int
    flops: float
    attention: float
    reason: str = ""


def costs(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    shared: Sequence[torch.Tensor],
    *,
    levels: Sequence[Level] = COUNTED,
    compiled: bool,
    in_fp8: bool,
) -> BlockCosts:
    """Costs of `module(*args, **kwargs)` at each level.

    Args:
        module, args, kwargs: without memory.
        shared: arguments that all blocks get, which count for none of them.
        levels: which of COUNTED are wanted; others may be missing.
        compiled: whether it runs through inductor, as a Block does on a GPU if it is one graph.
        in_fp8: linear layers in FP8.
    """
    case = _Case(module, args, kwargs, shared)
    meter = Meter([*case.spare, *case.own])
    with torch.no_grad(), meter:
        case.run(call)
    found, reason = _compiled(case, levels) if compiled else (None, "")
    found = found or _eager(case)
    if in_fp8:
        found[Level.NOTHING] = _with_codes(case, found[Level.NOTHING], compiled and not reason)
    inputs = sum(x.nbytes for x in case.own if x.is_floating_point())
    if Level.BLOCK in found:
        block = found[Level.BLOCK]
        found[Level.OFFLOADED] = Cost(
            max(block.kept - inputs, 0), block.forward, block.backward + inputs
        )
    return BlockCosts(found, inputs, meter.flops, meter.attention, reason)


class _Case:
    """A call that can be repeated, each time with arguments of its own."""

    def __init__(
        self,
        module: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        shared: Sequence[torch.Tensor],
    ) -> None:
        self.module, self.args, self.kwargs = module, args, kwargs
        apart = {id(x.untyped_storage()) for x in shared}
        given = tensors_in((args, kwargs))
        self.own = [x for x in given if id(x.untyped_storage()) not in apart]
        self.spare = [*module.parameters(), *module.buffers(), *shared]
        self.num_own = sum({id(s): s.nbytes() for s in map(_storage, self.own)}.values())

    def run(self, function: ModuleCall) -> Any:
        """The output."""
        return function(self.module, self.args, self.kwargs)


def _storage(x: torch.Tensor) -> Any:
    return x.untyped_storage()


def _ends(out: Any) -> list[torch.Tensor]:
    return [x for x in tensors_in(out) if x.requires_grad]


def _eager(case: _Case) -> dict[Level, Cost]:
    """Costs of the module run operator by operator."""
    saved, meter = Saved(case.spare), Meter([*case.spare, *case.own])
    with meter:
        with saved:
            out = case.run(call)
        forward, ends = meter.peak, _ends(out)
        del out
        meter.restart_peak()
        if ends:
            torch.autograd.backward(ends, [torch.empty_like(end) for end in ends])
        del ends
    backward = meter.peak
    _clear(case)
    kept, own = saved.num_bytes, case.num_own
    keeping = Selective(call)
    with torch.no_grad():
        case.run(keeping)
    cheap = own + keeping.num_bytes()
    keeping.forget()
    most = max(forward, backward)
    return {
        # arguments count even where autograd does not save them: the caller holds them meanwhile
        Level.NOTHING: Cost(kept, forward + own, backward + own),
        Level.CHEAP: Cost(cheap, forward + cheap, most + own),
        Level.BLOCK: Cost(own, forward + own, most + own),
    }


def _clear(case: _Case) -> None:
    for param in case.module.parameters():
        param.grad = None
    for x in case.own:
        if x.is_leaf:
            x.grad = None


def _with_codes(case: _Case, plain: Cost, compiled: bool) -> Cost:
    """`plain` less what linear layers save in eight bits.

    Peaks inside a pass are left as they are: the products that a CPU has for FP8 take more.
    """
    if compiled:
        found, _ = _compiled(case, (Level.NOTHING,), in_fp8=True)
        saved = plain.kept if found is None else found[Level.NOTHING].kept
    else:
        counter = Saved(case.spare)
        with counter, fp8.Fp8Mode():
            case.run(call)
        saved = counter.num_bytes
    return dataclasses.replace(plain, kept=saved, backward=plain.backward - plain.kept + saved)


def _compiled(
    case: _Case, levels: Sequence[Level] = COUNTED, *, in_fp8: bool = False
) -> tuple[dict[Level, Cost] | None, str]:
    """Costs of the module compiled by inductor; None and the reason if it is not one graph."""
    found: dict[Level, Cost] = {}
    for level in levels:
        graphs = _Graphs()
        lower: backend.Lower = backend.AtOnce(backend.Seeded(graphs))
        if in_fp8:
            lower = backend.InFp8(lower)
        run = torch.compile(
            _own_code(recomputing(level)), backend=lower, fullgraph=True, dynamic=False
        )
        saved = Saved(case.spare)
        try:
            with warnings.catch_warnings(), saved:
                warnings.simplefilter("ignore")
                out = run(case.module, case.args, case.kwargs)
        except Exception as error:  # whatever the compiler raises, a Block then runs uncompiled
            return None, (str(error).strip().splitlines() or [type(error).__name__])[0]
        del out
        # At BLOCK the arguments are kept, whether or not backward reads them.
        kept = max(saved.num_bytes, case.num_own if level is Level.BLOCK else 0)
        found[level] = Cost(kept, graphs.forward + case.num_own, graphs.backward)
    return found, ""


def _own_code(function: ModuleCall) -> ModuleCall:
    """The same function with a code object of its own: torch limits recompilations by code."""
    return types.FunctionType(
        function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__
    )


class _Graphs:
    """A backend that notes the peaks of forward and backward in place of compiling them."""

    def __init__(self) -> None:
        self.forward = self.backward = 0
        self._params: set[str] = set()

    def __call__(
        self, graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor], **options: Any
    ) -> Any:
        names = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
        # AOTAutograd calls the inputs primals_1, primals_2 and so on, in this order.
        self._params = {
            f"primals_{number + 1}" for number, name in enumerate(names) if "_parameters_" in name
        }
        return backend.traced(graph, inputs, take=self._take)

    def _take(self, graph: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        if options.get("is_backward"):
            most = lifetimes.peak(graph.graph, lambda node: node.name not in self._params)
            self.backward = max(self.backward, int(most))
        else:
            most = lifetimes.peak(graph.graph, lambda node: False)
            self.forward = max(self.forward, int(most))
        return graph
