"""Packages that only some tokenizers need, imported when the first of these is used."""

from __future__ import annotations

import functools
import importlib
import warnings
from typing import Any


@functools.cache
def package(name: str) -> Any:
    """The module of this name.

    Raises:
        ImportError: if it is not installed, with the remedy.
    """
    try:
        with warnings.catch_warnings():
            # Some make Python warn when they are compiled, which is at their first import: their
            # business, not the user's.
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"this tokenizer needs {name}: pip install {name}, or this package with its "
            "extra [models]."
        ) from error
