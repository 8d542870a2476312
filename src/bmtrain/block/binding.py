"""Swaps gathered full tensors in for a module's sharded parameters while code computes."""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from bmtrain.block.adopt import Place, places_of
from bmtrain.errors import ParameterError
from bmtrain.shard.parameter import DistributedParameter
from bmtrain.shard.slices import Slices
from bmtrain.shard.window import as_copy
from bmtrain.torch_internals import no_torch_function, renew_weights, versions_of

_NATIVE_DATA: Any = torch.Tensor.data  # torch's descriptor
# The first runs of a module, in which checksums of its parameters detect writes around torch. Each
# check reads all parameters twice.
_NUM_LOOKS = 2
_MOST_SUMMED = 2**22  # numbers at a time
_WHOLE_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Row(NamedTuple):
    """A place and the distributed parameter that is stored there between calls."""

    place: Place
    param: DistributedParameter


class ParameterTable(tuple[Row, ...]):
    """All parameters of some modules by place, and facts derived from them.

    Valid until the modules change: see `are_current`.

    Attributes:
        modules: with their paths.
        storages: the storages of the parameters, in order of first appearance.
        positions: index of each parameter among the slots of all storages.
        are_copies: whether gathered tensors are copies; on one rank they alias the parameters.
        is_replaced: whether ordinary tensors stand in all places, as in
            `torch.func.functional_call`: there is nothing to gather.
    """

    def __new__(cls, modules: Sequence[tuple[str, torch.nn.Module]]) -> ParameterTable:
        places = list(places_of(modules))
        values = [place.value for place in places if not isinstance(place.value, Bound)]
        if not any(isinstance(value, torch.nn.Parameter | Slices) for value in values):
            return super().__new__(cls)
        return super().__new__(cls, [Row(place, _sharded(place)) for place in places])

    def __init__(self, modules: Sequence[tuple[str, torch.nn.Module]]) -> None:
        self.modules = modules
        self.is_replaced = not self and any(True for _ in places_of(modules))
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
        # Storages are registered once: another number may mean other ones.
        self._engine = self.storages[0].engine if self.storages else None
        self._num_registered = self._engine.num_registered if self._engine else 0

    def are_current(self) -> bool:
        """Whether the modules still have the same children and parameters, by the same names, in
        the same storages.
        """
        return (
            (self._engine is None or self._engine.num_registered == self._num_registered)
            and list(map(len, self._dicts)) == self._lengths
            and all(
                map(
                    operator.is_,
                    itertools.chain.from_iterable(map(dict.values, self._dicts)),
                    self._values,
                )
            )
            and all(map(operator.is_, itertools.starmap(dict.get, self.homes), self.params))
        )


class _Plain(torch.Tensor):
    """Computes, and pickles, as an ordinary tensor."""

    __torch_function__: Any = no_torch_function

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)


class Bound(_Plain):
    """A full tensor in the place of a parameter: isinstance(x, torch.nn.Parameter) is true."""

    _is_param = True  # read by isinstance(x, torch.nn.Parameter)

    def set_(self, *args: Any) -> Bound:
        """torch's, but that a tensor which becomes itself is not written: a parametrization does
        so with the parameter when it is registered.
        """
        if len(args) != 1 or args[0] is not self:
            super().set_(*args)
        return self


class _Copy(_Plain):
    """A gathered copy. numpy's view of it is read-only: no version counts its writes."""

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        """torch's, of which a write would be lost."""
        return as_copy(super().numpy(*args, **kwargs))

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).__deepcopy__(memo)


class BoundCopy(_Copy, Bound):
    """A gathered copy, which the next release discards.

    `.data` shares the version counter of the tensor. The native `.data` has a counter of its own,
    so a write through it would be lost in silence.
    """

    def detach(self) -> torch.Tensor:
        """torch's."""
        return super().detach().as_subclass(_Copy)

    @property
    def data(self) -> torch.Tensor:
        """The values, detached, with this tensor's version counter."""
        return self.detach()

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        _NATIVE_DATA.__set__(self, values)


