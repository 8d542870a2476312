"""Spans: adjacent parameters of a shard as one flat tensor, so that fewer kernels are launched.

Gradients are looked up at each step, and combined to as few tensors.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from bmtrain.errors import ParameterError
from bmtrain.shard.parameter import DistributedParameter
from bmtrain.shard.slices import local_of
from bmtrain.shard.storage import Storage

_SHOWN = operator.attrgetter("shown_grad")
_STORAGE = operator.attrgetter("storage_of")


@dataclasses.dataclass(frozen=True)
class FlatSpan:
    """Consecutive slots of a storage, or one ordinary parameter (storage None)."""

    params: tuple[Any, ...]
    storage: Storage | None
    begin: int
    end: int

    @classmethod
    def of(cls, storage: Storage | None, params: Sequence[Any]) -> FlatSpan:
        """The span of these consecutive parameters."""
        if storage is None:
            return cls(tuple(params), None, 0, params[0].numel())
        first, last = (storage.cuts[x.index_in_storage].piece for x in (params[0], params[-1]))
        return cls(tuple(params), storage, first.begin, last.end)

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
        if self.storage is not None:
            return self.storage.shard[self.begin : self.end]
        param = self.params[0].detach()
        if not param.is_contiguous():
            raise ParameterError(
                f"an ordinary parameter of shape {tuple(param.shape)} has the strides "
                f"{param.stride()}: an Adam of this library updates contiguous ones. Put "
                "param.data = param.data.contiguous() before making the optimizer, or shard it."
            )
        values: torch.Tensor = param.view(-1)
        return values

    @property
    def version(self) -> int:
        """A counter that changes when the values are written in place."""
        return self.params[0]._version if self.storage is None else self.storage.version()

    @property
    def owner(self) -> int:
        """The id of the storage or parameter that owns the values."""
        return id(self.params[0] if self.storage is None else self.storage)

    def offset(self, param: Any) -> tuple[int, int]:
        """Begin and end of the values of `param` in the span."""
        if self.storage is None:
            return 0, self.numel
        piece = self.storage.cuts[param.index_in_storage].piece
        return piece.begin - self.begin, piece.end - self.begin

    @property
    def is_current(self) -> bool:
        """Whether the parameters are still in this storage: a block may have taken them over."""
        storage = self.storage
        return storage is None or all(x is storage for x in map(_STORAGE, self.params))

    def cut(self, values: torch.Tensor, part: FlatSpan) -> torch.Tensor:
        """The elements of `part` of this span in `values` (numel,)."""
        return values if part is self else values[part.begin - self.begin : part.end - self.begin]

    @functools.cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Begin and end in the span of the padding between its slots."""
        bounds = [self.offset(param) for param in self.params]
        return tuple(
            (one[1], other[0]) for one, other in itertools.pairwise(bounds) if one[1] < other[0]
        )

    def split(self, key: Callable[[Any], object]) -> list[FlatSpan]:
        """Cut the span where `key` changes from one parameter to the next."""
        parts = [list(members) for _, members in itertools.groupby(self.params, key)]
        return [self] if len(parts) == 1 else [FlatSpan.of(self.storage, part) for part in parts]

    def is_shown(self) -> bool:
        """Whether `.grad` of all parameters is what the storage itself wrote."""
        if self.storage is None:
            return False
        first = self.params[0].index_in_storage
        return self.storage.gradient.shows(list(map(_SHOWN, self.params)), first)

    def gradient(self) -> torch.Tensor:
        """The gradient of a part of which `gradient_kind` is the same everywhere: (numel,).

        A strided gradient that the program has assigned keeps the parameter's shape; of a sparse
        one these are the values.
        """
        param = self.params[0]
        if self.storage is not None and gradient_kind(param) == "shown":
            flat: Any = self.storage.gradient.flat
            out: torch.Tensor = flat[self.begin : self.end]
            return out
        grad: Any = gradient_of(param)
        if grad.layout is torch.sparse_coo:
            # its sums of repeated rows are what counts, and what is written must reach `.grad`
            param.grad = grad.coalesce()
            grad = param.grad.values()
        own = local_of(grad)
        return own.view(-1) if own.is_contiguous() else own


def spans_of(params: Iterable[torch.nn.Parameter]) -> list[FlatSpan]:
    """Group parameters, in any order, each once, into as few spans as possible."""
    by_storage: dict[Storage, list[DistributedParameter]] = {}
    spans = []
    for param in dict.fromkeys(params):
        if isinstance(param, DistributedParameter):
            by_storage.setdefault(param.storage_of, []).append(param)
        else:
            spans.append(FlatSpan.of(None, [param]))
    for storage, members in by_storage.items():
        members.sort(key=lambda param: param.index_in_storage)
        # Neighbours have the same difference between their slot and their place here.
        first = {param: param.index_in_storage - place for place, param in enumerate(members)}
        spans += FlatSpan.of(storage, members).split(first.__getitem__)
    return spans


def parameters_of(groups: Any) -> list[torch.nn.Parameter]:
    """The parameters of parameter groups, of an iterable of parameters, or a single one."""
    if isinstance(groups, torch.nn.Parameter):
        return [groups]
    found: list[torch.nn.Parameter] = []
    for member in groups:
        found.extend(member["params"] if isinstance(member, dict) else [member])
    return found


def gradient_of(param: torch.nn.Parameter) -> torch.Tensor | None:
    """`.grad`, without triggering the reduction of deferred gradients."""
    grad: torch.Tensor | None = (
        param.shown_grad if isinstance(param, DistributedParameter) else param.grad
    )
    return grad


def gradient_kind(param: torch.nn.Parameter) -> object:
    """A key, equal for neighbours whose gradients form one flat tensor or that have none.

    "shown" is the gradient that the storage itself wrote, which nobody has replaced.
    """
    grad = gradient_of(param)
    if grad is None:
        return "none"
    is_shown = isinstance(param, DistributedParameter) and param.storage_of.gradient.shows(
        [grad], param.index_in_storage
    )
    return "shown" if is_shown else id(param)


class GradientPart(NamedTuple):
    """A part of a span and its gradient: (numel,), or strided if the program assigned it."""

    span: FlatSpan
    piece: FlatSpan
    grad: torch.Tensor


def gradients_of(spans: Iterable[FlatSpan]) -> tuple[list[GradientPart], list[GradientPart]]:
    """The gradients of sharded parameters, and those of ordinary ones, as few tensors.

    Looked up at each step: which parameters have one seldom changes, but where they are in memory
    does. Do not keep them: they hold memory that the program has freed.
    """
    sharded: list[GradientPart] = []
    ordinary: list[GradientPart] = []
    for span in spans:
        # Looked up for all parameters at once: this is most of what a step costs the host.
        for piece in [span] if span.is_shown() else span.split(gradient_kind):
            if gradient_of(piece.params[0]) is not None:
                found = ordinary if span.storage is None else sharded
                found.append(GradientPart(span, piece, piece.gradient()))
    return sharded, ordinary
