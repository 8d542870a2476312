"""What the compiler does with the graph of a block: look at it, put eight-bit products in, lower
it, backward included.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from bmtrain.compile import fp8, fusions, joining
from bmtrain.kernels import gelu, norm
from bmtrain.runtime.log import warn
from bmtrain.torch_internals import (
    find_backend,
    graph_pass_class,
    has_joint_pass,
    inductor_mode,
    lowering_config,
    overloads,
    torch_version,
)

Lowered = Callable[..., Any]
Lower = Callable[..., Lowered]
# Namespaces of operators whose random numbers torch replays, or that draw none.
_OWN = frozenset(
    {
        "aten",
        "prims",
        "prim",
        "inductor",
        "inductor_prims",
        "higher_order",
        "quantized",
        "mkldnn",
        "bmtrain",
        "rngprims",
    }
)
# Whether torch changes in backward a second time what is changed in place and recomputed, running
# statistics for example.
_CHANGES_TWICE = torch_version() < (2, 11)
# Operators by which ranks talk to one another, by the beginning of their names.
_TALKING = ("_c10d_functional", "c10d_functional", "c10d.", "_dtensor.", "symm_mem.", "bmtrain.tp_")


def find(name: str | Lower) -> Lower:
    """The backend that torch.compile has under this name."""
    if callable(name):
        return name
    return inductor if name == "inductor" else find_backend(name)


class CommunicationError(RuntimeError):
    """A graph has collectives.

    The compiler may change their order, on some ranks only if others run uncompiled.
    """


class UnsafeError(RuntimeError):
    """A graph that the compiler would get wrong."""


def inductor(
    graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor], **options: Any
) -> Lowered:
    """torch's own backend. Takes `mode` and `options` as torch.compile does."""
    for part in _parts(graph):
        fusions.rewrite(part)
    lower: Lower = find_backend("inductor")
    mode, named = options.get("mode"), options.get("options") or {}
    patches = {
        **(inductor_mode(mode) if mode else {}),
        **{k.replace("-", "_"): v for k, v in named.items()},
    }
    if not has_joint_pass():  # else it is the program's
        patches.setdefault("joint_custom_post_pass", _joint_pass())
    return lower(graph, inputs, config_patches=patches)


@functools.cache
def _joint_pass() -> Any:
    """A pass over forward and backward together: sums join the kernels that read them, and inputs
    are there in backward.

    torch 2.11 tries to compute inputs again where it rewrites dropout that is recomputed and whose
    sizes are variables. There is no program then.
    """

    def change(_: object, graph: torch.fx.Graph) -> None:
        joining.join(graph)
        for node in graph.find_nodes(op="placeholder"):
            node.meta.pop("recompute", None)

    base = graph_pass_class()
    # For torch's caches: another one with each change, sizes that compiled code knows of kernels
    # among them.
    sizes = (gelu.PART, norm.PARTS, norm.PARTS_OF_WIDE, norm.WIDE, norm.NARROW)
    said = (
        "bmtrain.compile.backend: sums are joined, those that are normalised too, inputs "
        f"are kept; {sizes}"
    )
    # Until torch 2.9 options are pickled: this one by the function that makes it.
    methods = {
        "__call__": change,
        "uuid": lambda _: said,
        "__reduce__": lambda _: (_joint_pass, ()),
    }
    return type("JointPass", (base,), methods)()


@dataclasses.dataclass(frozen=True)
class InFp8:
    """A backend that does what `lower` does, with the linear maps of the graph in eight bits. Equal
    ones share compiled code.

    whole: name of the module that a graph is the whole of, to be told if there is nothing to
    rewrite.
    """

    lower: Lower
    whole: str | None = None

    def __call__(
        self, graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor], **options: Any
    ) -> Lowered:
        """Rewrite and lower."""
        if not sum(map(fp8.rewrite, _parts(graph))) and self.whole is not None:
            warn(
                f"fp8=True changes nothing in {self.whole}: it has no product that "
                "torch.nn.functional.linear makes."
            )
        return self.lower(graph, inputs, **options)


