"""torch.compile of a block's inner module, with recomputation inside the graph if possible."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch

from bmtrain.compile import backend
from bmtrain.compile.programs import Structure, is_watched, recomputing
from bmtrain.errors import first_line
from bmtrain.recompute.level import Level
from bmtrain.recompute.recomputation import ModuleCall, Runner, SeveralGraphsError, call
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
        super().__init__(partial(self._run, call))
        self._structure, self._options = structure, options
        self._compiled = dict[ModuleCall, ModuleCall]()
        self._recomputes_inside = True

    def accepts(self, modules: Sequence[torch.nn.Module], arguments: Iterable[Any]) -> bool:
        """Whether no hook watches the call. What the program has exchanged is compiled anew."""
        self._structure.look(modules)
        return not is_watched(modules)

    def _run(
        self,
        function: ModuleCall,
        module: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        code = self._structure.code(function)
        if code not in self._compiled:
            options = {**self._options, **({} if function is call else {"fullgraph": True})}
            self._compiled[code] = _compile(code, options)
        return self._compiled[code](module, args, kwargs)

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
            return self._run(recomputing(level), module, args, kwargs)
        except several_graphs_error() as error:
            self._recomputes_inside = False
            reason = first_line(error)
            warn(
                f"{type(module).__name__} does not compile as one graph ({reason}): its parts are "
                "compiled and recomputed separately."
            )
            raise SeveralGraphsError(reason) from error


def _compile(function: ModuleCall, options: dict[str, Any]) -> ModuleCall:
    """torch.compile with copies of the option dicts, from which it pops entries."""
    own: dict[str, Any] = {
        name: dict(value) if isinstance(value, dict) else value for name, value in options.items()
    }
    return torch.compile(function, **own)
