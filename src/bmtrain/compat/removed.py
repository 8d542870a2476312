"""Placeholders for names of BMTrain that no longer exist: importing works, using one raises."""

from __future__ import annotations

from typing import Any, NoReturn

from bmtrain.errors import RemovedError


class Removed(type):
    """The metaclass of placeholders: calling one, or reading an attribute of it, raises.

    `isinstance(x, placeholder)` works and is False.
    """

    __qualname__: str
    remedy: str

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise RemovedError(cls.__qualname__, cls.remedy)

    def __getattr__(cls, name: str) -> NoReturn:
        if name.startswith("__"):  # Python itself probes for such names on any class
            raise AttributeError(name)
        raise RemovedError(f"{cls.__qualname__}.{name}", cls.remedy)


def removed(name: str, remedy: str) -> Any:
    """A placeholder class.

    Args:
        name: the removed name, "bmtrain.zero_context.ZeroContext" for example.
        remedy: what to use instead, for the error message.
    """
    return Removed(
        name.rpartition(".")[2],
        (),
        {"__qualname__": name, "__doc__": f"Not here: {remedy}", "remedy": remedy},
    )
