"""How the inner module of a block runs: eager or compiled, keeping activations or recomputing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch

from bmtrain.recompute.level import Level, Selective

ModuleCall = Callable[[torch.nn.Module, tuple[Any, ...], dict[str, Any]], Any]


class SeveralGraphsError(RuntimeError):
    """A module does not compile as one graph. Raised before anything of it has run."""


class Repeatable(Protocol):
    """A call that runs once more in backward."""

    def __call__(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """`module(*args, **kwargs)`."""

    def forget(self) -> None:
        """Drop kept results: the run in backward may call other operators than the first run."""

    def num_bytes(self) -> int:
        """Bytes kept for the run in backward that autograd's hooks do not see."""


class Runner(Protocol):
    """Runs modules.

    Attributes:
        is_compiled: whether it runs compiled code.
        runs_python: whether Python code of the module, such as hooks or inner recomputation, may
            run in backward.
    """

    is_compiled: bool
    runs_python: bool

    def accepts(self, modules: Sequence[torch.nn.Module], arguments: Iterable[Any]) -> bool:
        """Whether it can run this call; `modules` are the parts of one module."""

    def plain(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`module(*args, **kwargs)`."""

    def recomputing(self, level: Level) -> ModuleCall | None:
        """A function like `plain` that recomputes by itself and keeps what `level` says.

        None if the caller must recompute, by `repeatable`. The function raises SeveralGraphsError
        if the module does not compile as one graph.
        """

    def repeatable(self, level: Level) -> Repeatable:
        """A function for one call at `level`, which the caller runs once more in backward."""


class Eager:
    """Runs modules as they are."""

    is_compiled = False
    runs_python = True

    def __init__(self, run: ModuleCall) -> None:
        self.plain = run

    def accepts(self, modules: Sequence[torch.nn.Module], arguments: Iterable[Any]) -> bool:
        """True: it runs any call."""
        return True

    def recomputing(self, level: Level) -> ModuleCall | None:
        """None: the caller recomputes."""
        return None

    def repeatable(self, level: Level) -> Repeatable:
        """Keeps expensive results at CHEAP, else nothing."""
        return Selective(self.plain) if level is Level.CHEAP else Whole(self.plain)


class Whole:
    """A call that keeps nothing for the run in backward."""

    def __init__(self, run: ModuleCall) -> None:
        self._run = run

    def __call__(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """`module(*args, **kwargs)`."""
        return self._run(module, args, kwargs)

    def forget(self) -> None:
        """Nothing is kept."""

    def num_bytes(self) -> int:
        """Zero."""
        return 0


def call(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`module(*args, **kwargs)`."""
    return module(*args, **kwargs)
