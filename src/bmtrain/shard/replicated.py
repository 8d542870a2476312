"""Ordinary parameters, which every rank has whole: their gradients are summed over ranks at the end of a backward pass."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from bmtrain.distributed import collectives
from bmtrain.errors import ParameterError
from bmtrain.runtime.mesh import Axis
from bmtrain.shard.tape import Taping


class Replicated:
    """The ordinary parameters that optimizers of this run train.

    Args:
        world: the axis of all ranks.
        taping: lets the ranks agree which gradients there are.
        join: called when a gradient arrives: the backward pass must call `reduce` at its end.
    """

    def __init__(self, world: Axis, taping: Taping, join: Callable[[], None]) -> None:
        self._world, self._taping, self._join = world, taping, join
        self._params: list[weakref.ref[torch.nn.Parameter]] = []
        self._incoming: dict[int, torch.Tensor] = {}
        self._retired: dict[int, weakref.ref[torch.nn.Parameter]] = {}
        self._places: list[torch.Tensor] = []  # of gradients that graphs write, one per parameter

    def __iter__(self) -> Iterator[torch.nn.Parameter]:
        return (param for reference in self._params if (param := reference()) is not None)

    def __contains__(self, param: object) -> bool:
        return any(known is param for known in self)

    knows = __contains__

    def retire(self, param: torch.nn.Parameter) -> None:
        """`param` has been replaced by a sharded parameter: whoever trains it from now on trains nothing."""
        key = id(param)
        self._retired[key] = weakref.ref(param, lambda _: self._retired.pop(key, None) and None)

    def add(self, params: Iterable[torch.nn.Parameter]) -> None:
        """Sum the gradients of these too from now on, and start all ranks from rank 0's values."""
        known = {id(param) for param in self}
        for param in params:
            if id(param) in known:
                continue
            if id(param) in self._retired:
                raise ParameterError(
                    f"an optimizer has a parameter of shape {tuple(param.shape)} that was replaced when its model was sharded: "
                    "make the optimizer after bmtrain.BMTrainModelWrapper or Block."
                )
            known.add(id(param))
            self._params.append(weakref.ref(param))
            if self._world.size > 1:
                collectives.broadcast_(param.data, 0, self._world)
                trainable = param.requires_grad
                param.requires_grad_(True)  # a frozen parameter takes no hook, and may be trained later
                param.register_hook(self._collector(weakref.ref(param)))
                param.requires_grad_(trainable)

    def reduce(self) -> None:
        """Add the sums over ranks of what has arrived to `.grad`."""
        params = [reference() for reference in self._params]
        touched = self._taping.any_rank([param is not None and id(param) in self._incoming for param in params], self._world)
        for param, used in zip(params, touched, strict=True):
            if param is None or not used:
                continue
            incoming = self._incoming.get(id(param))
            total = torch.zeros_like(param) if incoming is None else incoming.contiguous()
            total = collectives.all_reduce(total, "sum", self._world)
            param.grad = total if param.grad is None else param.grad.add_(total)
        self._incoming.clear()

    def discard(self) -> None:
        """Forget what a pass that failed has left."""
        self._incoming.clear()

    def settle(self) -> tuple[bool, ...]:
        """Between passes: each `.grad` moves to a place of its own that stays the same; which parameters have one."""
        for reference in self._params[len(self._places) :]:
            param = reference()
            self._places.append(torch.empty(0, device="cpu") if param is None else torch.zeros_like(param, requires_grad=False))
        self.fix()
        return tuple(param.grad is not None for param in self)

    def trainable(self) -> tuple[bool, ...]:
        """Which parameters are trained."""
        return tuple(param.requires_grad for param in self)

    def hide(self, given: Sequence[bool]) -> None:
        """Take back what has been shown since `settle` returned `given`: no gradient was computed after all."""
        for param, had in zip(self, given, strict=True):
            if not had:
                param.grad = None

    def fix(self) -> None:
        """After a pass: gradients that autograd has put elsewhere move to the places that `settle` made."""
        for reference, place in zip(self._params, self._places, strict=False):
            param = reference()
            if param is not None and param.grad is not None and param.grad is not place:
                place.copy_(param.grad)
                param.grad = place

    def show(self) -> None:
        """Make every gradient that a replay has written visible again: those that are visible now, whenever it is called."""
        shown = [(param, param.grad) for param in self if param.grad is not None]
        self._taping.now_and_after_replays(lambda: _show(shown))

    def _collector(self, reference: weakref.ref[torch.nn.Parameter]) -> Callable[[torch.Tensor | None], torch.Tensor | None]:
        def collect(grad: torch.Tensor | None) -> torch.Tensor | None:
            if grad is None:  # the node was passed, but nothing on this rank used the parameter
                return None
            # Autograd adds zeros to `.grad`; the sum over ranks is added at the end of the pass, the same on every rank.
            self._join()
            key = id(reference())
            self._incoming[key] = self._incoming[key] + grad if key in self._incoming else grad
            return torch.zeros_like(grad)

        return collect


def _show(grads: Iterable[tuple[torch.nn.Parameter, torch.Tensor]]) -> None:
    for param, grad in grads:
        param.grad = grad
