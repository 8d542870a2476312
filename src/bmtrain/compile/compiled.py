"""torch.compile of a block's inner module, with recomputation inside the graph if possible."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from bmtrain.compile import backend
from bmtrain.compile.programs import Structure
from bmtrain.recompute.level import Level
from bmtrain.recompute.recomputation import ModuleCall, Runner, SeveralGraphsError, call, policy
from bmtrain.runtime.log import warn
from bmtrain.torch_internals import several_graphs_error


class CompiledModule(Runner):
    """Runs modules through compiled code, for blocks with `compile=True` or options.

    The module is an argument of the compiled function, so modules of equal structure share the
    code. Recomputation is part of the graph: the compiler fuses it with backward and drops what
    backward does not need. A module that does not compile as one graph is recomputed outside of the
    compiled code instead, with a warning.
    """

    is_compiled = True
    runs_python = False

    def __init__(self, structure: Structure, options: dict[str, Any]) -> None:
        # Called for its checks: torch.compile raises for unknown options of its own backends, but
        # does not check the options of a callable, which the backends below are.
        _compile(call, options)
        lower: backend.Lower = backend.Seeded(backend.find(options.get("backend", "inductor")))
        options = {**options, "backend": backend.InFp8(lower) if structure.fp8 else lower}
        super().__init__(_compile(structure.code(call), options))
        one_graph = {**options, "fullgraph": True}
        self._recomputing = {
            level: _compile(structure.code(function), one_graph)
            for level, function in _RECOMPUTING.items()
        }
        self._recomputes_inside = True

    def recomputing(self, level: Level) -> ModuleCall | None:
        """`plain` with recomputation at `level` inside; None if the module needs several graphs.

        The function raises SeveralGraphsError on the call that finds this out.
        """
        if not self._recomputes_inside:
            return None
        return partial(self._recompute, level)

    def _recompute(
        self, level: Level, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        try:
            return self._recomputing[_inside(level)](module, args, kwargs)
        except several_graphs_error() as error:
            self._recomputes_inside = False
            reason = str(error).strip().splitlines()[0]
            warn(
                f"{type(module).__name__} does not compile as one graph ({reason}): its parts are "
                "compiled and recomputed separately."
            )
            raise SeveralGraphsError(reason) from error


class CompiledByDefault(Runner):
    """Runs modules through compiled code if they compile as one graph, and eagerly otherwise.

    For blocks that leave `compile` at its default: a failure to compile is never an error. A call
    that falls back to eager keeps its activations, so Python code of the module may run in
    backward.
    """

    is_compiled = True

    def __init__(self, structure: Structure) -> None:
        super().__init__(partial(structure.run, call))
        self._structure = structure

    def accepts(self, modules: Sequence[torch.nn.Module], arguments: Iterable[Any]) -> bool:
        """Whether this call of a module, with its submodules `modules`, can run compiled."""
        return self._structure.accepts(modules, arguments)

    def recomputing(self, level: Level) -> ModuleCall | None:
        """`plain` with recomputation at `level` inside."""
        return partial(self._structure.run, recomputing(level))


def _compile(function: ModuleCall, options: dict[str, Any]) -> ModuleCall:
    """torch.compile with copies of the option dicts, from which it pops entries."""
    own: dict[str, Any] = {
        name: dict(value) if isinstance(value, dict) else value for name, value in options.items()
    }
    return torch.compile(function, **own)


def _call_recomputed(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return checkpoint(module, *args, use_reentrant=False, **kwargs)


def _call_recomputed_cheaply(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    return checkpoint(module, *args, use_reentrant=False, context_fn=_CHEAPLY, **kwargs)


class _Policy(partial[Any]):
    """A `context_fn` with a name for the key of torch's cache: torch caches none without."""

    cache_hash = f"{policy.__module__}.{policy.__name__}"


_CHEAPLY = _Policy(create_selective_checkpoint_contexts, policy)
_RECOMPUTING: dict[Level, ModuleCall] = {
    Level.CHEAP: _call_recomputed_cheaply,
    Level.BLOCK: _call_recomputed,
}


def _inside(level: Level) -> Level:
    """The level at which the graph itself recomputes."""
    _hush()
    return Level.BLOCK if level.is_whole() else level


@cache
def _hush() -> None:
    """Silence torch's warning about unchecked in-place operators; this package's tests cover them.

    torch gives it once for each `checkpoint` with a context_fn.
    """
    logging.getLogger("torch._higher_order_ops.wrap").addFilter(
        lambda record: "context_fn" not in record.getMessage()
    )


def recomputing(level: Level) -> ModuleCall:
    """What compiled code runs at a level: a function of module, args and kwargs."""
    return call if level is Level.NOTHING else _RECOMPUTING[_inside(level)]
