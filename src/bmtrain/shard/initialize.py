"""Initial values that do not depend on the world size, made one full tensor at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from bmtrain.distributed import collectives
from bmtrain.errors import ParameterError
from bmtrain.runtime import seeding, world
from bmtrain.shard.listing import stood_in
from bmtrain.shard.module import DistributedModule
from bmtrain.shard.parameter import DistributedParameter
from bmtrain.shard.whole import Whole


def initialize(module: torch.nn.Module) -> None:
    """Run every `init_method`, and `reset_parameters` where parameters were on the meta device.

    Every rank draws the full values from rank 0's random state and keeps its slice.

    Raises:
        ParameterError: for a parameter that has no values and nothing to make them.
    """
    done: set[DistributedParameter] = set()
    with _same_random_state():
        # children first, as in a plain constructor
        module.apply(lambda owner: _reset(owner, done))
        for name, param in module.named_parameters():
            if isinstance(param, DistributedParameter) and param not in done:
                _run_init_method(name, param)


def _run_init_method(name: str, param: DistributedParameter) -> None:
    if param.init_method is not None:
        full = torch.empty(param._tp_original_shape, dtype=param.dtype, device=param.device)
        with torch.no_grad():
            param.init_method(full)
        param.set_full(full)
    elif param.never_set:
        raise ParameterError(
            f"parameter {name!r} was made on the meta device and has no values: give "
            "it an init_method, give its module a "
            "reset_parameters method, or load a checkpoint."
        )


def _reset(owner: torch.nn.Module, done: set[DistributedParameter]) -> None:
    """Let `owner` reset full tensors if a parameter of its own has no values and no init_method."""
    # a block shares its module's parameters
    module = (
        next(iter(owner.sharded_modules()))[1] if isinstance(owner, DistributedModule) else owner
    )
    reset = reset_method(module)
    waiting = [
        param
        for param in module._parameters.values()
        if isinstance(param, DistributedParameter) and param.never_set and param.init_method is None
    ]
    if reset is None or not waiting:
        return
    # Zeros where there were no values. At the end they are copied back.
    with stood_in(module, lambda params: list(map(_full_copy, params))) as wholes:
        reset()
    for param, full in wholes.items():
        param.set_full(full)
        done.add(param)


def reset_method(owner: torch.nn.Module) -> Callable[[], object] | None:
    """`reset_parameters`, or `_reset_parameters` as torch.nn.MultiheadAttention calls it."""
    for name in ("reset_parameters", "_reset_parameters"):
        method = getattr(type(owner), name, None)
        if callable(method):
            return lambda: method(owner)
    return None


def _full_copy(param: DistributedParameter) -> torch.Tensor:
    if param.never_set:
        return torch.zeros(param._tp_original_shape, dtype=param.dtype, device=param.device)
    return Whole(param.storage_of)[param.index_in_storage].clone()


@contextlib.contextmanager
def _same_random_state() -> Iterator[None]:
    """All ranks draw from rank 0's random state; a rank that had another gets it back."""
    current = world.current("init_parameters")
    own = seeding.get_random_state(current.device)
    shared = collectives.broadcast_object(own, 0, current.mesh.world, "init_parameters")
    alike = all(torch.equal(own[key], shared[key]) for key in own)
    seeding.set_random_state(shared, current.device)
    try:
        yield
    finally:
        if not alike:
            seeding.set_random_state(own, current.device)
