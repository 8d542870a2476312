"""Checks that parameters can be sharded, before anything is changed."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch

from bmtrain.errors import ParameterError
from bmtrain.shard.engine import Engine
from bmtrain.shard.parameter import DistributedParameter, check_made_of_whole


def check_shardable(named: Iterable[tuple[str, torch.nn.Parameter]], engine: Engine) -> None:
    """Raise ParameterError for the first parameter that cannot be sharded.

    Two parameters that share memory without being one object cannot be sharded either.

    Args:
        named: parameters with their paths; a tied parameter may come once or at each of its places.
            Sharded ones are skipped.
    """
    ordinary = {param: path for path, param in named if not isinstance(param, DistributedParameter)}
    for param, path in ordinary.items():
        _check_kind(path, param)
        if param in engine.replicated:
            raise ParameterError(
                f"parameter {path!r} is sharded after an optimizer of this library or "
                "an OptimManager got it: shard the model "
                "first, then make the optimizer."
            )
        if param.device.type not in ("cpu", "meta") and param.device != engine.device:
            raise ParameterError(
                f"parameter {path!r} is on {param.device}, this rank computes on "
                f"{engine.device}: build the module on the CPU, on "
                "meta, or on bmtrain.device()."
            )
    _check_memory(ordinary)


def _check_kind(path: str, param: torch.nn.Parameter) -> None:
    if isinstance(param, torch.nn.parameter.UninitializedParameter):
        raise ParameterError(
            f"parameter {path!r} is lazy and has no shape yet: run the model once before "
            "it is sharded."
        )
    check_made_of_whole(path, param)
    kind = type(param.detach())
    if not param.dtype.is_floating_point or kind is not torch.Tensor:
        what = str(param.dtype) if kind is torch.Tensor else f"a {kind.__name__}"
        raise ParameterError(
            f"parameter {path!r} is {what}: only plain floating point tensors are "
            "sharded and trained. Freeze it, "
            "param.requires_grad_(False), and every rank keeps it whole, or register "
            "it as a buffer. Complex numbers are trained as real ones: make the parameter of "
            "torch.view_as_real(values), and compute with torch.view_as_complex(param)."
        )


def _check_memory(params: dict[torch.nn.Parameter, str]) -> None:
    """Refuse overlapping parameters: each would get memory of its own, and the tie would break."""
    ranges: dict[int, list[tuple[int, int, str]]] = {}
    for param, path in params.items():
        if param.is_meta or param.numel() == 0:
            continue
        begin = param.data_ptr()
        last = sum(
            (size - 1) * abs(stride)
            for size, stride in zip(param.shape, param.stride(), strict=True)
        )
        ranges.setdefault(param.untyped_storage().data_ptr(), []).append(
            (begin, begin + last * param.element_size(), path)
        )
    for members in ranges.values():
        members.sort()
        for (_, end, name), (begin, _, other) in itertools.pairwise(members):
            if begin <= end:
                raise ParameterError(
                    f"parameters {name!r} and {other!r} share memory without being the "
                    "same parameter: tie them by assigning one "
                    "object to both modules, or give each its own memory, param.data = "
                    "param.data.clone()."
                )
