"""What the compiler does with the graph of a block: look at it, put eight-bit products in, lower it, backward included."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from bmtrain.block import fp8
from bmtrain.runtime.log import warn

Lowered = Callable[..., Any]
Lower = Callable[..., Lowered]
# Namespaces of operators whose random numbers torch replays, or that draw none.
_OWN = frozenset(
    {"aten", "prims", "prim", "inductor", "inductor_prims", "higher_order", "quantized", "mkldnn", "bmtrain", "rngprims"}
)
# Operators by which ranks talk to one another, by the beginning of their names.
_TALKING = ("_c10d_functional", "c10d_functional", "c10d.", "_dtensor.", "symm_mem.", "bmtrain.tp_")


def find(name: str | Lower) -> Lower:
    """The backend that torch.compile has under this name."""
    if callable(name):
        return name
    return inductor if name == "inductor" else torch._dynamo.lookup_backend(name)


class CommunicationError(RuntimeError):
    """A graph has collectives. The compiler may change their order, on some ranks only if others run uncompiled."""


class UnsafeError(RuntimeError):
    """A graph that the compiler would get wrong."""


def inductor(graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor], **options: Any) -> Lowered:
    """torch's own backend. Takes `mode` and `options` as torch.compile does."""
    mode = options.get("mode")
    patches = {**(torch._inductor.list_mode_options(mode) if mode else {}), **(options.get("options") or {})}
    lower: Lower = torch._dynamo.lookup_backend("inductor")
    return lower(graph, inputs, config_patches=patches)


@dataclasses.dataclass(frozen=True)
class InFp8:
    """A backend that does what `lower` does, with the linear maps of the graph in eight bits. Equal ones share compiled code.

    whole: name of the module that a graph is the whole of, to be told if there is nothing to rewrite.
    """

    lower: Lower
    whole: str | None = None

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor], **options: Any) -> Lowered:
        """Rewrite and lower."""
        if not fp8.rewrite(graph) and self.whole is not None:
            warn(f"fp8=True changes nothing in {self.whole}: it has no product that torch.nn.functional.linear makes.")
        return self.lower(graph, inputs, **options)


@dataclasses.dataclass(frozen=True)
class AtOnce:
    """A backend that fails now or never, and does not trouble a user who has not asked for it.

    Backward is lowered with forward, so that it cannot fail in the middle of a backward pass, and may run again
    (`retain_graph=True`). Remarks on what could be faster are not shown. Graphs with collectives are refused, and those
    of which the compiler computes something again in backward that is no longer what it was in forward.
    """

    lower: Lower

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor], **options: Any) -> Lowered:
        """Look and lower. Raises CommunicationError and UnsafeError."""
        talking = next(_collectives(graph), None)
        if talking is not None:
            raise CommunicationError(talking)
        unsafe = next(_unsafe(graph), None)
        if unsafe is not None:
            raise UnsafeError(unsafe)
        config = torch._functorch.config
        config.donated_buffer = False  # for good: torch looks it up again when a backward pass keeps its graph, and refuses
        is_known = getattr(config, "force_non_lazy_backward_lowering", None) is not None
        with warnings.catch_warnings(), config.patch({"force_non_lazy_backward_lowering": True} if is_known else {}):
            warnings.simplefilter("ignore")
            return self.lower(graph, inputs, **options)


def _collectives(graph: torch.fx.GraphModule) -> Iterator[str]:
    for part in graph.modules():
        if isinstance(part, torch.fx.GraphModule):
            for node in part.graph.nodes:
                if node.op == "call_function" and str(node.target).startswith(_TALKING):
                    yield str(node.target)


def _unsafe(graph: torch.fx.GraphModule) -> Iterator[str]:
    """Tensors that are read and then changed in place: what depends on them is computed again from what they have become.

    And random operators of other libraries that do not say so: torch replays the random numbers of those only that do.
    """
    for part in graph.modules():
        if isinstance(part, torch.fx.GraphModule):
            for node in part.graph.nodes:
                if node.op == "placeholder" and _is_read_and_changed(node):
                    yield f"{node.name} is read and changed in place"
                if node.op == "call_function" and _is_foreign(node.target):
                    yield f"{node.target} may draw random numbers"


def _is_read_and_changed(node: torch.fx.Node) -> bool:
    value = node.meta.get("example_value")
    return isinstance(value, torch.Tensor) and value._version > 0 and (len(node.users) > 1 or value.requires_grad)


def _is_foreign(target: Any) -> bool:
    """Whether an operator comes neither from torch nor from here."""
    if isinstance(target, torch._ops.OpOverloadPacket):
        name: str = target._qualified_op_name
    elif isinstance(target, torch._ops.OpOverload):
        name = target.name()
    else:
        return False
    return name.partition("::")[0] not in _OWN
