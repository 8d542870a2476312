"""How the inner module of a block runs: eager or compiled, keeping activations or recomputing."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from bmtrain.distributed import tensor_parallel  # noqa: F401 (it defines operators)
from bmtrain.recompute.level import Level
from bmtrain.torch_internals import (
    TorchDispatchMode,
    argument_names,
    in_backward,
    sharing_versions,
    tree_map_only,
)

ModuleCall = Callable[[torch.nn.Module, tuple[Any, ...], dict[str, Any]], Any]


class SeveralGraphsError(RuntimeError):
    """A module does not compile as one graph. Raised before anything of it has run."""


class Runner:
    """Runs modules as they are; compiled runners derive from it.

    Attributes:
        plain: a function of a module, its args and its kwargs: `module(*args, **kwargs)`.
        is_compiled: whether it runs compiled code.
        runs_python: whether Python code of the module, such as hooks or inner recomputation, may
            run in backward.
    """

    is_compiled = False
    runs_python = True

    def __init__(self, plain: ModuleCall) -> None:
        self.plain = plain

    def accepts(self, modules: Sequence[torch.nn.Module], arguments: Iterable[Any]) -> bool:
        """Whether it can run this call; `modules` are the parts of one module."""
        return True

    def recomputing(self, level: Level) -> ModuleCall | None:
        """A function like `plain` that recomputes by itself and keeps what `level` says.

        None if the caller must recompute, by `repeatable`. The function raises SeveralGraphsError
        if the module does not compile as one graph.
        """
        return None

    def repeatable(self, level: Level) -> Selective:
        """A function for one call at `level`, which the caller runs once more in backward.

        Compiled code keeps nothing: a mode that catches operators does not reach into it.
        """
        return Selective(self.plain, keeps=level is Level.CHEAP and not self.is_compiled)


def call(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`module(*args, **kwargs)`."""
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

    At another level it keeps nothing (`keeps=False`).

    A result that the module has since changed in place is recomputed. So is one that drew random
    numbers: skipping the draw would shift the numbers of everything after it.

    Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models"
    (2022).
    """

    def __init__(self, call: Callable[..., Any], *, keeps: bool = True) -> None:
        self._call, self._keeps = call, keeps
        self._kept: dict[Any, deque[_Result]] = defaultdict(deque)

    def __call__(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """`module(*args, **kwargs)`."""
        if not self._keeps:
            return self._call(module, args, kwargs)
        if not in_backward():
            with _Keeping(self._kept, recalls=False):
                return self._call(module, args, kwargs)
        # A run in backward may stop before it has consumed all results. Take them all now: with
        # `retain_graph=True` a second run would otherwise pop the leftovers in the place of its
        # own.
        kept, self._kept = self._kept, defaultdict(deque)
        with _Keeping(kept, recalls=True):
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
