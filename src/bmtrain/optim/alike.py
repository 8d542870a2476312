"""Whether the ranks have been given the same saved state."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from bmtrain.distributed.agreement import are_near, look
from bmtrain.shard.parameter import DistributedParameter

# Elements of a whole tensor that are compared exactly: so many consecutive ones at so many places.
# The whole state of a large model is more than a CPU can look at in the time of reading it.
PLACES, LENGTH = 64, 4096


@dataclasses.dataclass(frozen=True)
class Held:
    """What one rank's file holds of an element-wise state.

    Attributes:
        shape, dtype: of it.
        digest: of a whole tensor of a sharded parameter, the same on all ranks bit by bit.
        figures: of the tensor of an ordinary parameter, whose replicas may differ by rounding.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    digest: int | None = None
    figures: tuple[float, float, float] | None = None

    @classmethod
    def of(cls, value: torch.Tensor, param: torch.nn.Parameter) -> Held:
        """Of a state of this parameter."""
        shape, dtype = tuple(value.shape), value.dtype
        if not isinstance(param, DistributedParameter):
            return cls(shape, dtype, figures=look(value))
        is_whole = value.numel() == param._tp_original_shape.numel()
        return cls(shape, dtype, digest=_digest(value) if is_whole else None)

    @property
    def numel(self) -> int:
        """Elements of it."""
        return torch.Size(self.shape).numel()


def _digest(x: torch.Tensor) -> int:
    flat = x.detach().reshape(-1)
    if flat.numel() > PLACES * LENGTH:
        step = flat.numel() // PLACES
        flat = flat[: step * PLACES].view(PLACES, step)[:, -LENGTH:].reshape(-1)
    return zlib.crc32(flat.cpu().contiguous().view(torch.uint8).numpy().tobytes())


def difference(params: Sequence[torch.nn.Parameter], everyone: Sequence[Mapping[int, Any]]) -> str:
    """Which states ranks have been given differently; empty if none.

    Args:
        everyone: for each rank its states by the parameter's index, with `Held` in the place of
            element-wise tensors. Those of a sharded parameter are all whole, or slices, which
            differ; a rank that has no elements of it may have any step count, and none of a
            parameter of another stage.
    """
    for index, param in enumerate(params):
        states = [found.get(index, {}) for found in everyone]
        if isinstance(param, DistributedParameter):
            is_staged = param.storage_of.placement.stage is not None
            states = [state for state in states if state] if is_staged else states
            states = [state for state in states if _has_elements(state)] or states
        for name in dict.fromkeys(name for state in states for name in state):
            values = [state.get(name) for state in states]
            if any(not _is_same(values[0], value) for value in values[1:]):
                return (
                    f"optimizer state {name!r} of parameter {index} differs between ranks: give "
                    "all of them the same, one file for example."
                )
    return ""


def _has_elements(state: Mapping[str, Any]) -> bool:
    return any(isinstance(value, Held) and value.numel for value in state.values())


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Held) and isinstance(other, Held):
        if one.figures is not None and other.figures is not None:
            return one.shape == other.shape and are_near(one.figures, other.figures, one.dtype)
        return one.digest == other.digest
    return type(one) is type(other) and described(one) == described(other)


def described(state: Any) -> str:
    """Numbers, texts and tensors of a state, in containers: the same text for the same values.

    Other objects, a schedule's functions for example, count by their type.
    """
    return "".join(_described(state))


def _described(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key in sorted(value, key=repr):
            yield f"{key!r}:"
            yield from _described(value[key])
            yield ","
    elif isinstance(value, list | tuple):
        yield "["
        for member in value:
            yield from _described(member)
            yield ","
        yield "]"
    elif isinstance(value, torch.Tensor):
        yield f"{value.dtype} {tuple(value.shape)} {_digest(value)}"
    elif isinstance(value, bool | int | float | str | bytes | None):
        yield repr(value)
    else:
        yield type(value).__name__
