"""torch.compile of a block's inner module, with the recomputation inside the compiled code where
that is possible.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from bmtrain.compile import backend
from bmtrain.compile.programs import Structure
from bmtrain.recompute import level as recompute
from bmtrain.recompute.level import Level
from bmtrain.recompute.runner import ModuleCall, Repeatable, SeveralGraphsError, Whole, call
from bmtrain.runtime.log import warn
from bmtrain.torch_internals import several_graphs_error


class CompiledModule:
    """Runs modules by compiled code; equal modules share it, because the module is an argument of
    what is compiled.

    With recomputation inside, the compiler fuses it with backward and leaves out what backward does
    not need. A module that cannot be compiled as one graph is recomputed from outside instead, with
    a warning.
    """

    is_compiled = True
    runs_python = False

    def __init__(self, structure: Structure, options: dict[str, Any]) -> None:
        # refuses what it does not know; options of a backend that is not its own it does not look
        # at
        _compile(call, options)
        lower: backend.Lower = backend.Seeded(backend.find(options.get("backend", "inductor")))
        options = {**options, "backend": backend.InFp8(lower) if structure.fp8 else lower}
        self._plain = _compile(structure.code(call), options)
        one_graph = {**options, "fullgraph": True}
        self._recomputing = {
            level: _compile(structure.code(function), one_graph)
            for level, function in _RECOMPUTING.items()
        }
        self._recomputes_inside = True

    def accepts(self, modules: Sequence[torch.nn.Module], arguments: Iterable[Any]) -> bool:
        """Any: the program has asked for it."""
        return True

    def plain(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`module(*args, **kwargs)`."""
        return self._plain(module, args, kwargs)

    def recomputing(self, level: Level) -> ModuleCall | None:
        """A function that does the same and keeps what `level` says; None if there is none.

        SeveralGraphsError.
        """
        if not self._recomputes_inside:
            return None
        _hush()
        return partial(self._recompute, Level.BLOCK if level.is_whole() else level)

    def repeatable(self, level: Level) -> Repeatable:
        """The same for one call that others run once more in backward."""
        return Whole(self.plain)

    def _recompute(
        self, level: Level, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        try:
            return self._recomputing[level](module, args, kwargs)
        except several_graphs_error() as error:
            self._recomputes_inside = False
            reason = str(error).strip().splitlines()[0]
            warn(
                f"{type(module).__name__} does not compile as one graph ({reason}): its "
                "parts are compiled and recomputed apart."
            )
            raise SeveralGraphsError(reason) from error


class CompiledByDefault:
    """The same for a block that nobody has asked to compile: whole graphs, or else no compiled
    code; never an error.

    A call that turns out to have none runs uncompiled and keeps what it computes, so it may run
    Python code in backward.
    """

    is_compiled = True
    runs_python = True

    def __init__(self, structure: Structure) -> None:
        self._structure = structure

    def accepts(self, modules: Sequence[torch.nn.Module], arguments: Iterable[Any]) -> bool:
        """Whether a call of these modules, the parts of one, with these arguments runs compiled
        here and now.
        """
        return self._structure.accepts(modules, arguments)

    def plain(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`module(*args, **kwargs)`."""
        return self._structure.run(call, module, args, kwargs)

    def recomputing(self, level: Level) -> ModuleCall | None:
        """A function that does the same, keeping for backward what `level` says."""
        _hush()
        return partial(
            self._structure.run, _RECOMPUTING[Level.BLOCK if level.is_whole() else level]
        )

    def repeatable(self, level: Level) -> Repeatable:
        """The same for one call that others run once more in backward."""
        return Whole(self.plain)


def _compile(function: ModuleCall, options: dict[str, Any]) -> ModuleCall:
    """torch.compile, which takes some of what it reads out of the dicts that it is given: it gets
    copies.
    """
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


@cache
def _hush() -> None:
    """torch remarks, to whoever wrote a call of `checkpoint`, that it knows no check for changes in
    place. Tests here know some.
    """
    logging.getLogger("torch._higher_order_ops.wrap").addFilter(
        lambda record: "context_fn" not in record.getMessage()
    )


_CHEAPLY = partial(create_selective_checkpoint_contexts, recompute.policy)
_RECOMPUTING: dict[Level, ModuleCall] = {
    Level.CHEAP: _call_recomputed_cheaply,
    Level.BLOCK: _call_recomputed,
}
