"""Configurations that are called with ModelCenter's arguments by position too."""

from __future__ import annotations

import inspect
from typing import Any

from bmtrain.runtime.arguments import unknown
from model_center.errors import ArgumentError


class Positional(type):
    """The type of a class whose `arguments()` are the names of its first arguments, in order.

    Attributes:
        POSITIONS_END: why there are no more of them, for the error.
    """

    POSITIONS_END = ""

    def __call__(cls, *args: Any, **given: Any) -> Any:
        """An object of the class.

        Raises:
            ArgumentError: for too many arguments by position, one that is given by name as well, or
                one that is not known.
        """
        names = cls.arguments() if args else ()
        if len(args) > len(names):
            raise ArgumentError(
                f"{cls.__name__} takes {len(names)} arguments by position: got {len(args)}. Give "
                f"the others by name.{cls.POSITIONS_END}"
            )
        by_position = dict(zip(names, args, strict=False))
        twice = sorted(by_position.keys() & given.keys())
        if twice:
            raise ArgumentError(f"{cls.__name__} got {', '.join(twice)} by position and by name.")
        problem = unknown(cls.__name__, given, inspect.signature(cls.__init__).parameters)  # type: ignore[misc]  # not of an object
        if problem is not None:
            raise ArgumentError(problem)
        return super().__call__(**by_position, **given)

    def arguments(cls) -> tuple[str, ...]:
        """Names of the arguments that may be given by position."""
        return ()

    @property
    def __signature__(cls) -> inspect.Signature:
        """Of a call of the class, for `help` and tools."""
        _, *named = inspect.signature(cls.__init__).parameters.values()  # type: ignore[misc]  # not of an object
        by_name = {parameter.name: parameter for parameter in named}
        first = [
            by_name.pop(name).replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD)
            for name in cls.arguments()
        ]
        return inspect.Signature([*first, *by_name.values()])
