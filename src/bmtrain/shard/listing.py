"""Many parameters at once: their whole values, and their groups."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from bmtrain.shard.parameter import DistributedParameter
from bmtrain.shard.storage import Storage
from bmtrain.shard.whole import Whole


def full_values(
    params: Iterator[tuple[str, torch.nn.Parameter]],
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, whole tensor on the CPU) for each parameter, one storage gathered at a time.

    Collective.
    """
    by_storage: dict[Storage, list[tuple[str, int]]] = {}
    for name, param in params:
        if isinstance(param, DistributedParameter):
            by_storage.setdefault(param.storage_of, []).append((name, param.index_in_storage))
        else:
            yield name, param.detach().cpu()
    for storage, members in by_storage.items():
        whole = Whole(storage)
        for name, index in members:
            value = whole[index]
            yield name, value.clone() if value.device.type == "cpu" else value.cpu()
        del whole, value  # before the next is gathered


def grouped_parameters(
    module: torch.nn.Module,
) -> Iterator[tuple[str | None, list[torch.nn.Parameter]]]:
    """(group name, parameters) for each `group` given to the DistributedParameters of `module`;
    others are under None.
    """
    groups: dict[str | None, list[torch.nn.Parameter]] = {}
    for param in module.parameters():
        name = param.group if isinstance(param, DistributedParameter) else None
        groups.setdefault(name, []).append(param)
    yield from groups.items()
