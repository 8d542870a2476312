"""Full tensors in the place of a module's slices while something computes with them."""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from bmtrain.block.adopt import Place, places_of
from bmtrain.errors import ParameterError
from bmtrain.shard.parameter import DistributedParameter
from bmtrain.shard.unshard import Use
from bmtrain.torch_internals import no_torch_function, renew_weights, version_of

_NATIVE_DATA: Any = torch.Tensor.data  # torch's descriptor
# runs of a module whose parameters are compared with what they were, which reads all of them twice
_NUM_LOOKS = 2
_WHOLE_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Row(NamedTuple):
    """A place and the distributed parameter that rests there."""

    place: Place
    param: DistributedParameter


class ParameterTable(tuple[Row, ...]):
    """All parameters of some modules by place, and what follows from them for as long as the
    modules stay as they are.

    Attributes:
        modules: with their paths.
        storages: where the parameters live, in order of first appearance.
        positions: of each parameter among the slots of all storages.
        are_copies: whether gathered tensors are; on one rank they are the parameters themselves.
    """

    def __new__(cls, modules: Sequence[tuple[str, torch.nn.Module]]) -> ParameterTable:
        return super().__new__(cls, [Row(place, _sharded(place)) for place in places_of(modules)])

    def __init__(self, modules: Sequence[tuple[str, torch.nn.Module]]) -> None:
        self.modules = modules
        self.params = [param for _, param in self]
        self.homes = [(place.module._parameters, place.name) for place, _ in self]
        self.storages = list(dict.fromkeys([param.storage_of for param in self.params]))
        starts = dict(
            zip(
                self.storages,
                itertools.accumulate([len(s.layout.slots) for s in self.storages], initial=0),
                strict=False,
            )
        )
        self.positions = [
            starts[param.storage_of] + param.index_in_storage for param in self.params
        ]
        self.are_copies = any(storage.axis.size > 1 for storage in self.storages)
        self.rnns = [module for _, module in modules if isinstance(module, torch.nn.RNNBase)]
        self._dicts: list[dict[str, Any]] = [
            found for _, m in modules for found in (m._modules, m._parameters)
        ]
        self._lengths = [len(found) for found in self._dicts]
        self._values = [value for found in self._dicts for value in found.values()]
        self._num_registered = self._count_storages()

    def are_current(self) -> bool:
        """Whether the modules have the children and the parameters that they had, and these live
        where they lived.
        """
        return (
            self._num_registered == self._count_storages()
            and list(map(len, self._dicts)) == self._lengths
            and all(
                map(
                    operator.is_,
                    itertools.chain.from_iterable(map(dict.values, self._dicts)),
                    self._values,
                )
            )
        )

    def _count_storages(self) -> int:
        return self.storages[0].engine.num_registered if self.storages else 0


class Bound(torch.Tensor):
    """A tensor in the place of a parameter, as the code of a module sees it: isinstance(x,
    torch.nn.Parameter) is true of it.
    """

    __torch_function__: Any = no_torch_function
    _is_param = True  # asked by torch.nn.Parameter

    def __reduce_ex__(self, protocol: Any) -> Any:
        """In a file it is an ordinary tensor."""
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)


class BoundCopy(Bound):
    """A gathered copy. Torch counts what is written into its `.data`: nobody would learn of a write
    into an ordinary tensor's.
    """

    @property
    def data(self) -> torch.Tensor:
        """The values, without a graph."""
        return self.detach()

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        _NATIVE_DATA.__set__(self, values)


