"""Tensors in containers and dataclasses of any depth."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch

from bmtrain.torch_internals import tree_flatten, tree_unflatten

_NO_TENSORS = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size})
_PLAIN = _NO_TENSORS | {torch.Tensor}


def tensors_of(out: Any) -> list[torch.Tensor]:
    """The tensors of `out`."""
    found: list[torch.Tensor] = []

    def note(x: torch.Tensor) -> torch.Tensor:
        found.append(x)
        return x

    map_tensors(note, out)
    return found


def has_plain_tensors(values: Iterable[Any]) -> bool:
    """Whether these are ordinary tensors and values without tensors, and nothing else."""
    return _PLAIN.issuperset(map(type, values))


def map_tensors(fn: Callable[[Any], Any], out: Any) -> Any:
    """`out` with `fn` applied to its tensors; the same object if none changes."""
    kind = type(out)
    if isinstance(out, torch.Tensor):
        return fn(out)
    if kind in _NO_TENSORS:
        return out
    # every call of a block meets these: torch's trees take ten times as long
    if kind in (tuple, list, dict):
        values = out.values() if kind is dict else out
        mapped = [map_tensors(fn, value) for value in values]
        if all(map(operator.is_, mapped, values)):
            return out
        return dict(zip(out, mapped, strict=True)) if kind is dict else kind(mapped)
    if dataclasses.is_dataclass(out) and not isinstance(out, type):
        fields = [
            (field.name, getattr(out, field.name))
            for field in dataclasses.fields(out)
            if field.init
        ]
        changed = {
            name: new for name, value in fields if (new := map_tensors(fn, value)) is not value
        }
        return dataclasses.replace(out, **changed) if changed else out
    leaves, spec = tree_flatten(out)
    is_leaf = len(leaves) == 1 and leaves[0] is out
    mapped = leaves if is_leaf else [map_tensors(fn, leaf) for leaf in leaves]
    return out if all(map(operator.is_, mapped, leaves)) else tree_unflatten(mapped, spec)
