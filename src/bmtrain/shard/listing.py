"""Many parameters at once: their whole values, and their groups."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch

from bmtrain.runtime.config import device_of_state_dicts
from bmtrain.shard.parameter import DistributedParameter
from bmtrain.shard.slices import Slices
from bmtrain.shard.storage import Storage
from bmtrain.shard.whole import Whole


def full_values(params: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, whole tensor on the CPU) per tensor, gathering one storage at a time.

    Collective.
    """
    by_storage: dict[Storage, list[tuple[str, int]]] = {}
    for name, param in params:
        if isinstance(param, DistributedParameter):
            by_storage.setdefault(param.storage_of, []).append((name, param.index_in_storage))
        else:
            yield name, (param.full_tensor() if isinstance(param, Slices) else param.detach()).cpu()
    for storage, members in by_storage.items():
        whole = Whole(storage)
        for name, index in members:
            value = whole[index]
            yield name, value.clone() if value.device.type == "cpu" else value.cpu()
        del whole, value  # or two full buffers would be resident at a time


def in_whole(module: torch.nn.Module) -> contextlib.AbstractContextManager[object]:
    """Put copies of whole parameters in the places of sharded ones while the body runs, on every
    rank, one copy for the places of a tied one. Collective.

    For code that writes files and looks at the memory of what it writes. The copies are on the CPU
    (`config["save_param_to_cpu"] = False`: on the rank's device); what is written to them is lost.
    """

    def copies(params: Sequence[DistributedParameter]) -> list[torch.Tensor]:
        values = full_values((str(number), param) for number, param in enumerate(params))
        found = {name: value.to(device_of_state_dicts()) for name, value in values}
        return [found[str(number)] for number in range(len(params))]

    return stood_in(module, copies)


@contextlib.contextmanager
def stood_in(
    module: torch.nn.Module,
    make: Callable[[Sequence[DistributedParameter]], Sequence[torch.Tensor]],
) -> Iterator[dict[DistributedParameter, torch.nn.Parameter]]:
    """Inside, ordinary parameters of the tensors that `make` gives stand in the places of sharded
    ones of `module` and its children. Yields which stands for which.
    """
    places = [
        (part._parameters, name, param)
        for part in module.modules()
        for name, param in part._parameters.items()
        if isinstance(param, DistributedParameter)
    ]
    params = list(dict.fromkeys(param for _, _, param in places))
    pairs = zip(params, make(params), strict=True)
    wholes = {param: torch.nn.Parameter(value, param.requires_grad) for param, value in pairs}
    try:
        for home, name, param in places:
            home[name] = wholes[param]
        yield wholes
    finally:
        for home, name, param in places:
            home[name] = param


def grouped_parameters(
    model: torch.nn.Module,
) -> Iterator[tuple[str | None, list[torch.nn.Parameter]]]:
    """Yield (name, parameters) for each group of parameters in `model`; None names the rest.

    The group is the `group` that a DistributedParameter was made with; tied parameters are listed
    once.
    """
    groups: dict[str | None, list[torch.nn.Parameter]] = {}
    for param in model.parameters():
        name = param.group if isinstance(param, DistributedParameter) else None
        groups.setdefault(name, []).append(param)
    yield from groups.items()
