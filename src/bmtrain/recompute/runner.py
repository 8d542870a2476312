"""How the inner module of a block runs: as it is, or by compiled code; keeping what backward reads,
or computing it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch

from bmtrain.recompute.level import Level, Selective

ModuleCall = Callable[[torch.nn.Module, tuple[Any, ...], dict[str, Any]], Any]


class SeveralGraphsError(RuntimeError):
    """A module cannot be compiled as one graph. Nothing of it has run."""


class Repeatable(Protocol):
    """A call that runs once more in backward."""

    def __call__(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """`module(*args, **kwargs)`."""

    def forget(self) -> None:
        """The run in backward computes everything: it may not come to the same operators."""

    def num_bytes(self) -> int:
        """Bytes that are kept for the run in backward, and that no hook of autograd sees."""


class Runner(Protocol):
    """Runs modules.

    Attributes:
        is_compiled: whether compiled code does.
        runs_python: whether Python code of the module may run in backward, hooks and recomputation
            inside of it.
    """

    is_compiled: bool
    runs_python: bool

    def accepts(self, modules: Sequence[torch.nn.Module], arguments: Iterable[Any]) -> bool:
        """Whether it can run a call of these modules, the parts of one, with these arguments, here
        and now.
        """

    def plain(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`module(*args, **kwargs)`."""

    def recomputing(self, level: Level) -> ModuleCall | None:
        """A function that does the same and keeps what `level` says, for itself; None if
        `repeatable` must. SeveralGraphsError.
        """

    def repeatable(self, level: Level) -> Repeatable:
        """The same for one call that others run once more in backward."""


class Eager:
    """Runs modules as they are."""

    is_compiled = False
    runs_python = True

    def __init__(self, run: ModuleCall) -> None:
        self.plain = run

    def accepts(self, modules: Sequence[torch.nn.Module], arguments: Iterable[Any]) -> bool:
        """Any."""
        return True

    def recomputing(self, level: Level) -> ModuleCall | None:
        """It is recomputed by others."""
        return None

    def repeatable(self, level: Level) -> Repeatable:
        """With results that are dear, or with nothing."""
        return Selective(self.plain) if level is Level.CHEAP else Whole(self.plain)


class Whole:
    """A call of which nothing is kept for the run in backward."""

    def __init__(self, run: ModuleCall) -> None:
        self._run = run

    def __call__(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """`module(*args, **kwargs)`."""
        return self._run(module, args, kwargs)

    def forget(self) -> None:
        """There is nothing."""

    def num_bytes(self) -> int:
        """None."""
        return 0


def call(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`module(*args, **kwargs)`."""
    return module(*args, **kwargs)
