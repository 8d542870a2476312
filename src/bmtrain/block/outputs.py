"""What a block returns: tensors in containers and dataclasses of any depth."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from bmtrain.shard.unshard import Use


def before_backward_of(out: Any, since: int, do: Callable[[], None]) -> None:
    """`do` whenever backward comes to a tensor of `out` whose node has a number from `since` on: it is no argument passed on."""

    def watch(x: torch.Tensor) -> torch.Tensor:
        if x.grad_fn is not None and x.grad_fn._sequence_nr() >= since:
            x.grad_fn.register_prehook(lambda _: do())
        return x

    map_tensors(watch, out)


def detached_from(use: Use, out: Any) -> Any:
    """Copies in place of outputs that lie in a full buffer, which other blocks will overwrite."""

    def copy(value: Any) -> Any:
        return value.clone() if isinstance(value, torch.Tensor) and use.owns(value) else value

    return map_tensors(copy, out)


def map_tensors(fn: Callable[[Any], Any], out: Any) -> Any:
    """`out` with `fn` applied to its tensors, in containers and dataclasses of any depth; the same object if none changes."""
    if isinstance(out, torch.Tensor):
        return fn(out)
    if dataclasses.is_dataclass(out) and not isinstance(out, type):
        fields = {field.name: getattr(out, field.name) for field in dataclasses.fields(out) if field.init}
        mapped = {name: map_tensors(fn, value) for name, value in fields.items()}
        same = all(mapped[name] is value for name, value in fields.items())
        return out if same else dataclasses.replace(out, **mapped)
    leaves, spec = tree_flatten(out)
    if len(leaves) == 1 and leaves[0] is out:
        return out
    mapped_leaves = [map_tensors(fn, leaf) for leaf in leaves]
    same = all(new is old for new, old in zip(mapped_leaves, leaves, strict=True))
    return out if same else tree_unflatten(mapped_leaves, spec)
