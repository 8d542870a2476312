"""`bmtrain.debug`: values that model code leaves for whoever looks on.

Nothing else of the library uses it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

DEBUG_VARS: dict[Any, Any] = {}


def clear(key: Any = None) -> None:
    """Forget the value of `key`, or all values."""
    if key is None:
        DEBUG_VARS.clear()
    else:
        DEBUG_VARS.pop(key, None)


def set(key: Any, value: Any) -> None:
    """Keep `value`; of a tensor its values on the CPU."""
    DEBUG_VARS[key] = value.detach().cpu() if isinstance(value, torch.Tensor) else value


def get(key: Any, default: Any = None) -> Any:
    """The value of `key`, or `default`."""
    return DEBUG_VARS.get(key, default)


def append(key: Any, value: Any) -> None:
    """Put `value`, as it is, at the end of the list of `key`, which is made if it is not there."""
    DEBUG_VARS.setdefault(key, []).append(value)


def extend(key: Any, value: Iterable[Any]) -> None:
    """Put all of `value` at the end of the list of `key`."""
    DEBUG_VARS.setdefault(key, []).extend(value)
