"""Statistics of full parameters and gradients, computed from their shards; a list of parameters."""

from __future__ import annotations

import fnmatch
import math
from collections import Counter
from typing import Any, TextIO

import torch

from bmtrain.distributed.agreement import told_apart
from bmtrain.errors import ConfigurationError
from bmtrain.inspect.statistics import entry, statistics_of
from bmtrain.runtime import world
from bmtrain.runtime.log import aligned, print_rank
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


def print_inspect(
    model: torch.nn.Module, param_name: str = "*", file: TextIO | None = None
) -> None:
    """Print on rank 0 the parameters whose name matches, equal layers in one line. Not collective.

    Numbers in names are `*`: a line's name is a pattern of the parameters that it counts. Shapes
    are those of full tensors, dtypes those in which they are stored.

    Args:
        model: any module, sharded or not.
        param_name: as in `inspect_model`.
        file: where to print; stdout by default.

    Raises:
        ConfigurationError: for arguments of the wrong type.
    """
    counts: Counter[tuple[Any, ...]] = Counter()
    for name, param in matching_parameters(model, param_name, what="print_inspect").items():
        pattern = ".".join("*" if word.isdecimal() else word for word in name.split("."))
        group = param.group if isinstance(param, DistributedParameter) else None
        of_all = isinstance(param, DistributedParameter), param.requires_grad, group or "-"
        local = local_of(param).numel()
        counts[pattern, whole_shape(param), param.dtype, local, of_all] += 1
    total, trainable, own = 0, 0, 0
    rank = f"on rank {world.rank()}"
    lines = [["parameter", "count x shape", "dtype", "elements", rank]]
    lines[0] += ["sharded", "trainable", "group"]
    for (pattern, shape, dtype, local, of_all), count in counts.items():
        numel = count * math.prod(shape)
        cells = f"{count} x {shape}", str(dtype).removeprefix("torch."), f"{numel:,}"
        lines.append([pattern, *cells, f"{count * local:,}", *map(str, of_all)])
        total, own, trainable = total + numel, own + count * local, trainable + numel * of_all[1]
    print_rank(aligned(lines), file=file)
    print_rank(
        f"{counts.total():,} parameters of {total:,} elements, {trainable:,} trainable; {own:,} "
        f"{rank}",
        file=file,
    )


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
