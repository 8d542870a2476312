"""Ordinary parameters, whole on every rank: backward ends with a sum of their gradients."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from bmtrain.distributed import collectives
from bmtrain.distributed.ledger import Ledger
from bmtrain.errors import ParameterError, RanksDivergedError
from bmtrain.runtime.mesh import Axis
from bmtrain.shard.gradient import Backward, any_rank

_PARTED = (
    "an ordinary parameter of shape {} had a gradient before this backward pass on some ranks, and "
    "none on others, so that their sums would differ: clear gradients on all ranks (zero_grad) or "
    "on none."
)


class Replicated:
    """The ordinary parameters that optimizers of this run train.

    Args:
        world: the axis of all ranks.
        ledger: lets the ranks agree on which gradients exist.
        backward: joined when a gradient arrives.
    """

    def __init__(self, world: Axis, ledger: Ledger, backward: Backward) -> None:
        self._world, self._ledger, self._backward = world, ledger, backward
        self._params: list[weakref.ref[torch.nn.Parameter]] = []
        self._incoming: dict[int, torch.Tensor] = {}
        self._had: dict[int, bool] = {}  # whether those had a gradient before the pass
        # Sharded parameters by the id of what they have replaced, with a reference to that: ties
        # survive where modules are sharded one after another. Both weak, to extend no lifetime.
        self._retired: dict[int, tuple[weakref.ref[Any], weakref.ref[Any]]] = {}

    def __iter__(self) -> Iterator[torch.nn.Parameter]:
        return (param for reference in self._params if (param := reference()) is not None)

    def __contains__(self, param: object) -> bool:
        return any(known is param for known in self)

    def retire(self, param: torch.nn.Parameter, successor: torch.nn.Parameter) -> None:
        """A sharded parameter has replaced `param`: an optimizer of that would train nothing."""
        key = id(param)
        # Python reuses ids: without the callback, a new parameter could be taken for this one.
        old = weakref.ref(param, lambda _: self._retired.pop(key, None) and None)
        self._retired[key] = old, weakref.ref(successor)

    def successor(self, param: torch.nn.Parameter) -> Any:
        """The sharded parameter that has replaced `param`, or None."""
        _, reference = self._retired.get(id(param), (None, None))
        return None if reference is None else reference()

    def refuse_retired(self, params: Iterable[torch.Tensor]) -> None:
        """ParameterError if an optimizer trains `params` that sharded parameters have replaced."""
        for param in params if self._retired else ():
            if id(param) in self._retired:
                raise ParameterError(
                    f"an optimizer has a parameter of shape {tuple(param.shape)} that "
                    "was replaced when its model was sharded: "
                    "make the optimizer after bmtrain.BMTrainModelWrapper or Block."
                )

    def add(self, params: Iterable[torch.nn.Parameter]) -> None:
        """Sum the gradients of these from now on; all ranks start from rank 0's values.

        Collective.
        """
        self._backward.replicated = self
        known = {id(param) for param in self}
        new = {id(param): param for param in params if id(param) not in known}.values()
        self.refuse_retired(new)
        if new:
            # Those that all ranks have dropped: each rank's collector takes them at its own time.
            alive = any_rank(self._ledger, [x() is not None for x in self._params], self._world)
            self._params = [*itertools.compress(self._params, alive)]
        for param in new:
            self._params.append(weakref.ref(param))
            if self._world.size > 1:
                collectives.broadcast_(param.data, 0, self._world)
                trainable = param.requires_grad
                # torch puts no hook on a frozen parameter, but this one may be trained later
                param.requires_grad_(True)
                # Weak: the hook is the parameter's, and would keep it alive in a cycle.
                param.register_hook(self._collector(weakref.ref(param)))
                param.requires_grad_(trainable)

    def reduce(self) -> None:
        """Add the sums over ranks of what has arrived to `.grad`. Collective.

        Raises:
            ParameterError: if a parameter has hooks of the program, which have seen this rank's
                gradient only.
            RanksDivergedError: if a parameter had a gradient before on some ranks only.
        """
        params = [reference() for reference in self._params]
        try:
            for param in params if self._world.size > 1 else ():
                _refuse_hooks(param)
        except ParameterError:
            self.discard()  # else the next pass would add the gradients of this one
            raise
        incoming = [None if param is None else self._incoming.get(id(param)) for param in params]
        # whether it had one before this pass, which has put zeros where none was
        had = [x if x is None else self._had.get(id(x), x.grad is not None) for x in params]
        kinds = [
            (
                grad is not None and not grad.is_sparse,
                grad is not None and grad.is_sparse,
                before is True,
                before is False,
            )
            for grad, before in zip(incoming, had, strict=True)
        ]
        # A rank whose rows did not use a parameter has no gradient, but must take part in its sum:
        # the others would hang.
        flags = iter(any_rank(self._ledger, [flag for kind in kinds for flag in kind], self._world))
        agreed = list(zip(params, incoming, zip(*[flags] * 4, strict=True), strict=True))
        for param, _, (*_, some_had, some_had_none) in agreed:
            if param is not None and some_had and some_had_none:
                self.discard()
                raise RanksDivergedError(_PARTED.format(tuple(param.shape)))
        for param, grad, (is_dense, is_sparse, *_) in agreed:
            if param is None or not (is_dense or is_sparse):
                continue
            total = self._total(
                torch.zeros_like(param, requires_grad=False) if grad is None else grad,
                keeps_rows=not is_dense,
            )
            param.grad = total if param.grad is None else _plus_(param.grad, total)
        self.discard()

    def _total(self, grad: torch.Tensor, *, keeps_rows: bool) -> torch.Tensor:
        """The sum over ranks; with `keeps_rows` sparse, with the rows that any rank has."""
        total = collectives.all_reduce(
            grad.to_dense().contiguous() if grad.is_sparse else grad.contiguous(),
            "sum",
            self._world,
        )
        if not keeps_rows:
            return total
        has_row = torch.zeros(len(total), dtype=torch.uint8, device=total.device)
        if grad.is_sparse:
            has_row[grad.coalesce().indices()[0]] = 1
        rows = collectives.all_reduce(has_row, "max", self._world).nonzero().view(1, -1)
        return torch.sparse_coo_tensor(
            rows, total[rows[0]], total.shape, is_coalesced=True, check_invariants=False
        )

    def discard(self) -> None:
        """Drop what a pass has left."""
        self._incoming.clear()
        self._had.clear()

    def _collector(
        self, reference: weakref.ref[torch.nn.Parameter]
    ) -> Callable[[torch.Tensor | None], torch.Tensor | None]:
        def collect(grad: torch.Tensor | None) -> torch.Tensor | None:
            param = reference()
            # reached, but this rank's loss does not depend on it; or frozen since the forward pass
            if grad is None or (param is not None and not param.requires_grad):
                return None
            self._backward.join()
            # Autograd adds zeros to `.grad`; the sum over ranks is added at the end of the pass,
            # the same on every rank.
            key = id(param)
            self._had.setdefault(key, param is not None and param.grad is not None)
            before = self._incoming.get(key)
            self._incoming[key] = grad if before is None else _plus_(before.clone(), grad)
            return torch.zeros_like(grad)

        return collect


def _plus_(grad: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
    """`grad + more`, in place unless a sparse gradient becomes dense."""
    return more + grad if grad.is_sparse else grad.add_(more)


def _refuse_hooks(param: torch.nn.Parameter | None) -> None:
    """ParameterError for a hook of the program.

    The first hook is `_collector`'s.
    """
    hooks = getattr(param, "_backward_hooks", None) or ()
    post_hooks = getattr(param, "_post_accumulate_grad_hooks", None) or ()
    if param is not None and (len(hooks) > 1 or post_hooks):
        raise ParameterError(
            f"a parameter of shape {tuple(param.shape)} outside of blocks has a hook: it sees "
            "only this rank's gradient, before the sum over ranks. Wrap the model "
            "(bmtrain.BMTrainModelWrapper), whose parameters' hooks get the sum, or change "
            "`.grad` after backward."
        )
