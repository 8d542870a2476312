"""The gradient of one storage: this rank's part of the sum over ranks, and its views in the
parameters' `.grad`.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import operator
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from bmtrain.distributed.transport import Outgoing, Transport
from bmtrain.errors import ParameterError
from bmtrain.shard.label import Label
from bmtrain.shard.layout import Layout
from bmtrain.shard.residence import num_references
from bmtrain.shard.slices import Slices
from bmtrain.torch_internals import plain_functions

# Bytes. Smaller gradients stay where they are when they are cleared: making them anew costs the
# host 50 us, and a small model waits for its host.
LEAST_FREED = 2**24


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradientPolicy:
    """Dtypes of a storage's gradient: of the parameters, on the wire and in the sum over
    micro-batches.
    """

    dtype: torch.dtype
    reduce_dtype: torch.dtype
    accumulate_dtype: torch.dtype


class Content(enum.Enum):
    """What the memory of a sum holds.

    A new sum is UNWRITTEN. `open` makes it CURRENT if a parameter has a gradient already, and turns
    a CURRENT one into a STALE one if none has; the first reduction or slice makes it CURRENT.
    """

    #: what the allocator has left there
    UNWRITTEN = enum.auto()
    #: the sum of an earlier pass, which counts as zero
    STALE = enum.auto()
    #: the sum so far, zeros in padding
    CURRENT = enum.auto()


class Trained(Protocol):
    """What a parameter is to its gradient."""

    shown_grad: Slices | None  # what `.grad` shows
    requires_grad: bool
    grad_hooks: Mapping[int, object]  # that `hooked` calls
    post_hooks: Mapping[int, object]  # that `run_post_hooks` calls

    def hooked(self, grad: Slices) -> Slices:
        """What its hooks make of the gradient of one pass."""

    def run_post_hooks(self) -> None:
        """`.grad` is complete."""


class Gradient:
    """Collects full gradients of a storage during backward passes; afterwards each parameter's
    `.grad` is its slice.

    Life of one backward pass: `open` (look what the user left in `.grad`), `add` any number of
    times, then `close`. Values of parameters whose `.grad` is None count as zero, so clearing
    gradients is as cheap as the user's loop makes it. Memory of cleared gradients, if it is much,
    is free in the next forward pass, where activations take it, until gradients are there again.
    """

    def __init__(
        self,
        layout: Layout,
        params: Sequence[weakref.ref[Any]],
        policy: GradientPolicy,
        device: torch.device,
        transport: Transport,
        label: Label,
        show: Callable[[torch.Tensor, int], Slices],
    ) -> None:
        self.layout, self.policy, self.axis, self.label = layout, policy, label.axis, label
        self._params: Sequence[weakref.ref[Trained]] = params  # filled later, with parameters
        self._device, self._transport, self._show = device, transport, show
        self._total: torch.Tensor | None = None  # (shard_numel,) in accumulate_dtype
        # the same in the parameters' dtype: what `.grad` shows
        self._public: torch.Tensor | None = None
        self._slots: list[torch.Tensor] = []  # of it, 1-D
        self._views: list[Slices] = []  # of those
        # of parameters with hooks: what `.grad` showed before the pass
        self._before: dict[int, torch.Tensor] = {}
        # gradients of this rank's slices, to be added
        self._slices: list[tuple[int, torch.Tensor]] = []
        self._keeps_slices = False  # for a later reduction
        self._versions: list[int] = []
        self._num_own = 0  # references, when no gradient is shown
        self._live = [False] * len(layout.slots)
        self._touched = [False] * len(layout.slots)
        self._deferred: torch.Tensor | None = None
        self._content = Content.UNWRITTEN
        self._stays = False  # a graph knows where it is
        self.is_open = False

    @property
    def flat(self) -> torch.Tensor | None:
        """This rank's gradient of all slots, padding zero: (shard_numel,) in the parameters' dtype.

        None where there is none.
        """
        return self._public

    @property
    def touched(self) -> list[bool]:
        """Per slot: whether this backward pass has produced a gradient for it on this rank."""
        return list(self._touched)

    @property
    def has_hooks(self) -> bool:
        """Whether a parameter has some."""
        return bool(self._hooked())

    @property
    def has_deferred(self) -> bool:
        """Whether gradients wait on this rank for a later reduction."""
        return self._deferred is not None or self._keeps_slices

    def expect(self) -> None:
        """A backward pass may come. Collective the first time."""
        self._free_if_cleared()
        self._transport.expect(self.layout.numel, self.policy.reduce_dtype, self.axis)

    def open(self) -> None:
        """Begin a backward pass: keep what lives in `.grad`, forget the rest."""
        self.is_open = True
        grads = self._part_from_readers(self._grads())
        self._live = [grad is not None for grad in grads]
        self._prepare_sum(is_continued=any(self._live))
        for index, grad in enumerate(grads):
            if grad is not None:
                self._take_over(index, grad)
        if self._content is Content.CURRENT:
            for index, live in enumerate(self._live):
                if not live and self._total is not None:
                    self._slice(self._total, index).zero_()
        if not self.has_deferred:
            self._touched = [False] * len(self._live)
        self._set_aside(grads)

    def add(self, grads: Sequence[torch.Tensor | None], *, defer: bool) -> None:
        """Add one full gradient, a tensor per slot or None for zeros.

        `defer` keeps it on this rank until a later call.
        """
        self._touched = [t or g is not None for t, g in zip(self._touched, grads, strict=True)]
        self._check_deferring(defer)
        grads = [grad.to_dense() if grad is not None and grad.is_sparse else grad for grad in grads]
        if not defer and self._deferred is None:
            self._reduce(lambda: self._parts(grads), [grad for grad in grads if grad is not None])
            return
        full = torch.cat(self._parts(grads))
        self._deferred = (
            full.to(self.policy.accumulate_dtype)
            if self._deferred is None
            else self._deferred.add_(full)
        )
        if not defer:
            self.flush()

    def add_slice(self, index: int, grad: torch.Tensor, *, defer: bool) -> None:
        """Add the gradient of this rank's slice of slot `index`, which is summed over ranks
        already.
        """
        self._check_deferring(defer)
        self._touched[index] = True
        self._slices.append((index, grad))
        self._keeps_slices = self._keeps_slices or defer

    def discard_deferred(self, index: int) -> None:
        """Forget what was deferred for slot `index`: the program clears its gradient."""
        if not self.has_deferred:
            return
        self._touched[index] = False
        self._slices = [(place, grad) for place, grad in self._slices if place != index]
        self._keeps_slices = bool(self._slices)
        slot = self.layout.slots[index]
        if self._deferred is not None:
            self._deferred[slot.offset : slot.end].zero_()
        if not any(self._touched):
            self._deferred = None

    def abandon(self) -> None:
        """Leave a pass that an exception has ended."""
        self.is_open = False
        self._slices.clear()
        for index, before in self._before.items():
            self._slots[index].copy_(before)
        self._before.clear()

    def flush(self) -> None:
        """Reduce what was deferred."""
        deferred, self._deferred, self._keeps_slices = self._deferred, None, False
        if deferred is not None:
            self._reduce(lambda: [_flat(deferred, self.policy.reduce_dtype)], [deferred])

    def close(self, touched: Sequence[bool]) -> None:
        """End the pass: show the sum in `.grad` of parameters that got a gradient on any rank
        (`touched`) or had one before.
        """
        self.is_open = False
        if self._total is None or self._public is None:
            return
        self._add_slices()
        if self._public is not self._total:
            self._public.copy_(self._total)
        shown, hooked = [], self._hooked()
        for index, is_trained in enumerate(self.trainable()):
            param = self._params[index]()
            if param is not None and is_trained and (self._live[index] or touched[index]):
                if index in hooked or index in self._before:
                    self._run_hooks(index, param, is_touched=touched[index])
                param.shown_grad = self._views[index]
                shown.append((index, param))
        for index, _ in shown:
            self._views[index].num_own_writes += 1
            self._versions[index] = self._slots[index]._version
        for index, param in shown:
            if touched[index] and index in hooked:
                param.run_post_hooks()

    def _check_deferring(self, defer: bool) -> None:
        if (defer or self.has_deferred) and self._hooked():
            raise ParameterError(
                "a parameter with hooks got a gradient under reduce_gradients=False: "
                "hooks see the gradient of every pass, summed "
                "over ranks. Call backward without it."
            )

    def _set_aside(self, grads: Sequence[Slices | None]) -> None:
        """Hooks see what a pass adds, not the sum: of parameters that have some, the sum begins at
        zero.
        """
        for index in self._hooked():
            grad = grads[index]
            if grad is not None and self._total is not None:
                self._before[index] = grad.local.clone()
                self._slice(self._total, index).zero_()

    def _hooked(self) -> set[int]:
        """Slots of parameters with hooks."""
        return {
            index
            for index, ref in enumerate(self._params)
            if (param := ref()) is not None and (param.grad_hooks or param.post_hooks)
        }

    def _run_hooks(self, index: int, param: Trained, *, is_touched: bool) -> None:
        before = self._before.pop(index, None)
        view = self._slots[index]
        own = self._show(view.clone(), index)
        with torch.no_grad():
            if is_touched:
                view.copy_(param.hooked(own).local)
            if before is not None:
                view.add_(before)
            if self._public is not self._total and self._total is not None:
                self._slice(self._total, index).copy_(view)

    def _add_slices(self) -> None:
        """What has come for slices joins what has been reduced."""
        if self._total is None or not self._slices or self._keeps_slices:
            return
        if self._content is not Content.CURRENT:  # nothing was reduced
            self._total.zero_()
            self._content = Content.CURRENT
        for index, grad in self._slices:
            self._slice(self._total, index).add_(grad)
        self._slices.clear()

    def settle(self) -> tuple[bool, ...]:
        """Between passes: `.grad` moves to where `close` leaves it, for good, whatever the user has
        put there.

        Returns which parameters have one.
        """
        self._stays = True
        self._live = given = [grad is not None for grad in self._grads()]
        if any(given):
            self.open()
            self.close([False] * len(given))
        return tuple(given)

    def trainable(self) -> tuple[bool, ...]:
        """Which parameters are trained."""
        with plain_functions():
            return tuple(
                [
                    param is not None and param.requires_grad
                    for param in (reference() for reference in self._params)
                ]
            )

    def hide(self, given: Sequence[bool]) -> None:
        """Take back what has been shown since `settle` returned `given`: no gradient was computed
        after all.
        """
        for reference, had in zip(self._params, given, strict=True):
            param = reference()
            if param is not None and not had:
                param.shown_grad = None

    def shows(self, grad: object, index: int) -> bool:
        """True if `grad`, of the parameter of slot `index`, is the slice that this object wrote."""
        return bool(self._views) and grad is self._views[index]

    def _grads(self) -> list[Slices | None]:
        """What `.grad` of the parameters shows."""
        return [
            None if param is None else param.shown_grad
            for param in (reference() for reference in self._params)
        ]

    def _part_from_readers(self, grads: list[Slices | None]) -> list[Slices | None]:
        """Leave the memory to a program that has cleared gradients and kept them, and go on in
        other.

        Per-task gradients are taken so (`old = p.grad; p.grad = None`): the next pass would change
        them in silence.

        Returns what `.grad` shows afterwards, of what it has shown before.
        """
        shown = list(map(operator.is_, grads, self._views))
        if self._public is None or self._total is None or self._stays or all(shown):
            return grads
        # `grads` and the parameters refer to what is shown
        if self._num_references() - 2 * sum(shown) <= self._num_own:
            return grads
        old, was = self._slots, self._versions
        old_total, old_public = self._total, self._public
        with torch.inference_mode(False):
            self._total = old_total.clone()
        self._show_total(self._total)
        if self._public is not self._total:
            self._public.copy_(old_public)
        for index, reference in enumerate(self._params):
            param = reference()
            if param is not None and shown[index]:
                param.shown_grad = self._views[index]
                if old[index]._version == was[index]:
                    self._versions[index] = self._slots[index]._version
        return self._grads()

    def _num_references(self) -> int:
        """To the memory and to the views of it."""
        views: int = sum(map(sys.getrefcount, self._views))
        return views + num_references(self._slots[0])

    def _free_if_cleared(self) -> None:
        if self._total is None or self._total.nbytes < LEAST_FREED or self._stays or self.is_open:
            return
        if any(grad is not None for grad in self._grads()):
            return
        self._total = self._public = None
        self._slots, self._views = [], []

    def _prepare_sum(self, *, is_continued: bool) -> None:
        """Memory for the sum, unless there is some; it goes on from `.grad` or begins at zero."""
        if self._total is None:
            with torch.inference_mode(False):
                self._total = torch.empty(
                    self.layout.shard_numel, dtype=self.policy.accumulate_dtype, device=self._device
                )
            self._show_total(self._total)
            self._content = Content.UNWRITTEN
        if is_continued:
            if self._content is Content.UNWRITTEN:
                self._total.zero_()
            self._content = Content.CURRENT
        elif self._content is Content.CURRENT:
            self._content = Content.STALE

    def _show_total(self, total: torch.Tensor) -> None:
        """Make what `.grad` shows of a new sum."""
        with torch.inference_mode(False):
            same = total.dtype == self.policy.dtype
            self._public = public = (
                total if same else torch.empty_like(total, dtype=self.policy.dtype)
            )
            self._slots = [self._slice(public, index) for index in range(len(self._params))]
            self._views = [self._show(own, index) for index, own in enumerate(self._slots)]
        self._versions = [-1] * len(self._params)
        self._num_own = self._num_references()

    def _slice(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        piece = self.layout.piece(index, self.axis.index)
        return flat[piece.begin : piece.end]

    def _take_over(self, index: int, grad: Slices) -> None:
        """Make the sum equal to what the user left in `.grad`, if that is not what `close` put
        there.
        """
        view = self._slots[index]
        untouched = grad is self._views[index] and view._version == self._versions[index]
        if untouched or self._total is None:
            return
        if grad.local is not view:
            view.copy_(grad.local)
        if self._public is not self._total:
            self._slice(self._total, index).copy_(view)

    def _parts(self, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """One behind the other the full gradient (layout.numel,) in reduce_dtype, zeros in padding
        and in place of missing ones.
        """
        zeros = functools.partial(torch.zeros, dtype=self.policy.reduce_dtype, device=self._device)
        parts, end = [], 0
        for slot, grad in zip(self.layout.slots, grads, strict=True):
            if slot.offset > end:
                parts.append(zeros(slot.offset - end))
            parts.append(
                zeros(slot.numel) if grad is None else _flat(grad, self.policy.reduce_dtype)
            )
            end = slot.end
        if self.layout.numel > end:
            parts.append(zeros(self.layout.numel - end))
        return parts

    def _reduce(
        self, parts: Callable[[], list[torch.Tensor]], reads: Sequence[torch.Tensor]
    ) -> None:
        """Reduce the full gradient that `parts` makes, out of the tensors that it `reads`."""
        if self._total is None:
            raise RuntimeError("a gradient was reduced before it was opened")
        outgoing = Outgoing(self.policy.reduce_dtype, parts, reads)
        self._transport.reduce(
            self._total, outgoing, self.axis, accumulate=self._content is Content.CURRENT
        )
        self._content = Content.CURRENT


def _flat(grad: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    flat = grad if grad.dim() == 1 else grad.reshape(-1)
    return flat if flat.dtype == dtype else flat.to(dtype)
