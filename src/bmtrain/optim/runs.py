"""Runs: adjacent parameters of a shard as one flat tensor, so that fewer kernels are launched."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence

import torch

from bmtrain.errors import ParameterError
from bmtrain.shard.parameter import DistributedParameter
from bmtrain.shard.slices import local_of
from bmtrain.shard.storage import Storage


@dataclasses.dataclass(frozen=True)
class Run:
    """Consecutive slots of a storage, or one ordinary parameter (storage None)."""

    params: tuple[torch.nn.Parameter, ...]
    storage: Storage | None
    begin: int
    end: int

    @property
    def numel(self) -> int:
        """Elements on this rank, including padding between slots (zero values and gradients)."""
        return self.end - self.begin

    @property
    def values(self) -> torch.Tensor:
        """This rank's values: (numel,).

        Raises:
            ParameterError: for an ordinary parameter that is not contiguous.
        """
        if self.storage is None:
            param = self.params[0].detach()
            if not param.is_contiguous():
                raise ParameterError(
                    f"an ordinary parameter of shape {tuple(param.shape)} has the strides "
                    f"{param.stride()}: an Adam of this library updates contiguous ones. Put "
                    "param.data = param.data.contiguous() before making the optimizer, or shard it."
                )
            return param.view(-1)
        return self.storage.shard[self.begin : self.end]

    @property
    def version(self) -> int:
        """A counter that changes when the values are written in place."""
        return self.params[0]._version if self.storage is None else self.storage.version()

    @property
    def num_written(self) -> int:
        """How often the first parameter was written: the same on all ranks."""
        param = self.params[0]
        return param.num_written if isinstance(param, DistributedParameter) else param._version

    @property
    def owner(self) -> int:
        """The id of the storage or parameter that owns the values; runs of one storage share it."""
        return id(self.params[0] if self.storage is None else self.storage)

    def offset(self, param: torch.nn.Parameter) -> tuple[int, int]:
        """Begin and end of the values of `param` in the run."""
        if self.storage is None or not isinstance(param, DistributedParameter):
            return 0, self.numel
        piece = self.storage.piece(param.index_in_storage)
        return piece.begin - self.begin, piece.end - self.begin

    def cut(self, values: torch.Tensor, part: Run) -> torch.Tensor:
        """The elements of `part` of this run in `values` (numel,)."""
        return values if part is self else values[part.begin - self.begin : part.end - self.begin]

    @functools.cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Begin and end in the run of the padding between its slots."""
        if self.storage is None:
            return ()
        spans = [self.offset(param) for param in self.params]
        return tuple(
            (one[1], other[0]) for one, other in itertools.pairwise(spans) if one[1] < other[0]
        )

    def with_gradient(self) -> list[Run]:
        """The parts of the run that have a gradient, each with a single `gradient()`."""
        return [
            part for part in self.split(gradient_kind) if gradient_of(part.params[0]) is not None
        ]

    def split(self, key: Callable[[torch.nn.Parameter], object]) -> list[Run]:
        """Cut the run where `key` changes from one parameter to the next."""
        kinds = [key(param) for param in self.params]
        if kinds.count(kinds[0]) == len(kinds):
            return [self]
        places = [place for place in range(1, len(kinds)) if kinds[place] != kinds[place - 1]]
        bounds = zip([0, *places], [*places, len(kinds)], strict=True)
        return [_run_of(self.storage, self.params[start:stop]) for start, stop in bounds]

    def gradient(self) -> torch.Tensor:
        """The gradient of a part that has one: (numel,).

        A strided gradient that the program has assigned keeps the parameter's shape; of a sparse
        one these are the values.
        """
        grad, flat = (
            gradient_of(self.params[0]),
            None if self.storage is None else self.storage.gradient.flat,
        )
        if grad is None:
            raise ValueError("a part without a gradient was asked for it")
        if flat is not None and is_shown(self.params[0]):
            return flat[self.begin : self.end]
        if grad.layout is torch.sparse_coo:
            # its sums of repeated rows are what counts, and what is written must reach `.grad`
            self.params[0].grad = grad = grad.coalesce()
            grad = grad.values()
        own = local_of(grad)
        return own.view(-1) if own.is_contiguous() else own


def contiguous_runs(params: Iterable[torch.nn.Parameter]) -> list[Run]:
    """Group parameters, in any order and without duplicates, into as few runs as possible."""
    by_storage: dict[Storage, list[DistributedParameter]] = {}
    runs, seen = [], set()
    for param in params:
        if id(param) in seen:
            continue
        seen.add(id(param))
        if isinstance(param, DistributedParameter):
            by_storage.setdefault(param.storage_of, []).append(param)
        else:
            runs.append(Run((param,), None, 0, param.numel()))
    for storage, members in by_storage.items():
        members.sort(key=lambda param: param.index_in_storage)
        start = 0
        for place in range(1, len(members) + 1):
            if (
                place == len(members)
                or members[place].index_in_storage != members[place - 1].index_in_storage + 1
            ):
                runs.append(_run_of(storage, members[start:place]))
                start = place
    return runs


def _run_of(storage: Storage | None, params: Sequence[torch.nn.Parameter]) -> Run:
    first, last = params[0], params[-1]
    if (
        storage is None
        or not isinstance(first, DistributedParameter)
        or not isinstance(last, DistributedParameter)
    ):
        return Run(tuple(params), storage, 0, first.numel())
    begin, end = (
        storage.piece(first.index_in_storage).begin,
        storage.piece(last.index_in_storage).end,
    )
    return Run(tuple(params), storage, begin, end)


def is_shown(param: torch.nn.Parameter) -> bool:
    """Whether the gradient of a parameter is the slice that its storage wrote."""
    return isinstance(param, DistributedParameter) and param.storage_of.gradient.shows(
        param.shown_grad, param.index_in_storage
    )


def gradient_of(param: torch.nn.Parameter) -> torch.Tensor | None:
    """`.grad`, without triggering the reduction of deferred gradients."""
    grad: torch.Tensor | None = (
        param.shown_grad if isinstance(param, DistributedParameter) else param.grad
    )
    return grad


def local_numel(param: torch.nn.Parameter) -> int:
    """Number of elements on this rank."""
    return local_of(param).numel()


def gradient_kind(param: torch.nn.Parameter) -> object:
    """A key, equal for neighbours whose gradients form one flat tensor or that have none."""
    if gradient_of(param) is None:
        return "none"
    return "shown" if is_shown(param) else id(param)