class Binding:
    """Binds tensors to the parameters of a module and the plain modules below it.

    Between calls the modules hold their sharded parameters. During a call, and while backward
    passes through one, they hold full tensors. Modules may be added and removed between calls.

    Args:
        modules: returns the modules with their paths, the root first.
    """

    def __init__(self, modules: Callable[[], Sequence[tuple[str, torch.nn.Module]]]) -> None:
        self._modules = modules
        self._resting: ParameterTable | None = None
        self._bound_table: ParameterTable | None = None  # set while full tensors are bound
        # Full tensors that stay bound between calls, during backward. See `lend`.
        self._lent: list[torch.Tensor] | None = None
        self._num_runs = 0
        self.is_running = False

    def __getstate__(self) -> dict[str, Any]:
        """State for a copy, which must build its own table: this one is of other modules."""
        return {**self.__dict__, "_resting": None}

    def table(self) -> ParameterTable:
        """All parameters by place, whatever is bound there now.

        Raises:
            ParameterError: for a parameter that is not sharded.
        """
        if self._bound_table is not None:
            return self._bound_table
        if self._resting is None or not self._resting.are_current():
            self._resting = ParameterTable(self._modules())
        return self._resting

    @contextlib.contextmanager
    def running(
        self, table: ParameterTable, views: Sequence[torch.Tensor], *, is_compiled: bool
    ) -> Iterator[None]:
        """Bind full tensors to the modules while the body runs.

        Args:
            views: one for each slot of the table's storages, new ones.
            is_compiled: whether compiled code computes. It gets plain tensors, no `Bound`.

        Raises:
            ParameterError: if the body rebinds or writes a parameter.
        """
        outer, lent = self.is_running, self._lent
        bound = list(map(views.__getitem__, table.positions))
        standing = list(itertools.starmap(dict.__getitem__, table.homes))
        addresses, versions = list(map(_address, bound)), versions_of(bound)
        if not is_compiled:
            kind = BoundCopy if table.are_copies else Bound
            for view in bound:
                view.__class__ = kind
        self._num_runs += 1
        # Only in the first runs, as it synchronises, which a stream that is captured cannot do.
        is_looking = (
            table.are_copies
            and self._num_runs <= _NUM_LOOKS
            and not (bound[0].is_cuda and torch.cuda.is_current_stream_capturing())
        )
        sums = _sums(bound) if is_looking else None
        self._bound_table, self.is_running = table, True
        self._put(table, bound)
        try:
            yield
            held = itertools.starmap(dict.get, table.homes)
            _refuse(table, map(operator.is_not, held, bound))
            _refuse(table, map(operator.ne, map(_address, bound), addresses))
            if versions_of(bound) != versions:
                raise _written(table, bound)
            if sums is not None:  # writes that bypass torch, such as numpy's, count no version
                _refuse(table, map(operator.not_, map(torch.equal, _sums(bound), sums)))
        # Autograd reports an in-place write at the next use of the view, which may be in the body.
        except RuntimeError as error:
            if versions_of(bound) != versions:
                raise _written(table, bound) from error
            if "support saved tensor hooks" in str(error):
                raise ParameterError(
                    "the forward pass of a block takes gradients by torch.func: give the block "
                    "zero_level=2 and use_checkpoint=False, or use torch.autograd.grad."
                ) from error
            raise
        except ValueError as error:
            if "non-leaf" in str(error):
                raise ParameterError(
                    "the forward pass made a parameter an attribute of a module. Inside it the "
                    "parameter is a gathered copy: assign it before the model is wrapped."
                ) from error
            raise
        finally:
            self.is_running = outer
            # A surrounding call, or a loan still open, expects its own tensors back: sharded
            # parameters here would break what it computes next.
            is_expected = outer or (lent is not None and lent is self._lent)
            self._put(table, standing if is_expected else None)

    def lend(
        self,
        table: ParameterTable,
        marked: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]],
        tensors: Sequence[torch.Tensor],
    ) -> Callable[[], None]:
        """Bind tensors outside of calls too, until the returned function is called.

        For hooks and checkpoints inside the module, whose Python code runs during backward.

        Args:
            marked: makes of the tensors those that the module computes with.
            tensors: one for each slot of the table's storages.
        """
        tensors = marked(tensors)
        lent = [tensors[position] for position in table.positions]
        self._bound_table, self._lent = table, lent
        self._put(table, lent)

        def give_back() -> None:
            if self._lent is lent:  # else a later loan is bound, and this must not end it
                self._lent = None
                if not self.is_running:
                    self._put(table)

        return give_back

    def _put(
        self, table: ParameterTable, values: Sequence[torch.Tensor | None] | None = None
    ) -> None:
        """Bind values, one for each row of the table; without any, the sharded parameters."""
        if values is None:
            values, self._bound_table = table.params, None
        for (home, name), value in zip(table.homes, values, strict=True):
            home[name] = value  # type: ignore[assignment]
        # Recurrent modules keep their own list of weights and pass that to the kernel: without an
        # update they would compute with the previous ones.
        for rnn in table.rnns:
            renew_weights(rnn)


