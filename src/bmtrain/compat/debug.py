"""`bmtrain.debug`: a global dict of values that model code stores for debugging.

The library itself does not use it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

DEBUG_VARS: dict[Any, Any] = {}


def clear(key: Any = None) -> None:
    """Delete the value of `key`, or all values."""
    if key is None:
        DEBUG_VARS.clear()
    else:
        DEBUG_VARS.pop(key, None)


def set(key: Any, value: Any) -> None:
    """Store `value`; a tensor is detached and moved to the CPU."""
    DEBUG_VARS[key] = value.detach().cpu() if isinstance(value, torch.Tensor) else value


def get(key: Any, default: Any = None) -> Any:
    """The value of `key`, or `default`."""
    return DEBUG_VARS.get(key, default)


def append(key: Any, value: Any) -> None:
    """Append `value`, as it is, to the list of `key`, which is created if missing."""
    DEBUG_VARS.setdefault(key, []).append(value)


def extend(key: Any, value: Iterable[Any]) -> None:
    """Append the elements of `value` to the list of `key`, which is created if missing."""
    DEBUG_VARS.setdefault(key, []).extend(value)
