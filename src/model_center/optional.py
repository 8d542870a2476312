"""Packages that only some features need, imported when the first of these is used."""

from __future__ import annotations

import importlib
import sys
import warnings
from typing import Any

EXTRA = "install this package with its extra [models]"


def package(
    module: str,
    user: str,
    error: type[Exception] = ImportError,
    *,
    name: str = "",
    instead: str = EXTRA,
) -> Any:
    """The module of this name.

    Args:
        module: to be imported.
        user: what needs it, for the message.
        error: raised if it cannot be imported.
        name: that pip knows it by, if it is another.
        instead: what else can be done.

    Raises:
        error: with the reason and the remedy.
    """
    found = sys.modules.get(module)
    if found is not None:
        return found  # else Python would show warnings again that it has shown, at each call
    try:
        with warnings.catch_warnings():
            # Some make Python warn when they are compiled, which is at their first import: their
            # business, not the user's.
            warnings.simplefilter("ignore")
            return importlib.import_module(module)
    except ImportError as reason:
        raise error(missing(user, name or module, f" ({reason})", instead)) from reason


def missing(user: str, name: str, reason: str = "", instead: str = EXTRA) -> str:
    """The message for a package that cannot be imported."""
    return f"{user} needs the package {name}{reason}: pip install {name}, or {instead}."
