"""Full tensors in the place of a module's slices while something computes with them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from bmtrain.block.adopt import Place, places_of
from bmtrain.errors import ParameterError
from bmtrain.shard.parameter import DistributedParameter
from bmtrain.shard.storage import Storage
from bmtrain.shard.unshard import Use


class Slice(NamedTuple):
    """A place and the distributed parameter that rests there."""

    place: Place
    param: DistributedParameter


class Binding:
    """The parameters of a module and the plain modules below it, which may come and go between calls.

    While a call runs, and while backward passes through one, full tensors stand where the slices rest.

    Args:
        modules: called for the modules with their paths, first the one at the top.
    """

    def __init__(self, modules: Callable[[], Sequence[tuple[str, torch.nn.Module]]]) -> None:
        self._modules = modules
        self._rnns: list[torch.nn.RNNBase] = []
        self._replaced: list[Slice] | None = None  # what rests where full tensors stand now
        self._lent: list[torch.Tensor] | None = None  # those that stand there between calls, during backward
        self.is_running = False

    def slices(self) -> list[Slice]:
        """All parameters by place, whatever stands there now.

        Raises:
            ParameterError: for a parameter that is not sharded.
        """
        if self._replaced is not None:
            return self._replaced
        modules = self._modules()
        self._rnns = [module for _, module in modules if isinstance(module, torch.nn.RNNBase)]
        return [Slice(place, _sharded(place)) for place in places_of(modules)]

    @contextlib.contextmanager
    def running(self, slices: list[Slice], use: Use, views: Sequence[torch.Tensor]) -> Iterator[None]:
        """The module computes inside, on `views` of `use` in place of `slices`.

        Raises:
            ParameterError: when it has given a parameter a new value.
        """
        outer, lent = self.is_running, self._lent
        standing = [place.module._parameters[place.name] for place, _ in slices]
        bound = [views[use.position(param.storage_of, param.index_in_storage)] for _, param in slices]
        addresses = [view.data_ptr() for view in bound]
        self._replaced, self.is_running = slices, True
        self._put(slices, bound)
        try:
            yield
            for (place, _), view, address in zip(slices, bound, addresses, strict=True):
                if place.module._parameters.get(place.name) is not view or view.data_ptr() != address:
                    raise _lost_value(place.path)
        finally:
            self.is_running = outer
            if outer or (lent is not None and lent is self._lent):
                self._put(slices, standing)
            else:
                self._put_to_rest(slices)

    def lend(self, slices: list[Slice], use: Use, tensors: Sequence[torch.Tensor]) -> Callable[[], None]:
        """Modules find `tensors` of `use` between calls too, until the function that this returns is called."""
        lent = [tensors[use.position(param.storage_of, param.index_in_storage)] for _, param in slices]
        self._replaced, self._lent = slices, lent
        self._put(slices, lent)

        def give_back() -> None:
            if self._lent is lent:  # no later call of the module has lent its own
                self._lent = None
                if not self.is_running:
                    self._put_to_rest(slices)

        return give_back

    def _put(self, slices: Sequence[Slice], values: Sequence[torch.Tensor | None]) -> None:
        for (place, _), value in zip(slices, values, strict=True):
            place.module._parameters[place.name] = value  # type: ignore[assignment]
        for rnn in self._rnns:  # torch's recurrent modules read their weights from a list of their own
            rnn._flat_weights = [rnn._parameters[name] for name in rnn._flat_weights_names]

    def _put_to_rest(self, slices: Sequence[Slice]) -> None:
        self._put(slices, [param for _, param in slices])
        self._replaced = None


def storages_of(slices: Sequence[Slice]) -> list[Storage]:
    """Where the slices live, in order of first appearance."""
    return list(dict.fromkeys([param.storage_of for _, param in slices]))


def _sharded(place: Place) -> DistributedParameter:
    param = place.value
    if isinstance(param, DistributedParameter):
        return param
    raise ParameterError(
        f"parameter {place.path!r} of a block is not sharded: it was put in after the block was made. Call "
        "model = bmtrain.BMTrainModelWrapper(model) again, then give the new parameters to an optimizer."
    )


def _lost_value(path: str) -> ParameterError:
    return ParameterError(
        f"the forward pass gave parameter {path!r} a new value, which would be lost: inside it the parameter is a gathered copy. "
        "Change parameters between passes; what changes in a pass is a buffer."
    )