_address = torch.Tensor.data_ptr


def _refuse(table: ParameterTable, are_lost: Iterable[bool]) -> None:
    """Raise ParameterError for the first parameter whose value would be lost, if any."""
    row = next(itertools.compress(table, are_lost), None)
    if row is not None:
        raise _lost_value(repr(row.place.path))


def _written(table: ParameterTable, bound: Sequence[torch.Tensor]) -> ParameterError:
    """The error for a module that has written into a gathered parameter."""
    # Views of one buffer share a counter: which of them was written, values tell.
    rows = list(zip(table, bound, strict=True))
    written = [row for row, view in rows if _differs(row.param, view)]
    paths = [row.place.path for row in written[:1] or table]
    return _lost_value(" or ".join(map(repr, paths[:3])))


def _differs(param: DistributedParameter, view: torch.Tensor) -> bool:
    """Whether this rank's part of a gathered parameter is other than its shard."""
    storage, index = param.storage_of, param.index_in_storage
    own = storage.slice_of(index, view.detach())
    return storage.axis.size > 1 and not torch.equal(own, storage.local(index))


def _sharded(place: Place) -> DistributedParameter:
    param = place.value
    if isinstance(param, DistributedParameter):
        return param
    if not isinstance(param, torch.nn.Parameter):
        raise ParameterError(
            f"parameter {place.path!r} of a block was replaced by a tensor, as "
            "torch.func.functional_call does, but others of the block were not: replace all of "
            "them by whole tensors, param.gather()."
        )
    raise ParameterError(
        f"parameter {place.path!r} of a block is not sharded: it was put in after the "
        "block was made. Call "
        "model = bmtrain.BMTrainModelWrapper(model) again, then give the new "
        "parameters to an optimizer."
    )


def _sums(views: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Integer sum of the bits of each row: the same on all ranks, so all see a write or none."""
    return [_row_sums(view.detach().view(_WHOLE_NUMBERS[view.itemsize])) for view in views]


def _row_sums(numbers: torch.Tensor) -> torch.Tensor:
    rows = torch.atleast_2d(numbers).flatten(0, -2)
    # Torch copies what it sums to int64: of all rows of a bf16 embedding four times its memory.
    parts = rows.split(max(1, _MOST_SUMMED // max(1, rows.shape[-1])))
    return torch.cat([part.sum(-1) for part in parts])


def _lost_value(what: str) -> ParameterError:
    return ParameterError(
        f"the forward pass gave parameter {what} a new value, which would be lost: inside it the "
        "parameter is a gathered copy. Change parameters between passes, or register it as a "
        "buffer."
    )
