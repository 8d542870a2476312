"""Optimizer steps, of torch's optimizers too: the same on all ranks, with summed gradients."""

from __future__ import annotations

import dataclasses
import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from bmtrain.distributed.agreement import Comparison, differ
from bmtrain.distributed.ledger import Ledger
from bmtrain.errors import ParameterError
from bmtrain.runtime import world
from bmtrain.runtime.mesh import Axis
from bmtrain.shard.gradient import Backward
from bmtrain.shard.replicated import Replicated
from bmtrain.shard.slices import Slices
from bmtrain.torch_internals import plain_functions

_NUM_AWAITED = 2  # steps in which the host waits for the values of ordinary parameters


class Steps:
    """Watches the steps of all optimizers of this process for as long as it is alive.

    Args:
        ledger: gets a note of each step: ranks that do not all take one have different parameters
            from then on.
        axis: of all ranks.
        replicated: the ordinary parameters whose gradients are summed over ranks.
        backward: the running backward pass.
        residences: of all storages.

    Attributes:
        has_sharded: whether anything has been sharded in this run; ordinary parameters are not
            checked before. It stays true when models are dropped: each rank's collector takes them
            at a time of its own, and the check is collective.
        waits: called once, before the next step of any optimizer.
    """

    def __init__(
        self,
        ledger: Ledger,
        axis: Axis,
        replicated: Replicated,
        backward: Backward,
        residences: Iterable[Any],
    ) -> None:
        self._ledger, self._axis, self._replicated = ledger, axis, replicated
        self._backward, self._residences = backward, residences
        self.has_sharded = False
        self._ordinary: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Ordinary] = (
            weakref.WeakKeyDictionary()
        )
        self.waits: list[Callable[[], None]] = []
        own = weakref.ref(self)  # torch keeps the hook: it must not keep the run alive

        def begin(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            steps = own()
            if steps is not None and world.is_initialized() and world.current().mesh.world is axis:
                steps.begin(optimizer, {**dict(enumerate(args)), **kwargs})

        weakref.finalize(self, register_optimizer_step_pre_hook(begin).remove)

    def begin(self, optimizer: torch.optim.Optimizer, given: Mapping[Any, Any]) -> None:
        """A step is about to be taken.

        Args:
            optimizer: the one that takes it.
            given: the arguments of `step`, a loss scale for example.

        Raises:
            ParameterError: if the program has written into a view of gathered memory; or if the
                optimizer has, beside sharded parameters, ordinary ones whose gradients are not
                summed over ranks; ordinary ones that ranks have given other values; or parameters
                that were replaced when their model was sharded, which it would train in vain.
        """
        # After a backward pass that has raised: without this, the optimizer could read sums that
        # the reduce stream still writes.
        self._backward.abandon_if_dead()
        for residence in self._residences:
            residence.refuse_written()
        params = [param for group in optimizer.param_groups for param in group["params"]]
        self._replicated.refuse_retired(params)
        world.current().watchdog.step()
        waits, self.waits = self.waits, []
        for wait in waits:
            wait()
        if self._axis.size == 1:
            return
        known = {id(param) for param in self._replicated}
        # Plain tensors: not sharded here, nor by another library (FSDP2's DTensor).
        native = torch.Tensor.__torch_dispatch__
        ordinary = [x for x in params if type(x).__torch_dispatch__ is native]
        alone = [x for x in ordinary if x.requires_grad and id(x) not in known]
        if any(isinstance(param, Slices) for param in params):
            if isinstance(optimizer, torch.optim.SparseAdam):
                raise ParameterError(
                    "SparseAdam cannot train sharded parameters, whose gradients are dense: use "
                    "another optimizer (SGD and Adagrad treat dense and sparse gradients alike), "
                    "or do not shard the embedding."
                )
            what = _described(optimizer, params, given)
            self._ledger.enter(self._axis, what, compares=self._ledger.is_immediate)
            if alone:
                raise _not_summed(
                    optimizer, alone[0], "its gradient is that of this rank's rows alone"
                )
        if not (ordinary and self.has_sharded):
            return
        state = self._ordinary.setdefault(optimizer, _Ordinary())
        state.num_steps += 1
        if alone:
            self._compare_gradients(optimizer, alone, given)
        self._compare_values(optimizer, state, ordinary)

    def _compare_values(
        self, optimizer: torch.optim.Optimizer, state: _Ordinary, params: Sequence[torch.Tensor]
    ) -> None:
        """Check that ordinary parameters are the same on all ranks.

        On a GPU the host does not wait for them: after the first two steps, in which initial values
        are seen, it learns in the next step what they were.
        """
        awaited, state.awaited = state.awaited, None  # a program that mends them can go on
        if awaited is not None:
            self._judge(optimizer, *awaited)
        comparison = Comparison(params, self._axis, "parameters")
        shapes = [tuple(param.shape) for param in params]
        if self._ledger.is_immediate or state.num_steps <= _NUM_AWAITED:
            self._judge(optimizer, comparison, shapes)
        else:
            state.awaited = comparison, shapes

    def _judge(
        self,
        optimizer: torch.optim.Optimizer,
        comparison: Comparison,
        shapes: Sequence[tuple[int, ...]],
    ) -> None:
        self._ledger.note(self._axis, f"values of {len(shapes)} ordinary parameters")
        for shape, is_other in zip(shapes, comparison.differing(), strict=True):
            if is_other:
                raise ParameterError(
                    f"{type(optimizer).__name__} has an ordinary parameter of shape {shape} whose "
                    "values differ between ranks: what writes into it must write the same on all "
                    "ranks. Broadcast it from one (bmtrain.distributed.broadcast(param.data, 0)) "
                    "before the step."
                )

    def _compare_gradients(
        self,
        optimizer: torch.optim.Optimizer,
        params: Sequence[torch.Tensor],
        given: Mapping[Any, Any],
    ) -> None:
        """Check that ordinary parameters have the same gradients and settings on all ranks.

        They do where DistributedDataParallel has summed the gradients, and where a second model is
        trained on the same rows everywhere. The host waits for them.
        """
        self._ledger.note(self._axis, _described(optimizer, params, given))
        having = [param for param in params if param.grad is not None]
        if not having:
            return
        grads = [param.grad for param in having if param.grad is not None]
        for param, is_other in zip(having, differ(grads, self._axis, "gradients"), strict=True):
            if is_other:
                raise _not_summed(
                    optimizer,
                    param,
                    "its gradient differs between ranks, and there are sharded parameters beside",
                )


@dataclasses.dataclass
class _Ordinary:
    """The ordinary parameters of an optimizer.

    Attributes:
        num_steps: steps so far.
        awaited: the comparison of their values that was begun in the last step, and their shapes.
    """

    num_steps: int = 0
    awaited: tuple[Comparison, list[tuple[int, ...]]] | None = None


def _described(
    optimizer: torch.optim.Optimizer, params: Sequence[torch.Tensor], given: Mapping[Any, Any]
) -> str:
    """What must be the same on all ranks: each updates its slices by its own settings."""
    groups = [_known(group) for group in optimizer.param_groups]
    settings = [[*group.items()] for group in groups]
    settings += [[(name, x)] for name, x in given.items() if isinstance(x, int | float)]
    rates = dict.fromkeys(
        group["lr"] for group in groups if isinstance(group.get("lr"), float | int)
    )
    with plain_functions():
        trained = [x.requires_grad for x in params]
    # the stages of a pipeline have gradients of their own
    has_grad = [
        x.shown_grad is not None
        for x in params
        if isinstance(x, Slices) and x.cut.placement.stage is None
    ]
    digest = zlib.crc32(bytes([*trained, *has_grad]), zlib.crc32(repr(settings).encode()))
    return (
        f"a step of {type(optimizer).__name__} (lr "
        f"{', '.join(map(str, [*rates][:4]))}; {sum(has_grad)} gradients, {sum(trained)} "
        "of "
        f"{len(params)} parameters trained; all settings {digest:08x})"
    )


_PLAIN = (bool, int, float, str, tuple, type(None))


def _known(values: Mapping[Any, Any]) -> dict[Any, Any]:
    """Those that the host knows: numbers, also as tensors of the CPU, texts and tuples."""
    found: dict[Any, Any] = {}
    for name, value in values.items():
        if isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.dim() == 0:
            found[name] = value.item()
        elif isinstance(value, _PLAIN):
            found[name] = value
    return found


def _not_summed(optimizer: torch.optim.Optimizer, param: torch.Tensor, why: str) -> ParameterError:
    return ParameterError(
        f"{type(optimizer).__name__} has an ordinary parameter of shape "
        f"{tuple(param.shape)}; {why}. Give the optimizer to an "
        "OptimManager (add_optimizer) before the first backward pass: it sums such "
        "gradients over ranks. Or wrap the whole model "
        "(bmtrain.BMTrainModelWrapper)."
    )
