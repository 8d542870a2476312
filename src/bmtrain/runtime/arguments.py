"""What arguments may be: rules with names, checked alike everywhere; functions by name."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import math
import numbers
import pkgutil
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import torch

from bmtrain.errors import ArgumentError, ConfigurationError


@dataclasses.dataclass(frozen=True)
class Rule:
    """What a value must be.

    Attributes:
        expected: in words, for a message: "a whole number above 0".
        holds: whether a value is that.
    """

    expected: str
    holds: Callable[[Any], bool]


def _number(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """A real number, of Python, numpy or a tensor of one element, that is not NaN."""

    def check(value: Any) -> bool:
        if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
            value = value.item()
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        return is_number and not math.isnan(value) and holds(value)

    return check


def _whole(least: float) -> Callable[[Any], bool]:
    return lambda value: (
        isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= least
    )


NUMBER = Rule("a finite number", _number(math.isfinite))
AMOUNT = Rule("a finite number from 0 on", _number(lambda x: 0 <= x < math.inf))
POSITIVE = Rule("a finite number above 0", _number(lambda x: 0 < x < math.inf))
BOUND = Rule("a positive number or inf", _number(lambda x: x > 0))
SHARE = Rule("a number from 0 to 1", _number(lambda x: 0 <= x <= 1))
PART = Rule("a number from 0 to below 1", _number(lambda x: 0 <= x < 1))
SIZE = Rule("a whole number above 0", _whole(1))
COUNT = Rule("a whole number from 0 on", _whole(0))
WHOLE = Rule("a whole number", _whole(-math.inf))
FLAG = Rule("True or False", lambda value: isinstance(value, bool | int) and value in (0, 1))


def optional(rule: Rule) -> Rule:
    """The rule, or None."""
    return Rule(f"{rule.expected}, or None", lambda value: value is None or rule.holds(value))


def check(
    owner: str, kind: type[Exception] = ConfigurationError, /, **given: tuple[Any, Rule]
) -> None:
    """Refuse the first argument that breaks its rule.

    Args:
        owner: whose arguments these are, for the message.
        kind: of the error. Instead of ConfigurationError, ArgumentError is raised for values of
            another type, which is a TypeError too.
        given: values and rules, by the arguments' names.

    Raises:
        kind: naming owner, argument, value and what was expected.
    """
    for name, (value, rule) in given.items():
        if not rule.holds(value):
            is_type = kind is ConfigurationError and not isinstance(value, numbers.Real)
            error = ArgumentError if is_type else kind
            raise error(f"{owner}: {name} is {value!r}: expected {rule.expected}.")


def with_nearest(name: str, known: Iterable[str]) -> str:
    """A name that is not among those `known`, for a message, with the nearest of them."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"{name!r}" + (f" (nearest: {near[0]!r})" if near else "")


def unknown(owner: str, names: Iterable[str], known: Iterable[str]) -> str | None:
    """The message about names that are not known, with the nearest that are; None if all are."""
    known = list(known)
    parts = [with_nearest(name, known) for name in names if name not in known]
    return f"{owner} does not know {', '.join(parts)}." if parts else None


def named_function(owner: str, name: str) -> Callable[..., Any]:
    """The function that `module:function` names, whose module is imported.

    Raises:
        ConfigurationError: if there is none, or with the traceback of a module that fails.
    """
    module = name.partition(":")[0]
    try:
        if all(map(str.isidentifier, module.split("."))):
            importlib.import_module(module)
    except Exception as error:  # whatever the user's module raises
        if not (
            isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}.")
        ):
            raise ConfigurationError(
                f"{owner}: {module} cannot be imported:\n{traceback.format_exc()}"
            ) from error
    try:
        found = pkgutil.resolve_name(name)
        if not callable(found):
            raise ValueError("it cannot be called")
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(
            f"{owner}: {name!r} names no function ({error}): expected module:function, such as "
            "my_package.checks:program; modules are looked for from the current folder and on "
            "PYTHONPATH."
        ) from error
    return found
