"""How the module of a block runs: eagerly or compiled, keeping activations or computing them again.

The first run of a call saves tensors as any forward pass does. When it is over, and nothing has
happened that a second run could not repeat, they are dropped, and backward runs the call again for
them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from bmtrain.distributed import tensor_parallel  # noqa: F401 (it defines operators)
from bmtrain.errors import RecomputationError
from bmtrain.recompute.host_state import CallState, changed_in_place
from bmtrain.recompute.level import Level
from bmtrain.shard.unshard import Unpack
from bmtrain.torch_internals import (
    TorchDispatchMode,
    argument_names,
    at_end_of_backward,
    has_global_module_hooks,
    hooks_of,
    in_backward,
    sharing_versions,
    tree_map_only,
    version_of,
)

ModuleCall = Callable[[torch.nn.Module, tuple[Any, ...], dict[str, Any]], Any]


class Runner:
    """Runs modules as they are; compiled runners derive from it.

    Attributes:
        plain: a function of a module, its args and its kwargs: `module(*args, **kwargs)`.
        is_compiled: whether it runs compiled code.
    """

    is_compiled = False

    def __init__(self, plain: ModuleCall) -> None:
        self.plain = plain

    def accepts(self, modules: Sequence[torch.nn.Module], arguments: Iterable[Any]) -> bool:
        """Whether it can run this call; `modules` are the parts of one module."""
        return True

    def recomputing(self, level: Level) -> ModuleCall | None:
        """A function like `plain` that recomputes by itself and keeps what `level` says.

        None if the caller must, by `Recomputation`.
        """
        return None


def call(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`module(*args, **kwargs)` without hooks, which run for the block around it, as then does a
    `__call__` of the module's class.
    """
    if has_global_module_hooks() or any(hooks_of(module)):
        return module.forward(*args, **kwargs)
    return module(*args, **kwargs)


# Operators whose results CHEAP keeps. Attention is one operator per backend; its log-sum-exp is
# kept with its output.
_KEPT_OF_TORCH = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "convolution",
    "_scaled_mm",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable",
    "_flash_attention_forward",
    "_efficient_attention_forward",
)
# Operators of tensor-parallel layers: recomputing them would repeat their communication.
_KEPT_OF_RANKS = (
    "tp_gather_linear",
    "tp_linear_scatter",
    "tp_linear_reduce",
    "tp_scatter_rows",
    "tp_all_reduce",
)
_KEPT = frozenset(
    getattr(namespace, name).default
    for namespace, names in ((torch.ops.aten, _KEPT_OF_TORCH), (torch.ops.bmtrain, _KEPT_OF_RANKS))
    for name in names
)


