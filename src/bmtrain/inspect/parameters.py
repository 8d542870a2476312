"""inspect_model: statistics of full parameters and gradients, computed from their shards."""

from __future__ import annotations

import fnmatch
from typing import Any

import torch

from bmtrain.distributed.agreement import told_apart
from bmtrain.errors import ConfigurationError
from bmtrain.inspect.statistics import entry, statistics_of
from bmtrain.runtime import world
from bmtrain.shard.parameter import DistributedParameter
from bmtrain.shard.slices import local_of


def inspect_model(
    model: torch.nn.Module, param_name: str, prefix: str = ""
) -> list[dict[str, Any]]:
    """Statistics of all parameters whose name matches. Collective; gathers no parameter.

    Args:
        model: any module, fully, partly or not sharded.
        param_name: shell wildcards: `*`, `?`, `[0-3]`. A dot is an ordinary character.
        prefix: prepended to every name, with a dot between, before it is matched.

    Returns:
        On every rank, for each matching parameter in the order of `model.named_parameters()`, a
        dict with name, shape (of the full tensor), std, mean, max, min, grad_std and grad_mean (of
        `.grad` as it is: summed over ranks, with the loss scale; both 0.0 where there is none, as
        in BMTrain). Numbers are computed in fp64. The std of a single element is NaN, the numbers
        of an empty or complex tensor are None. A tied parameter is listed once, under its first
        name, if any of its names matches. For parameters that are not sharded, each rank returns
        the statistics of its own copy. A pattern that matches nothing gives an empty list.

    Raises:
        NotInitializedError: before `init_distributed`.
        ConfigurationError: for arguments of the wrong type; on all ranks if the matching parameters
            differ between ranks.
    """
    current = world.current("inspect_model")
    axis = current.mesh.world
    found = matching_parameters(model, param_name, prefix, what="inspect_model")
    shapes = {name: whole_shape(param) for name, param in found.items()}
    # Ranks that match different parameters would add up rows of different ones, or hang.
    text = "\n".join(f"{name} {shapes[name]} {type(x).__name__}" for name, x in found.items())
    told = told_apart(text, axis, "inspect_model")
    if told is not None:
        raise ConfigurationError(
            f"inspect_model: ranks see other parameters ({told}); expected the same everywhere: "
            "call it on every rank with the same model and pattern."
        )
    tensors = [x for param in found.values() for x in (param, param.grad)]
    local = (None if x is None else local_of(x) for x in tensors)
    own = [
        2 * place + half
        for place, param in enumerate(found.values())
        if not isinstance(param, DistributedParameter)
        for half in range(2)
    ]
    statistics = statistics_of(local, current.device, axis, own)
    rows = []
    for name, values, grad in zip(found, statistics[::2], statistics[1::2], strict=True):
        has_none = grad["mean"] is None and values["mean"] is not None
        slopes = {key: 0.0 if has_none else value for key, value in grad.items()}
        rows.append(entry(name, shapes[name], values, slopes))
    return rows


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
    for argument, text in (("param_name", pattern), ("prefix", prefix)):
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


def whole_shape(param: torch.Tensor) -> tuple[int, ...]:
    """The shape of the full tensor, before sharding and the tensor-parallel split."""
    return tuple(
        param._tp_original_shape if isinstance(param, DistributedParameter) else param.shape
    )
