"""Batch normalisation over the rows of all ranks, as in one process that has them all."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from bmtrain.block.kinds import once_per_kind
from bmtrain.distributed import autograd
from bmtrain.errors import ParameterError
from bmtrain.recompute.recomputation import Snapshot, names_in
from bmtrain.runtime import world
from bmtrain.torch_internals import BatchNorm, tensors_of

_NAMES = ("batch_norm", "instance_norm", "native_batch_norm")
# Functions that take statistics, by what they are; those of `nn.functional` are given by keyword.
_FUNCTIONS: dict[Any, str] = {
    function: name
    for name in _NAMES
    for packet in [getattr(torch.ops.aten, name)]
    for function in (packet, packet.default, getattr(torch, name))
}
_FUNCTIONS |= {getattr(torch.nn.functional, name): name for name in _NAMES[:2]}
_ARGUMENTS = [
    "input",
    "weight",
    "bias",
    "running_mean",
    "running_var",
    "training",
    "momentum",
    "eps",
]
_TRAINING = _ARGUMENTS.index("training")
_SCRIPT = "<TorchScript>"
_INSTANCE_NORMS = (torch.nn.InstanceNorm1d, torch.nn.InstanceNorm2d, torch.nn.InstanceNorm3d)
_CALLED = (FunctionType, functools.partial, torch.jit.ScriptFunction)  # of what modules call


def share_statistics(module: torch.nn.Module) -> None:
    """Let a module that normalises batches take the mean and variance of all ranks' rows.

    Its class becomes a subclass. torch's SyncBatchNorm does the same already.
    """
    if world.world_size() == 1 or isinstance(module, torch.nn.SyncBatchNorm | OfAllRanks):
        return
    if isinstance(module, torch.jit.ScriptModule):
        if _normalises(module) and _refuse_script not in module._forward_pre_hooks.values():
            torch.nn.Module.register_forward_pre_hook(module, _refuse_script)
        return
    if isinstance(module, _INSTANCE_NORMS) and module.running_mean is None:
        return
    kind = type(module)
    made = _of_all_ranks(kind)
    for value in vars(module).values():
        if made is kind and isinstance(value, _CALLED):
            made = _made(kind, value)
    if made is not kind:
        module.__class__ = made


def _made(kind: Any, function: Any = None) -> Any:
    """The subclass; the class itself if its forward pass takes no statistics by torch's functions.

    Args:
        function: that the module has as an attribute.
    """
    base: Any = _OfAllRanks
    if not issubclass(kind, BatchNorm) or kind.forward is not BatchNorm.forward:
        base, names = None, _names_of(kind, function)
        if _SCRIPT in names or (issubclass(kind, BatchNorm) and names.isdisjoint(_NAMES)):
            base = _Refused
        elif not names.isdisjoint(_NAMES):
            base = _Derived
    if base is None:
        return kind
    own = {"__doc__": kind.__doc__, "__module__": kind.__module__}
    return type(kind.__name__, (base, kind), own)


_of_all_ranks = once_per_kind(_made)


def _names_of(kind: Any, function: Any) -> set[Any]:
    """The names in the code of a class's forward pass, and of the functions that it calls."""
    found, todo = Snapshot(is_brief=True), ["forward"]
    names, codes = {*todo, *([_SCRIPT] if _normalises(function) else [])}, set[Any]()
    found.add(function, "")
    for name in todo:  # which grows
        for base in kind.__mro__:
            # Static: the class of a scripted module has no methods, and raises.
            method = vars(base).get(name)
            method = getattr(method, "__func__", method)
            if isinstance(method, FunctionType) and base is not torch.nn.Module:
                found.add(method, name)
                if "super" not in names_in(method.__code__):
                    break
        for value in [*found.known.values()]:
            if isinstance(value, FunctionType) and value.__code__ not in codes:
                codes.add(value.__code__)
                scripts = map(value.__globals__.get, names_in(value.__code__))
                names.update(_SCRIPT for script in scripts if _normalises(script))
                new = [x for x in names_in(value.__code__) if isinstance(x, str) and x not in names]
                names.update(new)
                todo += new
    return names


def _normalises(script: Any) -> bool:
    """Whether it is a function or module of TorchScript that may take statistics of batches."""
    if not isinstance(script, torch.jit.ScriptFunction | torch.jit.ScriptModule):
        return False
    graph: Any = getattr(script, "inlined_graph", None)  # none of a list of modules
    nodes = graph.findAllNodes("aten::batch_norm") if graph else ()  # the graph owns them
    given = [list(node.inputs()) for node in nodes]
    return any(inputs[_TRAINING].toIValue() is not False for inputs in given)


def _refuse_script(module: torch.nn.Module, args: Any) -> None:
    current = world.current("BatchNorm")
    if module.training and not current.draws.same_rows and not current.pipe_enabled:
        raise _Sharing("A module of torch.jit", None).refused


class OfAllRanks(torch.nn.Module):
    """A module that `share_statistics` has changed."""


