"""Functions and classes that only BMTrain's import paths have."""

from __future__ import annotations

import functools
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

import torch
import torch.utils.checkpoint

from bmtrain.block.block import Block
from bmtrain.checkpoint.saving import collect
from bmtrain.distributed import collectives
from bmtrain.distributed.autograd import all_gather, all_reduce, broadcast, checked, reduce_scatter
from bmtrain.errors import ConfigurationError, ParameterError, RemovedError
from bmtrain.optim.clip import global_sum_of_squares
from bmtrain.optim.flat import gradients_of, parameters_of, spans_of
from bmtrain.runtime import world
from bmtrain.runtime.mesh import Axis
from bmtrain.shard import initialize
from bmtrain.shard.parameter import DistributedParameter


class Removed(type):
    """The metaclass of placeholders: calling one, or reading an attribute of it, raises.

    `isinstance(x, placeholder)` works and is False.
    """

    __qualname__: str
    remedy: str

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise RemovedError(cls.__qualname__, cls.remedy)

    def __getattr__(cls, name: str) -> NoReturn:
        if name.startswith("__"):  # Python itself probes for such names on any class
            raise AttributeError(name)
        raise RemovedError(f"{cls.__qualname__}.{name}", cls.remedy)


# bmtrain.block_layer


class AnyBlock(type):
    """The metaclass of `CheckpointBlock`: calling it makes a Block, each Block is an instance."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is CheckpointBlock:
            return Block(*args, **kwargs)
        return super().__call__(*args, **kwargs)

    def __instancecheck__(cls, instance: object) -> bool:
        if cls is CheckpointBlock:
            return isinstance(instance, Block)
        return super().__instancecheck__(instance)


class CheckpointBlock(Block, metaclass=AnyBlock):
    """`Block` by its path of BMTrain 0.1 and 0.2; no block has it as its very type.

    Programs that ask for the type, as BMCook's pruning, go on to BMTrain's flat storages, which are
    not here; what they do with other modules, parameter by parameter, is right for blocks too.
    """


# bmtrain.checkpointing


def checkpoint(func: Callable[..., Any]) -> Callable[..., Any]:
    """The decorator of BMTrain 0.1: backward recomputes what `func` computes."""

    @functools.wraps(func)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(func, *args, use_reentrant=False, **kwargs)

    return recomputed


class CheckpointPackage(types.ModuleType):
    """`bmtrain.checkpoint`: this library's package, and the decorator of BMTrain 0.1."""

    __call__ = staticmethod(checkpoint)


# bmtrain.debug: a global dict of values that model code stores for debugging. The library itself
# does not use it.

DEBUG_VARS: dict[Any, Any] = {}


def debug_clear(key: Any = None) -> None:
    """Delete the value of `key`, or all values."""
    if key is None:
        DEBUG_VARS.clear()
    else:
        DEBUG_VARS.pop(key, None)


def debug_set(key: Any, value: Any) -> None:
    """Store `value`; a tensor is detached and moved to the CPU."""
    DEBUG_VARS[key] = value.detach().cpu() if isinstance(value, torch.Tensor) else value


debug_get = DEBUG_VARS.get


def debug_append(key: Any, value: Any) -> None:
    """Append `value`, as it is, to the list of `key`, which is created if missing."""
    DEBUG_VARS.setdefault(key, []).append(value)


def debug_extend(key: Any, value: Iterable[Any]) -> None:
    """Append the elements of `value` to the list of `key`, which is created if missing."""
    DEBUG_VARS.setdefault(key, []).extend(value)


# bmtrain.distributed.ops and bmtrain.parameter: functions under their old names


OpAllGather = types.SimpleNamespace(apply=all_gather)
OpAllReduce = types.SimpleNamespace(apply=all_reduce)
OpReduceScatter = types.SimpleNamespace(apply=reduce_scatter)
OpBroadcast = types.SimpleNamespace(apply=broadcast)


class OpGather:
    """`DistributedParameter.gather` under its old name."""

    @staticmethod
    def apply(value: DistributedParameter) -> torch.Tensor:
        """All-gather the full tensor, differentiably. Collective.

        Raises:
            ParameterError: for anything but a DistributedParameter.
        """
        if not isinstance(value, DistributedParameter):
            raise ParameterError(
                f"OpAllGather got {type(value).__name__}: expected a DistributedParameter; tensors "
                "have bmtrain.distributed.all_gather."
            )
        return value.gather()


# bmtrain.param_init


def init_distributed_parameter(params: Iterable[torch.nn.Parameter]) -> None:
    """Initialise distributed parameters by their `init_method`, if they have one. Collective.

    The method gets the full tensor.
    """
    wanted = [
        param
        for param in params
        if isinstance(param, DistributedParameter) and param.init_method is not None
    ]
    initialize.initialize(torch.nn.ParameterList(wanted))