def policy(
    context: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    """CHEAP as a policy for torch's selective checkpointing, which compiled code uses."""
    return CheckpointPolicy.MUST_SAVE if op in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


class Selective:
    """One call at CHEAP: the first run keeps expensive results, runs in backward reuse them.

    Not of compiled code: a mode that catches operators does not reach into it.

    A result that the module has since changed in place is recomputed. So is one that drew random
    numbers: skipping the draw would shift the numbers of everything after it.

    Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models"
    (2022).
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        self._kept: dict[Any, deque[_Result]] = defaultdict(deque)

    def __call__(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """`module(*args, **kwargs)`."""
        kept, recalls = self._kept, in_backward()
        if recalls:
            # A run in backward may stop before it has consumed all results. With
            # `retain_graph=True` a second run would pop the leftovers in the place of its own.
            self.forget()
        with _Keeping(kept, recalls=recalls):
            return self._call(module, args, kwargs)

    def forget(self) -> None:
        """Drop kept results: runs in backward may call other operators than the first run."""
        self._kept = defaultdict(deque)

    def num_bytes(self) -> int:
        """Bytes of the results kept now."""
        return sum(result.num_bytes() for results in self._kept.values() for result in results)


class _Result:
    """The detached result of an operator, and the versions of its tensors."""

    def __init__(self, value: Any) -> None:
        # Below autograd `detach` gives a new version counter. `is_unchanged` needs the shared one,
        # or it misses in-place changes of the original.
        with sharing_versions():
            self.value = tree_map_only(torch.Tensor, torch.Tensor.detach, value)
        parts = self.value if isinstance(self.value, tuple | list) else [self.value]
        self._tensors = [x for x in parts if isinstance(x, torch.Tensor)]
        self._versions = [x._version for x in self._tensors]

    def is_unchanged(self) -> bool:
        return [x._version for x in self._tensors] == self._versions

    def num_bytes(self) -> int:
        return sum(x.untyped_storage().nbytes() for x in self._tensors)


class _Keeping(TorchDispatchMode):
    """Keeps results, or, where it `recalls`, gives those that are there."""

    def __init__(self, kept: dict[Any, deque[_Result]], *, recalls: bool) -> None:
        super().__init__()
        self._kept, self._recalls = kept, recalls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # An attention with dropout draws numbers; a mode is given arguments by place.
        is_kept = func in _KEPT and not (
            torch.Tag.nondeterministic_seeded in func.tags
            and dict(zip(argument_names(func), args, strict=False)).get("dropout_p")
        )
        if is_kept and self._recalls and self._kept.get(func):
            result = self._kept[func].popleft()
            if result.is_unchanged():
                return result.value
        out = func(*args, **(kwargs or {}))
        if is_kept and not self._recalls:
            self._kept[func].append(_Result(out))
        return out


# Runs the module on these arguments; the flag says that it runs again.
Body = Callable[[tuple[Any, ...], dict[str, Any], bool], Any]


@dataclasses.dataclass(eq=False)
class _Saved:
    """What autograd holds in the place of a saved tensor.

    Attributes:
        value: the tensor itself or its place among the parameters, while the first run goes on;
            then what is kept of it, if the call is not recomputed.
    """

    index: int
    shape: torch.Size
    dtype: torch.dtype
    value: torch.Tensor | Unpack | None


@dataclasses.dataclass(frozen=True)
class _Input:
    """A tensor among the arguments, as it was."""

    place: int  # among those that autograd has saved
    tensor: weakref.ref[torch.Tensor]
    version: int
    requires_grad: bool
    is_leaf: bool


class _Inputs(torch.autograd.Function):
    """Saves tensors under the hooks in force; its node is never run."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError("the node that holds the inputs of a block was run")


class _Enough(BaseException):
    """All tensors that backward needs of a call, its argument, have been computed. No error:
    programs catch those.
    """


class Recomputation:
    """One call.

    Args:
        body: runs the module.
        begun: the state in which the call begins.
        place_of: the place of a tensor in gathered parameters, or None.
        keep: keeps another saved tensor, if the call is not recomputed.
        on_kept: called with the reason if the call is not recomputed.
    """

    def __init__(
        self,
        body: Body,
        begun: CallState,
        place_of: Callable[[torch.Tensor], Unpack | None],
        keep: Callable[[torch.Tensor], Unpack],
        on_kept: Callable[[str], None],
    ) -> None:
        self._body, self._begun = body, begun
        self._place_of, self._keep, self._on_kept = place_of, keep, on_kept
        self._saved: list[weakref.ref[_Saved]] = []
        self._values: dict[int, torch.Tensor] = {}
        self._given: dict[int | str, Any] = {}  # arguments by place or name, without tensors
        self._tensors: dict[int | str, _Input] = {}
        self._anchor: Any = None

    @contextlib.contextmanager
    def first_run(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        saving: contextlib.AbstractContextManager[object],
    ) -> Iterator[None]:
        """Inside, `body` runs for the first time. Tensors among the arguments are saved for the
        second run with autograd, under the hooks of `saving`.
        """
        places: dict[int, int] = {}
        different: list[torch.Tensor] = []
        self._given = dict(itertools.chain(enumerate(args), kwargs.items()))
        for key, x in self._given.items():
            if isinstance(x, torch.Tensor):
                self._given[key] = None
                # A module may ask whether two arguments are one tensor, as attention does.
                place = places.setdefault(id(x), len(different))
                different += [x] if place == len(different) else []
                self._tensors[key] = _Input(
                    place, weakref.ref(x), version_of(x), x.requires_grad, x.grad_fn is None
                )
        with saving:
            # The node lives as long as its output.
            leaf = torch.empty(0, requires_grad=True, device="cpu")
            self._anchor = _Inputs.apply(leaf, *different)
        obstacle: str | None = "an error"
        try:
            with saved_tensors_hooks(self._pack, self._unpack):
                yield
            obstacle = self._begun.obstacle()
            self._begun.owner.is_repeatable = obstacle is None
            if obstacle is not None:
                self._on_kept(obstacle)
        finally:
            for reference in self._saved:
                saved = reference()
                if saved is not None and obstacle is None:
                    saved.value = None
                elif saved is not None and isinstance(saved.value, torch.Tensor):
                    saved.value = self._keep(saved.value)

    def _pack(self, tensor: torch.Tensor) -> _Saved:
        value = self._place_of(tensor) or tensor
        saved = _Saved(len(self._saved), tensor.shape, tensor.dtype, value)
        self._saved.append(weakref.ref(saved))
        return saved

    def _unpack(self, saved: _Saved) -> torch.Tensor:
        if saved.value is not None:
            return saved.value if isinstance(saved.value, torch.Tensor) else saved.value()
        if saved.index not in self._values:
            self._compute_again()
        found = self._values.pop(saved.index, None)
        if found is None or (found.shape, found.dtype) != (saved.shape, saved.dtype):
            self._values.clear()
            raise RecomputationError(
                "the recomputation of a block did not reproduce the tensors of its forward pass "
                f"({'none' if found is None else tuple(found.shape)} for {tuple(saved.shape)}): "
                "let it depend on its arguments, parameters and attributes alone, or give the "
                "block use_checkpoint=False."
            )
        return found

    def _arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments again, apart from the graph."""
        try:
            tensors = self._anchor.grad_fn.saved_tensors
        except RuntimeError as error:
            for key, was in self._tensors.items():
                x = was.tensor()
                if x is not None and version_of(x) != was.version:
                    raise changed_in_place(f"argument {key!r}") from error
            raise
        args, kwargs = list[Any](), dict[str, Any]()
        again: dict[int, torch.Tensor] = {}
        for key, value in self._given.items():
            given = self._tensors.get(key)
            if given is not None and given.place not in again:
                own = tensors[given.place].detach().requires_grad_(given.requires_grad)
                again[given.place] = own if given.is_leaf else own.view_as(own)
            x = value if given is None else again[given.place]
            if isinstance(key, str):
                kwargs[key] = x
            else:
                args.append(x)
        return tuple(args), kwargs

    def _compute_again(self) -> None:
        self._begun.check()
        with torch.enable_grad():
            args, kwargs = self._arguments()
        wanted = {saved.index for ref in self._saved if (saved := ref()) is not None}
        # Not the last that is wanted: what the graph has dropped is up to each rank's collector,
        # and all ranks must come to the same collectives in the module.
        values, last, count = self._values, len(self._saved) - 1, itertools.count()
        values.clear()
        at_end_of_backward(values.clear)  # what no node has asked for would stay with the graph

        def catch(tensor: torch.Tensor) -> torch.Tensor:
            index = next(count)
            if index in wanted:
                values[index] = tensor.detach()
            if index == last:
                raise _Enough(self)
            return tensor.detach()

        hooks = saved_tensors_hooks(catch, lambda tensor: tensor)
        try:
            with torch.enable_grad(), self._begun.restored(), hooks:
                self._begun.variables.copy().run(self._body, args, kwargs, True)
        except _Enough as enough:
            if enough.args[0] is not self:
                raise
