"""Compiler backends for the graph of a block: check it, rewrite it, lower forward and backward."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from bmtrain.compile import cache, fp8, fusions, heads, joining, masks
from bmtrain.compile.graph import calls, may_write, memories, name_of, parts, value_of
from bmtrain.distributed.agreement import told_apart
from bmtrain.kernels.launch import takes
from bmtrain.runtime.log import warn
from bmtrain.runtime.mesh import Axis
from bmtrain.torch_internals import (
    CACHEABLE,
    TORCH_VERSION,
    HigherOrderOperator,
    find_backend,
    graph_pass_class,
    inductor_config,
    inductor_mode,
    lower_as_inductor,
    lowering_config,
    overloads,
    tensors_of,
)

Lowered = Callable[..., Any]
Lower = Callable[..., Lowered]
# Namespaces of operators that draw no random numbers, or whose random numbers torch replays.
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
# Whether recomputation in backward repeats in-place updates, of running statistics for example.
_CHANGES_TWICE = TORCH_VERSION < (2, 11)
# Prefixes of the names of communication operators; the first are those of tensor-parallel layers.
_TALKING = ("bmtrain.tp_", "_c10d_functional", "c10d_functional", "c10d.", "_dtensor.", "symm_mem.")
# Those of linear layers, which take `agreed`.
_AGREEING = ("bmtrain.tp_gather_linear", "bmtrain.tp_linear_")


def find(name: str | Lower) -> Lower:
    """The torch.compile backend of this name; a callable is a backend already."""
    if callable(name):
        return name
    return inductor if name == "inductor" else find_backend(name)


class UnsafeError(RuntimeError):
    """A graph whose compiled code would give wrong results, or hang."""


class RanksDifferError(RuntimeError):
    """Tensor-parallel ranks have different code for a call, or none. None of it has run."""


def inductor(
    graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor], **options: Any
) -> Lowered:
    """Inductor, with this package's graph passes. Takes torch.compile's `mode` and `options`."""
    _rewrite(graph, takes)
    lower: Lower = find_backend("inductor")
    mode, named = options.get("mode"), options.get("options") or {}
    patches = {
        **(inductor_mode(mode) if mode else {}),
        **{k.replace("-", "_"): v for k, v in named.items()},
    }
    patches[CACHEABLE] = cache.cacheable(graph, patches.get(CACHEABLE, {}))
    with _asking(**({} if cache.is_told(graph) else {"enable_autograd_cache": False})):
        return lower(graph, inputs, config_patches=_with_joint_pass(patches))


def traced(
    graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor], *, take: Callable[..., Any]
) -> Lowered:
    """The graphs that `inductor` compiles on a GPU, handed to `take` in place of being compiled.

    For tensors without memory: forward and backward are split as on a GPU, so what forward saves is
    what it saves there.
    """
    _rewrite(graph, lambda _: True)
    return lower_as_inductor(graph, inputs, take, _with_joint_pass({}))


def _rewrite(graph: torch.fx.GraphModule, wanted: fusions.Wanted) -> None:
    """What this package has for parts of a graph, where it is wanted."""
    for part in parts(graph):
        masks.rewrite(part, wanted)
        fusions.rewrite(part, wanted)
        heads.rewrite(part, wanted, is_recomputed=part is not graph)


def _with_joint_pass(patches: dict[str, Any]) -> dict[str, Any]:
    # inductor has one slot: a pass that the program has set keeps it
    if inductor_config().joint_custom_post_pass is None:
        patches.setdefault("joint_custom_post_pass", _joint_pass())
    return patches


@functools.cache
def _joint_pass() -> Any:
    """The pass over the joint graph: fuses sums into norm kernels and keeps inputs for backward.

    torch 2.11 marks inputs for recomputation where it rewrites recomputed dropout of dynamic shape.
    Inputs cannot be recomputed and compilation fails, so the pass removes the mark.
    """

    def change(_: object, graph: torch.fx.Graph) -> None:
        joining.join(graph)
        for node in graph.find_nodes(op="placeholder"):
            node.meta.pop("recompute", None)

    # Up to torch 2.9 options are pickled; this class is made at run time, so pickle its factory.
    methods = {
        "__call__": change,
        "uuid": lambda _: cache.sources(),  # the pass's key in torch's caches
        "__reduce__": lambda _: (_joint_pass, ()),
    }
    return type("JointPass", (graph_pass_class(),), methods)()


@dataclasses.dataclass(frozen=True)
class InFp8:
    """A backend that rewrites linear layers to FP8 and then calls `lower`.

    Instances that compare equal share compiled code.

    Attributes:
        lower: the backend to call.
        name: of the module that a graph holds, for a warning where there is nothing to rewrite.
    """

    lower: Lower
    name: str

    def __call__(
        self, graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor], **options: Any
    ) -> Lowered:
        """Rewrite and lower."""
        if not sum(map(fp8.rewrite, parts(graph))):
            warn(
                f"fp8=True changes nothing in {self.name}: it has no product that "
                "torch.nn.functional.linear makes."
            )
        return self.lower(graph, inputs, **options)


@dataclasses.dataclass(frozen=True)
class AtOnce:
    """A backend that fails at compile time or not at all, for blocks that compile by default.

    Backward is lowered together with forward, so it cannot fail in the middle of a backward pass,
    and it may run more than once (`retain_graph=True`). Compiler warnings are silenced: the user
    has not asked to compile. Refuses graphs with collectives, and graphs whose recomputation in
    backward would read values that have changed since forward.

    The code draws random numbers from the program's generators, in forward only. Dropout seeds are
    drawn in forward and saved. For random numbers that recomputation must draw again (dropout
    inside attention), the generator's state is saved: 16 bytes, read without a device
    synchronisation. By default, torch would draw them from its own copies of the generator, which
    neither a later seed nor a restored state reaches.

    Attributes:
        lower: the backend to call.
        split: the axis of tensor-parallel layers, whose collectives are allowed then: its ranks
            compare their code and what it is given before it runs, with `same_code`.
    """

    lower: Lower
    split: Axis | None = None

    def __call__(
        self, graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor], **options: Any
    ) -> Lowered:
        """Check the graph, then lower it.

        Raises:
            UnsafeError: recomputation in backward would differ from forward; or the graph has
                collectives, which the compiler may reorder while other ranks run uncompiled.
        """
        axis = self.split
        refused = _TALKING if axis is None else _TALKING[1:]
        for node in calls(graph):
            if str(node.target).startswith(refused):
                raise UnsafeError(f"it communicates by {node.target}")
        for reason in _unsafe(graph):
            raise UnsafeError(reason)
        code = "" if axis is None else _agreeing(graph)
        # Set permanently: torch reads it again in a backward pass with retain_graph=True, and
        # raises if it is on.
        lowering_config().donated_buffer = False
        asked = {"force_non_lazy_backward_lowering": True, "graphsafe_rng_functionalization": False}
        with warnings.catch_warnings(), _asking(**asked):
            warnings.simplefilter("ignore")
            lowered = self.lower(graph, inputs, **options)
        if axis is None:
            return lowered

        def run(*arguments: Any) -> Any:
            facts = [
                f"{tuple(x.shape)} {x.dtype} {x.requires_grad}"
                if isinstance(x, torch.Tensor)
                else x
                for x in arguments
            ]
            same_code(f"{code} {facts}", axis, code)
            return lowered(*arguments)

        return run


def same_code(text: str, axis: Axis, shown: str) -> None:
    """RanksDifferError unless all ranks of the axis pass the same text: what they are about to run.
    The error has what they have `shown`.

    Collective, before any of it runs: without it, a rank without code, or with other code, would
    issue other collectives.
    """
    told = told_apart(text, axis, "code of a tensor-parallel block", shown)
    if told is not None:
        raise RanksDifferError(told)


def _agreeing(graph: torch.fx.GraphModule) -> str:
    """What tells the graph from one that issues other collectives. Its linear layers are told that
    the ranks agree.
    """
    words, symbols = list[str](), dict[str, str]()
    for part in parts(graph):
        for node in part.graph.nodes:
            words.append(f"{node.op} {name_of(node) if node.op.startswith('call') else ''}")
            if str(node.target).startswith(_TALKING[0]):
                tensors = [value_of(each) for each in node.args]
                words += [
                    str(each if x is None else (x.shape, x.dtype))
                    for each, x in zip(node.args, tensors, strict=True)
                ]
            if str(node.target).startswith(_AGREEING):
                node.kwargs = {**node.kwargs, "agreed": True}
        part.recompile()
    # Ranks may have other names for a size that varies: such sizes are counted.
    text = re.sub(
        r"\b[su]\d+\b", lambda m: symbols.setdefault(m[0], str(-len(symbols))), " ".join(words)
    )
    return f"code {zlib.crc32(text.encode()):08x}"


def _asking(**wanted: bool) -> contextlib.AbstractContextManager[object]:
    """Set lowering options inside the context; a torch that lacks an option does not need it."""
    config = lowering_config()
    known = {
        name: value for name, value in wanted.items() if getattr(config, name, None) is not None
    }
    return config.patch(known)


def _is_read(node: torch.fx.Node, recomputes: bool) -> bool:
    """Whether backward may compute with an input that the graph changes in place, also with what
    the change has returned, or a view.
    """
    own = memories([node])
    nodes = [x for x in node.graph.nodes if x.op != "output"]
    reached = {x for x in nodes if own & memories(x.all_input_nodes)}
    if recomputes:
        return len(reached) > 1
    for x in nodes:
        if not reached.isdisjoint(x.all_input_nodes):
            reached.add(x)
    values = [x.meta.get("example_value") for x in reached]
    return any(x.requires_grad for x in tensors_of(values)) or any(
        isinstance(x.target, HigherOrderOperator) for x in reached
    )


def _unsafe(graph: torch.fx.GraphModule) -> Iterator[str]:
    """The reasons why recomputation in backward would differ from forward.

    Writes by `.data`: between blocks a program may write its parameters, which are copies in a
    whole model. An input that is read and changed in place: recomputation would start from the
    changed value. An operator of another library that may draw random numbers without the tag for
    it: torch replays random numbers only for tagged operators.
    """
    region = torch.ops.higher_order.tag_activation_checkpoint
    recomputes = any(node.target is region for node in graph.graph.nodes)
    for part in parts(graph):
        data = memories(x for x in part.graph.nodes if x.name.startswith("_get_data_attr"))
        for node in part.graph.nodes:
            value = value_of(node)
            if node.op == "placeholder" and value is not None and value._version > 0:
                if value.requires_grad or _is_read(node, recomputes):
                    yield f"{node.name} is read and changed in place"
                if _CHANGES_TWICE and recomputes:
                    yield f"{node.name} is changed in place and would be again, before torch 2.11"
            if node.target is torch.Tensor.set_ or (
                may_write(node) and data & memories(node.all_input_nodes)
            ):
                yield "it writes to x.data"
            if node.op == "call_function" and any(
                form.namespace not in _OWN and torch.Tag.nondeterministic_seeded not in form.tags
                for form in overloads(node.target)
            ):
                yield f"{node.target} may draw random numbers"
