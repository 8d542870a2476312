"""What stands for a name of BMTrain without meaning here: it can be imported, and says so when it
is used.
"""

from __future__ import annotations

from typing import Any, NoReturn

from bmtrain.errors import RemovedError


class Removed(type):
    """The class of such classes: calling one, or looking for a public name in it, is the error.

    `isinstance` says no.
    """

    __qualname__: str
    remedy: str

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise RemovedError(cls.__qualname__, cls.remedy)

    def __getattr__(cls, name: str) -> NoReturn:
        if name.startswith("__"):  # asked by Python itself, of any class
            raise AttributeError(name)
        raise RemovedError(f"{cls.__qualname__}.{name}", cls.remedy)


def removed(name: str, remedy: str) -> Any:
    """A class that stands for `name`, such as "bmtrain.zero_context.ZeroContext"; `remedy` is what
    to do instead.
    """
    return Removed(
        name.rpartition(".")[2],
        (),
        {"__qualname__": name, "__doc__": f"Not here: {remedy}", "remedy": remedy},
    )
