"""torch.compile of a block's inner module, with the recomputation inside the compiled code where that is possible."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from bmtrain.runtime.log import warn


class SeveralGraphsError(RuntimeError):
    """A module cannot be compiled as one graph. Nothing of it has run."""


class CompiledModule:
    """Runs modules by compiled code; equal modules share it, because the module is an argument of what is compiled.

    With recomputation inside, the compiler fuses it with backward and leaves out what backward does not need. A module that
    cannot be compiled as one graph is recomputed from outside instead, with a warning.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self._plain = torch.compile(_call, **options)
        self._recomputing = torch.compile(_call_recomputed, **{**options, "fullgraph": True})
        self.recomputes_inside = True

    def plain(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`module(*args, **kwargs)`."""
        return self._plain(module, args, kwargs)

    def recomputing(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The same, keeping only the inputs for backward. Raises SeveralGraphsError."""
        try:
            return self._recomputing(module, args, kwargs)
        except torch._dynamo.exc.Unsupported as error:  # by attribute: torch loads its compiler when it is first named
            self.recomputes_inside = False
            reason = str(error).strip().splitlines()[0]
            warn(f"{type(module).__name__} does not compile as one graph ({reason}): its parts are compiled and recomputed apart.")
            raise SeveralGraphsError(reason) from error


def _call(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return module(*args, **kwargs)


def _call_recomputed(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return checkpoint(module, *args, use_reentrant=False, **kwargs)