@dataclasses.dataclass(frozen=True)
class Seeded:
    """A backend whose code draws all random numbers from the program's generators, in forward and
    nowhere else.

    Seeds of dropout are drawn in forward and kept. What a recomputation has to draw again (dropout
    inside of attention) begins at the generator's state of the time, which is kept too: 16 bytes,
    read without waiting for the device. Left to itself, torch would draw it from copies of the
    generator of its own, which no later seed and no restored state reaches.
    """

    lower: Lower

    def __call__(
        self, graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor], **options: Any
    ) -> Lowered:
        """Lower."""
        with _asking(graphsafe_rng_functionalization=False):
            return self.lower(graph, inputs, **options)


@dataclasses.dataclass(frozen=True)
class AtOnce:
    """A backend that fails now or never, and does not trouble a user who has not asked for it.

    Backward is lowered with forward, so that it cannot fail in the middle of a backward pass, and
    may run again (`retain_graph=True`). Remarks on what could be faster are not shown. Graphs with
    collectives are refused, and those of which the compiler computes something again in backward
    that is no longer what it was in forward.
    """

    lower: Lower

    def __call__(
        self, graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor], **options: Any
    ) -> Lowered:
        """Look and lower. Raises CommunicationError and UnsafeError."""
        talking = next(_collectives(graph), None)
        if talking is not None:
            raise CommunicationError(talking)
        unsafe = next(_unsafe(graph), None)
        if unsafe is not None:
            raise UnsafeError(unsafe)
        # For good: torch looks it up again when a backward pass keeps its graph, and refuses.
        lowering_config().donated_buffer = False
        with warnings.catch_warnings(), _asking(force_non_lazy_backward_lowering=True):
            warnings.simplefilter("ignore")
            return self.lower(graph, inputs, **options)


def _asking(**wanted: bool) -> contextlib.AbstractContextManager[object]:
    """Options of torch for what is lowered inside; a torch that does not know one does not need
    it.
    """
    config = lowering_config()
    known = {
        name: value for name, value in wanted.items() if getattr(config, name, None) is not None
    }
    return config.patch(known)


def _parts(graph: torch.fx.GraphModule) -> Iterator[torch.fx.GraphModule]:
    """A graph that the compiler has found, and those inside it: what is recomputed is a graph of
    its own.
    """
    return (part for part in graph.modules() if isinstance(part, torch.fx.GraphModule))


def _collectives(graph: torch.fx.GraphModule) -> Iterator[str]:
    for part in _parts(graph):
        for node in part.graph.nodes:
            if node.op == "call_function" and str(node.target).startswith(_TALKING):
                yield str(node.target)


def _unsafe(graph: torch.fx.GraphModule) -> Iterator[str]:
    """Tensors that are read and then changed in place: what depends on them is computed again from
    what they have become.

    And random operators of other libraries that do not say so: torch replays the random numbers of
    those only that do.
    """
    changes_twice = _CHANGES_TWICE and _recomputes(graph)
    for part in _parts(graph):
        for node in part.graph.nodes:
            if node.op == "placeholder" and _is_read_and_changed(node):
                yield f"{node.name} is read and changed in place"
            if node.op == "placeholder" and changes_twice and _is_changed(node):
                yield f"{node.name} is changed in place and would be again, before torch 2.11"
            if node.op == "call_function" and _is_foreign(node.target):
                yield f"{node.target} may draw random numbers"


def _recomputes(graph: torch.fx.GraphModule) -> bool:
    return any(
        node.target is torch.ops.higher_order.tag_activation_checkpoint
        for node in graph.graph.nodes
    )


def _is_changed(node: torch.fx.Node) -> bool:
    value = node.meta.get("example_value")
    return isinstance(value, torch.Tensor) and value._version > 0


def _is_read_and_changed(node: torch.fx.Node) -> bool:
    return _is_changed(node) and (len(node.users) > 1 or node.meta["example_value"].requires_grad)


def _is_foreign(target: Any) -> bool:
    """Whether an operator comes neither from torch nor from here, and does not say of itself that
    it draws random numbers.
    """
    return any(
        form.namespace not in _OWN and torch.Tag.nondeterministic_seeded not in form.tags
        for form in overloads(target)
    )