def iterate_parameters(model: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """The module's own parameters without those of its children; none for a Block."""
    if not isinstance(model, Block):
        yield from (param for param in model._parameters.values() if param is not None)


# bmtrain.benchmark.shape, bmtrain.distributed.ops and bmtrain.store

SHAPES = [2**power for power in range(10, 33)]
DTYPE_LIST = [
    *(torch.float64, torch.float32, torch.float16, torch.int64, torch.int32, torch.int16),
    *(torch.int8, torch.bfloat16, torch.bool),
]


def state_of_rank0(state_dict: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """Rank 0's state dict, with whole tensors on the CPU, on every rank. Collective.

    What the other ranks pass is not looked at. `bmtrain.load` needs no whole model on every rank.
    """
    axis = world.current("DistributedStateDictWrapper").mesh.world
    given = state_dict if axis.index == 0 else {}
    names, metadata = broadcast_object((list(given), getattr(given, "_metadata", {})), axis)
    out = OrderedDict[str, Any]()
    for name in names:  # one by one: no message holds a whole model
        value = given.get(name)
        own = value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
        out[name] = broadcast_object(own, axis)
    vars(out)["_metadata"] = metadata
    return out


def allgather_objects(obj: Any, comm: Axis | None = None) -> list[Any]:
    """Gather every rank's `obj`, which must be picklable, in rank order. Collective."""
    every = world.current("allgather_objects").mesh.world
    axis = checked("allgather_objects", every if comm is None else comm)
    return collectives.gather_objects(obj, axis, "allgather_objects")


def broadcast_object(obj: Any, comm: Axis, src: int = 0) -> Any:
    """Broadcast `obj`, which must be picklable, from rank `src` of `comm`. Collective.

    Raises:
        ConfigurationError: for a `comm` that is no communicator, or a `src` outside of it.
    """
    axis = checked("broadcast_object", comm, src)
    return collectives.broadcast_object(obj, src, axis, "broadcast_object")


def save_to_rank0(
    model: torch.nn.Module,
    destination: OrderedDict[str, torch.Tensor] | None = None,
    prefix: str = "",
) -> OrderedDict[str, torch.Tensor]:
    """The full CPU tensors that `save` would write, on rank 0; none elsewhere. Collective.

    Args:
        model: sharded or not.
        destination: gets the tensors and is returned; None is a new dict.
        prefix: put before their names.
    """
    is_first = world.current("_save_to_rank0").rank == 0
    found = collect(model, keep=is_first)
    out = OrderedDict() if destination is None else destination
    out.update({prefix + name: tensor for name, tensor in found.items()})
    return out


# bmtrain.optim.optim_manager and bmtrain.loss._function


def check_overflow(param_groups: Iterable[dict[str, Any]]) -> None:
    """Raise on all ranks if any rank has an infinite or NaN gradient. Collective.

    Unlike BMTrain's, it checks fp32 gradients, too: they overflow as well if activations are in
    half precision.

    Raises:
        OverflowError: on all ranks.
    """
    spans = spans_of(parameters_of(param_groups))
    if not global_sum_of_squares(*gradients_of(spans)).isfinite():
        raise OverflowError("Gradient overflow")


@torch.no_grad()
def grad_rescale(param_groups: Iterable[dict[str, Any]], scale: float) -> None:
    """Divide all gradients by `scale`, in place.

    Raises:
        ConfigurationError: for a scale of 0.
    """
    if scale == 0:
        raise ConfigurationError(
            "grad_rescale got scale=0: expected the loss scale, which is above 0."
        )
    for param in parameters_of(param_groups):
        if param.grad is not None:
            param.grad.div_(scale)


def has_inf_nan(g_half: torch.Tensor, out: torch.Tensor) -> None:
    """Set `out` to 1 if any element of `g_half` is infinite or NaN.

    An `out` that is 1 already stays 1. There is no synchronisation with the device.

    Args:
        g_half: any shape and floating dtype.
        out: uint8, one element.

    Raises:
        ConfigurationError: for an `out` of another dtype or size, or a `g_half` that is not
            floating point.
    """
    if out.dtype != torch.uint8 or out.numel() != 1 or not g_half.is_floating_point():
        raise ConfigurationError(
            f"has_inf_nan got {g_half.dtype}, and out of {out.dtype} with {out.numel()} elements: "
            "expected a floating point tensor, and one element of torch.uint8."
        )
    bad = ~torch.isfinite(g_half.detach()).all()
    out.bitwise_or_(bad.to(out))