class _OfAllRanks(OfAllRanks, BatchNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Collective where the statistics of a batch are used: two sums over all ranks.

        A pipeline's stages run at other times: there they are those of a micro-batch's rows.
        """
        current = world.current("BatchNorm")
        uses_batch = self.training or self.running_mean is None
        if not uses_batch or current.draws.same_rows or current.pipe_enabled:
            return super().forward(x)
        self._check_input_dim(x)
        out, mean, var = _normalised(x, self.weight, self.bias, self.eps)
        if self.training and self.track_running_stats:
            with torch.no_grad():
                is_good = (mean + var).isfinite().all()
                factor: Any = self.momentum
                if self.num_batches_tracked is not None:
                    self.num_batches_tracked.add_(is_good)
                    if factor is None:
                        factor = 1.0 / self.num_batches_tracked.to(mean.dtype)
                _move(self.running_mean, mean, factor, is_good)
                _move(self.running_var, var, factor, is_good)
        return out


class _Derived(OfAllRanks):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The forward pass of the class, whose `batch_norm` takes the statistics of all ranks.

        ParameterError if it gives that only some of the rows, and in training if the class is a
        BatchNorm and does not call it.
        """
        current = world.current("BatchNorm")
        if current.draws.same_rows or current.pipe_enabled:
            return super().forward(*args, **kwargs)
        is_norm = isinstance(self, BatchNorm)
        uses_batch = self.training or (is_norm and self.running_mean is None)
        num_rows = next((x.shape[0] for x in tensors_of((args, kwargs)) if x.dim()), None)
        sharing = _Sharing(type(self).__name__, num_rows)
        if uses_batch and isinstance(self, _Refused):
            raise sharing.refused
        count: torch.Tensor | None = getattr(self, "num_batches_tracked", None)
        before = None if count is None else count.clone()
        try:
            with sharing:
                out = super().forward(*args, **kwargs)
            if is_norm and uses_batch and sharing.is_good is None:
                raise sharing.refused
        finally:  # neither an error nor a step that will be skipped counts
            if count is not None and before is not None:
                is_good = sharing.is_good
                count.copy_(before if is_good is None else torch.where(is_good, count, before))
        return out


class _Refused(_Derived):
    """A BatchNorm that computes its statistics by itself, or a module that calls TorchScript."""


class _Sharing(TorchFunctionMode):
    """Gives torch's functions the statistics of all ranks' rows.

    Attributes:
        is_good: whether they are finite; None before.
        refused: what is raised where that is not what one process computes.

    Args:
        name: of the module's class.
        num_rows: of the module's first tensor; None without one.
    """

    def __init__(self, name: str, num_rows: int | None) -> None:
        super().__init__()
        self._num_rows = num_rows
        self.is_good: torch.Tensor | None = None
        self.refused = ParameterError(
            f"{name} has a forward pass of its own and would take statistics of each rank's rows, "
            "or of parts of them, unlike one process: give torch.nn.functional.batch_norm or "
            "torch.nn.BatchNorm all rows at once, or freeze it, module.eval()."
        )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, _FUNCTIONS.get(func)
        if name is None:
            return func(*args, **kwargs)
        is_python = isinstance(func, FunctionType)
        order = ("input", "running_mean", "running_var") if is_python else _ARGUMENTS
        given = dict(zip(order, args, strict=False)) | kwargs
        x, running = given["input"], (given["running_mean"], given["running_var"])
        takes_own = given["use_input_stats" if "use_input_stats" in given else "training"]
        if not takes_own or (name == "instance_norm" and running[0] is None):
            return func(*args, **kwargs)
        num_rows = self._num_rows
        if name == "native_batch_norm" or num_rows is None or x.shape[0] % max(num_rows, 1):
            raise self.refused  # parts of the rows are other ones on ranks than in one process
        factor = given["momentum"]
        if name == "instance_norm":  # its statistics move by the mean of those of all rows
            before = [each.clone() for each in running]
            out = func(*args, **kwargs)
            mean, var = _averaged(running, x.shape[0])
            for old, value in zip(running, before, strict=True):
                old.copy_(value)
            factor = 1.0
        else:
            out, mean, var = _normalised(x, given["weight"], given["bias"], given["eps"])
        with torch.no_grad():
            self.is_good = (mean + var).isfinite().all()
            for old, new in zip(running, (mean, var), strict=True):
                _move(old, new, factor, self.is_good)
        return out


def _averaged(statistics: Sequence[torch.Tensor], num_rows: int) -> Iterable[torch.Tensor]:
    """Averages over the rows of all ranks."""
    with torch.no_grad():
        own = torch.cat([*statistics, statistics[0].new_ones(1)]) * num_rows
        total = autograd.all_reduce(own, "sum", world.current("InstanceNorm").mesh.tp_zero)
        return (total[:-1] / total[-1]).chunk(2)


def _normalised(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`x` normalised, and the mean and unbiased variance of all ranks' rows, each (channels,)."""
    dims = [dim for dim in range(x.dim()) if dim != 1]
    shape = [-1 if dim == 1 else 1 for dim in range(x.dim())]
    wide = x if x.dtype == torch.float64 else x.float()
    own = torch.cat([wide.sum(dims), wide.new_full((1,), x.numel() // x.shape[1])])
    ranks = world.current("BatchNorm").mesh.tp_zero  # tensor ranks have the same rows
    total = autograd.all_reduce(own, "sum", ranks)
    count = total[-1].detach()
    mean = total[:-1] / count
    centred = wide - mean.view(shape)
    squares = autograd.all_reduce(centred.square().sum(dims), "sum", ranks)
    out = centred * (squares / count + eps).rsqrt().view(shape)
    if weight is not None:
        out = out * weight.view(shape)
    if bias is not None:
        out = out + bias.view(shape)
    return out.to(x.dtype), mean.detach(), squares.detach() / (count - 1)


def _move(
    running: torch.Tensor | None, new: torch.Tensor, factor: Any, is_good: torch.Tensor
) -> None:
    """Move a running statistic, unless the new ones are not finite: the step will be skipped."""
    if running is None:
        return
    moved = running.lerp(new.to(running.dtype), factor)
    running.copy_(torch.where(is_good, moved, running))