class Binding:
    """The parameters of a module and the plain modules below it, which may come and go between
    calls.

    While a call runs, and while backward passes through one, full tensors stand where the slices
    rest.

    Args:
        modules: called for the modules with their paths, first the one at the top.
    """

    def __init__(self, modules: Callable[[], Sequence[tuple[str, torch.nn.Module]]]) -> None:
        self._modules = modules
        self._resting: ParameterTable | None = None
        self._replaced: ParameterTable | None = None  # what rests where full tensors stand now
        # those that stand there between calls, during backward
        self._lent: list[torch.Tensor] | None = None
        self._num_runs = 0
        self.is_running = False

    def __getstate__(self) -> dict[str, Any]:
        """What a copy gets: it finds its own table."""
        return {**self.__dict__, "_resting": None}

    def table(self) -> ParameterTable:
        """All parameters by place, whatever stands there now.

        Raises:
            ParameterError: for a parameter that is not sharded.
        """
        if self._replaced is not None:
            return self._replaced
        if self._resting is None or not self._resting.are_current():
            self._resting = ParameterTable(self._modules())
        return self._resting

    @contextlib.contextmanager
    def running(
        self, table: ParameterTable, use: Use, views: Sequence[torch.Tensor], *, is_compiled: bool
    ) -> Iterator[None]:
        """The module computes inside, on `views` of `use` in place of `slices`, by its own code or
        `is_compiled`.

        Raises:
            ParameterError: when it has given a parameter a new value.
        """
        outer, lent = self.is_running, self._lent
        standing = [home[name] for home, name in table.homes]
        bound = use.select(views, table.storages, table.positions)
        addresses, versions = [view.data_ptr() for view in bound], list(map(version_of, bound))
        if not is_compiled:
            kind = BoundCopy if table.are_copies else Bound
            for view in bound:
                view.__class__ = kind
        sums = _sums(bound) if self._is_looking(table, bound) else None
        self._replaced, self.is_running = table, True
        self._put(table, bound)
        try:
            yield
            for (home, name), view, address, (place, _) in zip(
                table.homes, bound, addresses, table, strict=True
            ):
                if home.get(name) is not view or view.data_ptr() != address:
                    raise _lost_value(place.path)
            self._refuse_written(table, bound, versions, sums)
        # autograd says that a view was changed, where it is used next
        except RuntimeError as error:
            self._refuse_written(table, bound, versions, None, error)
            raise
        finally:
            self.is_running = outer
            if outer or (lent is not None and lent is self._lent):
                self._put(table, standing)
            else:
                self._put_to_rest(table)

    def _refuse_written(
        self,
        table: ParameterTable,
        bound: Sequence[torch.Tensor],
        versions: Sequence[int],
        sums: Sequence[torch.Tensor] | None,
        cause: Exception | None = None,
    ) -> None:
        """ParameterError if the module has written into a gathered parameter.

        What goes around torch (numpy) has no version.
        """
        now = list(map(version_of, bound))
        if sums is None and now == versions:
            return
        changed = [version != before for version, before in zip(now, versions, strict=True)]
        if sums is not None and not any(changed):
            changed = [
                not torch.equal(after, before)
                for after, before in zip(_sums(bound), sums, strict=True)
            ]
        for (place, _), is_changed in zip(table, changed, strict=True):
            if is_changed:
                raise _lost_value(place.path) from cause

    def _is_looking(self, table: ParameterTable, bound: Sequence[torch.Tensor]) -> bool:
        """Whether this run is one whose parameters are looked at: it takes time, and a GPU is
        waited for.
        """
        self._num_runs += 1
        if not table.are_copies or self._num_runs > _NUM_LOOKS:
            return False
        return not (bound[0].is_cuda and torch.cuda.is_current_stream_capturing())

    def lend(
        self, table: ParameterTable, use: Use, tensors: Sequence[torch.Tensor]
    ) -> Callable[[], None]:
        """Modules find `tensors` of `use` between calls too, until the function that this returns
        is called.
        """
        lent = use.select(tensors, table.storages, table.positions)
        self._replaced, self._lent = table, lent
        self._put(table, lent)

        def give_back() -> None:
            if self._lent is lent:  # no later call of the module has lent its own
                self._lent = None
                if not self.is_running:
                    self._put_to_rest(table)

        return give_back

    def _put(self, table: ParameterTable, values: Sequence[torch.Tensor | None]) -> None:
        for (home, name), value in zip(table.homes, values, strict=True):
            home[name] = value  # type: ignore[assignment]
        # torch's recurrent modules read their weights from a list of their own
        for rnn in table.rnns:
            renew_weights(rnn)

    def _put_to_rest(self, table: ParameterTable) -> None:
        self._put(table, table.params)
        self._replaced = None


def _sharded(place: Place) -> DistributedParameter:
    param = place.value
    if isinstance(param, DistributedParameter):
        return param
    if not isinstance(param, torch.nn.Parameter):
        raise ParameterError(
            f"a tensor was put in the place of parameter {place.path!r} of a block, as "
            "torch.func.functional_call does: a block "
            "computes with its own parameters only. Leave such modules out of blocks: "
            "their parameters, sharded by "
            "BMTrainModelWrapper, can be replaced by whole tensors."
        )
    raise ParameterError(
        f"parameter {place.path!r} of a block is not sharded: it was put in after the "
        "block was made. Call "
        "model = bmtrain.BMTrainModelWrapper(model) again, then give the new "
        "parameters to an optimizer."
    )


def _sums(views: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Of the bits of each row, alike on all ranks: they tell whether a view was written, whoever
    owns the slice.
    """
    return [view.detach().view(_WHOLE_NUMBERS[view.itemsize]).sum(-1) for view in views]


def _lost_value(path: str) -> ParameterError:
    return ParameterError(
        f"the forward pass gave parameter {path!r} a new value, which would be lost: "
        "inside it the parameter is a gathered copy. "
        "Change parameters between passes; what changes in a pass is a buffer."
    )
