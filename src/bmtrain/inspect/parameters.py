"""inspect_model: statistics of full parameters and gradients, computed from their shards."""

from __future__ import annotations

import fnmatch
import hashlib
from typing import Any

import torch

from bmtrain.distributed import collectives
from bmtrain.errors import ConfigurationError
from bmtrain.inspect.statistics import add_ranks, entry, measure, statistics_of
from bmtrain.runtime import world
from bmtrain.runtime.mesh import Axis
from bmtrain.shard.parameter import DistributedParameter
from bmtrain.shard.slices import local_of


def inspect_model(model: torch.nn.Module, pattern: str, prefix: str = "") -> list[dict[str, Any]]:
    """Statistics of all parameters whose name matches. Collective; gathers no parameter.

    Args:
        model: any module, fully, partly or not sharded.
        pattern: shell wildcards: `*`, `?`, `[0-3]`. A dot is an ordinary character.
        prefix: prepended to every name, with a dot between, before the pattern is matched.

    Returns:
        On every rank, for each matching parameter in the order of `model.named_parameters()`, a
        dict with name, shape (of the full tensor), std, mean, max, min, grad_std and grad_mean (of
        `.grad` as it is: summed over ranks, with the loss scale). Numbers are computed in fp64. An
        undefined number is None: the std of a single element, any number of an empty or complex
        tensor or of a gradient that is None. A tied parameter is listed once, under its first name,
        if any of its names matches. For parameters that are not sharded, each rank returns the
        statistics of its own copy. A pattern that matches nothing gives an empty list.

    Raises:
        NotInitializedError: before `init_distributed`.
        ConfigurationError: for arguments of the wrong type; on all ranks if the matching parameters
            differ between ranks.
    """
    current = world.current("inspect_model")
    found = matching_parameters(model, pattern, prefix, what="inspect_model")
    _agree(found, pattern, current.mesh.world)
    tensors = [x for param in found.values() for x in (param, param.grad)]
    rows = measure((None if x is None else local_of(x) for x in tensors), current.device)
    sharded = [
        2 * place + half
        for place, param in enumerate(found.values())
        if _is_sharded(param)
        for half in range(2)
    ]
    rows[sharded] = add_ranks(rows[sharded], current.mesh.world)
    statistics = statistics_of(rows)
    return [
        entry(name, whole_shape(param), statistics[2 * place], statistics[2 * place + 1])
        for place, (name, param) in enumerate(found.items())
    ]


def matching_parameters(
    model: torch.nn.Module, pattern: str, prefix: str = "", *, what: str
) -> dict[str, torch.nn.Parameter]:
    """The parameters of which any name matches, each once, under its first name.

    Args:
        prefix: prepended to every name before it is matched.
        what: the name of the calling function, for error messages.
    """
    if not isinstance(model, torch.nn.Module):
        raise ConfigurationError(f"{what} got {type(model).__name__}: expected a torch.nn.Module.")
    for argument, text in (("pattern", pattern), ("prefix", prefix)):
        if not isinstance(text, str):
            raise ConfigurationError(
                f"{what} got {text!r} as {argument}: expected a string, such as '*.weight'."
            )
    start = f"{prefix}." if prefix and not prefix.endswith(".") else prefix
    names: dict[torch.nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(start + name)
    return {
        known[0]: param
        for param, known in names.items()
        if any(fnmatch.fnmatchcase(name, pattern) for name in known)
    }


def whole_shape(param: torch.nn.Parameter) -> tuple[int, ...]:
    """The shape of the full tensor, before sharding and the tensor-parallel split."""
    return tuple(
        param._tp_original_shape if isinstance(param, DistributedParameter) else param.shape
    )


def _is_sharded(param: torch.nn.Parameter) -> bool:
    return isinstance(param, DistributedParameter)


def _agree(found: dict[str, torch.nn.Parameter], pattern: str, axis: Axis) -> None:
    """Check that all ranks have matched the same parameters. Collective.

    Without this check, the reductions would mix the rows of different parameters, or deadlock.
    """
    text = "\n".join(
        f"{name} {whole_shape(param)} {type(param).__name__}" for name, param in found.items()
    )
    digests = collectives.gather_objects(
        hashlib.sha256(text.encode()).hexdigest(), axis, "inspect_model"
    )
    other = [rank for rank, digest in zip(axis.ranks, digests, strict=True) if digest != digests[0]]
    if other:
        raise ConfigurationError(
            f"inspect_model: ranks {other} see other parameters than rank "
            f"{axis.ranks[0]} (here {len(found)} match {pattern!r}); "
            "expected the same everywhere: call it on every rank with the same model and pattern."
        )
