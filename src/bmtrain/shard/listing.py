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
    """Yield (name, whole tensor on the CPU) per parameter, gathering one storage at a time.

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
        del whole, value  # or two full buffers would be resident at a time


def grouped_parameters(
    module: torch.nn.Module,
) -> Iterator[tuple[str | None, list[torch.nn.Parameter]]]:
    """Yield (name, parameters) for each `group` of parameters in `module`; None names the rest."""
    groups: dict[str | None, list[torch.nn.Parameter]] = {}
    for param in module.parameters():
        name = param.group if isinstance(param, DistributedParameter) else None
        groups.setdefault(name, []).append(param)
    yield from groups.items()
