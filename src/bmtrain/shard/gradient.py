"""One storage's gradient: this rank's shard of the sum over ranks, shown as views in `.grad`."""

from __future__ import annotations

import dataclasses
import enum
import functools
import operator
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bmtrain.distributed.transport import Reduction, Transport
from bmtrain.errors import ParameterError
from bmtrain.shard.hooks import Hooked
from bmtrain.shard.label import Label
from bmtrain.shard.layout import Layout
from bmtrain.shard.residence import num_references
from bmtrain.shard.slices import Slices
from bmtrain.torch_internals import plain_functions

# Bytes. Smaller gradients keep their memory when they are cleared: reallocating one costs the host
# 50 us, and a small model is bound by its host.
LEAST_FREED = 2**24


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradientPolicy:
    """Dtypes of a gradient: of the parameters, on the wire and of the sum over micro-batches."""

    dtype: torch.dtype
    reduce_dtype: torch.dtype
    accumulate_dtype: torch.dtype


class Content(enum.Enum):
    """What the memory of a sum holds.

    A new sum is UNWRITTEN. `open` makes the sum CURRENT if any parameter has a gradient already; if
    none has, it turns a CURRENT sum into a STALE one. The first reduction or slice of a pass makes
    it CURRENT.
    """

    #: uninitialised memory
    UNWRITTEN = enum.auto()
    #: the sum of an earlier pass, to be overwritten
    STALE = enum.auto()
    #: the sum so far, with zeros in the padding
    CURRENT = enum.auto()


class Gradient:
    """Sums the full gradients of a storage over backward passes and shows each slice in `.grad`.

    A backward pass calls `open`, which reads what the program left in `.grad`, then `add` or
    `add_slice` any number of times, then `close`. The slice of a parameter whose `.grad` is None
    counts as zero, so clearing gradients launches no kernel. The memory of a large gradient that
    has been cleared is freed in the next forward pass, which needs it for activations; backward
    allocates it again.
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
        self._params: Sequence[weakref.ref[Hooked]] = params  # filled in by the storage later
        self._device, self._transport, self._show = device, transport, show
        self._total: torch.Tensor | None = None  # (shard_numel,) in accumulate_dtype
        # The same in the parameters' dtype, shown in `.grad`; one tensor if the dtypes agree.
        self.flat: torch.Tensor | None = None
        self._slots: list[torch.Tensor] = []  # 1-D views of `flat`
        self._views: list[Slices] = []  # what `.grad` shows: `_slots` that look whole
        # For parameters with hooks: what `.grad` held before the pass.
        self._before: dict[int, torch.Tensor] = {}
        # By slot: gradients of slices, summed over ranks already, added at the end of the pass.
        self._slices: list[tuple[int, torch.Tensor]] = []
        self._keeps_slices = False  # `_slices` are deferred
        self._versions: list[int] = []
        self._num_own = 0  # references to the memory and its views if no one else holds any
        self.continued = [False] * len(layout.slots)
        self.touched = [False] * len(layout.slots)
        self._deferred: torch.Tensor | None = None
        #: whether gradients were held back at the beginning of the pass
        self.had_deferred = False
        #: whether a pass has raised that added to what earlier ones had deferred
        self.is_lost = False
        self._content = Content.UNWRITTEN
        self.is_open = False

    @property
    def has_hooks(self) -> bool:
        """Whether any parameter has hooks."""
        return bool(self._hooked())

    @property
    def has_deferred(self) -> bool:
        """Whether this rank holds gradients back for a later reduction."""
        return self._deferred is not None or self._keeps_slices or self.is_lost

    def expect(self) -> None:
        """A backward pass may come: free cleared memory, prepare for the reduction.

        Collective the first time.
        """
        total = self._total
        # While a pass is writing there it must not be freed.
        is_large = total is not None and total.nbytes >= LEAST_FREED and not self.is_open
        if is_large and all(grad is None for grad in self._grads()):
            self._total = self.flat = None
            self._slots, self._views = [], []
        self._transport.expect(self.layout.numel, self.policy.reduce_dtype, self.axis)

    def open(self) -> None:
        """Begin a backward pass: keep what is in `.grad`, drop the rest of the sum."""
        self.is_open = True
        grads = self._part_from_readers(self._grads())
        self.continued = [grad is not None for grad in grads]
        total = self._total
        if total is None:
            with torch.inference_mode(False):
                self._total = total = torch.empty(
                    self.layout.shard_numel, dtype=self.policy.accumulate_dtype, device=self._device
                )
            self._show_total(total)
            self._content = Content.UNWRITTEN
        if any(self.continued):
            if self._content is Content.UNWRITTEN:
                total.zero_()
            self._content = Content.CURRENT
        elif self._content is Content.CURRENT:
            self._content = Content.STALE
        for index, (grad, view) in enumerate(zip(grads, self._slots, strict=True)):
            if grad is None and self._content is Content.CURRENT:
                # The reduction adds to the sum: without this, what was cleared would count.
                self._slice(total, index).zero_()
            # Where the program has written or replaced `.grad`, the sum becomes equal to it.
            shown = self._views[index]
            if grad is None or (grad is shown and view._version == self._versions[index]):
                continue
            if grad.local is not view:
                view.copy_(grad.local)
            if self.flat is not total:
                self._slice(total, index).copy_(view)
        self.had_deferred = self.has_deferred
        if not self.has_deferred:
            self.touched = [False] * len(self.continued)
        self._set_aside(grads)

    def add(self, grads: Sequence[torch.Tensor | None], *, defer: bool) -> Reduction | None:
        """Add one full gradient: a tensor per slot, None for zeros.

        `defer` holds it back on this rank until a later call, which reduces the sum of both.

        Returns:
            The reduction that the caller has to start; None if it is held back.
        """
        self.touched = [t or g is not None for t, g in zip(self.touched, grads, strict=True)]
        self._check_deferring(defer)
        grads = [grad.to_dense() if grad is not None and grad.is_sparse else grad for grad in grads]
        if not defer and self._deferred is None:
            return self._reduction(
                lambda: self._parts(grads), [grad for grad in grads if grad is not None]
            )
        full = torch.cat(self._parts(grads))
        self._deferred = (
            full.to(self.policy.accumulate_dtype)
            if self._deferred is None
            else self._deferred.add_(full)
        )
        return None if defer else self.flush()

    def add_slice(self, index: int, grad: torch.Tensor, *, defer: bool) -> None:
        """Add the gradient of this rank's slice of slot `index`, already summed over ranks."""
        self._check_deferring(defer)
        self.touched[index] = True
        self._slices.append((index, grad))
        self._keeps_slices = self._keeps_slices or defer

    def discard_deferred(self, index: int) -> None:
        """Drop what was deferred for slot `index`, because the program clears its gradient."""
        if not self.has_deferred:
            return
        # Ranks add up what they have held back: all of them drop it, or none.
        self._transport.ledger.note(
            self.axis, f"clearing held-back gradient {index} of {self.label.text}"
        )
        self.touched[index] = False
        self._slices = [(place, grad) for place, grad in self._slices if place != index]
        self._keeps_slices = bool(self._slices)
        slot = self.layout.slots[index]
        if self._deferred is not None:
            self._deferred[slot.offset : slot.end].zero_()
        if not any(self.touched):
            self._deferred, self.is_lost = None, False

    def lose_deferred(self) -> None:
        """What passes had deferred is incomplete: the program must clear these gradients first."""
        self._deferred, self._keeps_slices = None, False
        self._slices.clear()
        self.is_lost = any(self.touched)

    def abandon(self) -> None:
        """Leave a pass that has raised: `.grad` of hooked parameters is as it was.

        What the pass itself has deferred is dropped. Sums with what earlier passes had deferred
        cannot be taken apart: see `lose_deferred`.
        """
        self.is_open = False
        if not self.had_deferred:
            self._deferred, self._keeps_slices = None, False
        self._slices.clear()
        for index, before in self._before.items():
            self._slots[index].copy_(before)
        self._before.clear()

    def flush(self) -> Reduction | None:
        """The reduction of what was deferred, which the caller has to start."""
        deferred, self._deferred, self._keeps_slices = self._deferred, None, False
        if deferred is None:
            return None
        return self._reduction(lambda: [_flat(deferred, self.policy.reduce_dtype)], [deferred])

    def close(self, touched: Sequence[bool]) -> None:
        """End the pass: show the sum in `.grad`.

        It is shown for parameters that got a gradient on any rank (`touched`) or had one before.
        All ranks must show the same: an optimizer steps on what it finds in `.grad`, and ranks that
        find different ones step on different parameters.
        """
        self.is_open = False
        if self._total is None or self.flat is None:
            return
        if self._slices and not self._keeps_slices:
            if self._content is not Content.CURRENT:  # no reduction has overwritten it
                self._total.zero_()
                self._content = Content.CURRENT
            for index, grad in self._slices:
                self._slice(self._total, index).add_(grad)
            self._slices.clear()
        if self.flat is not self._total:
            self.flat.copy_(self._total)
        shown, hooked = [], self._hooked()
        with plain_functions():
            params = [reference() for reference in self._params]
            trained = [param is not None and param.requires_grad for param in params]
        for index, param in enumerate(params):
            is_shown = trained[index] and (self.continued[index] or touched[index])
            if param is not None and is_shown:
                if index in hooked or index in self._before:
                    self._run_hooks(index, param, is_touched=touched[index])
                param.shown_grad = self._views[index]
                shown.append((index, param))
        for index, _ in shown:
            # Tensors that were gathered from `.grad` are copies: counting the write makes the next
            # use of an old one an error. The version tells `open` whether the program has written
            # since.
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
        """Start the sum of hooked parameters at zero: hooks see what the pass adds, not the sum."""
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

    def _run_hooks(self, index: int, param: Hooked, *, is_touched: bool) -> None:
        before = self._before.pop(index, None)
        view = self._slots[index]
        own = self._show(view.clone(), index)
        with torch.no_grad():
            if is_touched:
                view.copy_(param.hooked(own).local)
            if before is not None:
                view.add_(before)
            if self.flat is not self._total and self._total is not None:
                self._slice(self._total, index).copy_(view)

    def shows(self, grads: Sequence[object], index: int) -> bool:
        """Whether `grads`, of the slots from `index` on, are the views that this object shows."""
        shown = self._views[index : index + len(grads)]
        return len(shown) == len(grads) and all(map(operator.is_, grads, shown))

    def _grads(self) -> list[Slices | None]:
        """The `.grad` of each parameter."""
        params = [reference() for reference in self._params]
        return [None if param is None else param.shown_grad for param in params]

    def _part_from_readers(self, grads: list[Slices | None]) -> list[Slices | None]:
        """Move to new memory if the program has cleared a gradient but still holds it.

        Programs that take gradients per task do this (`old = p.grad; p.grad = None`): the next pass
        would overwrite `old` in silence. Returns what `.grad` shows now.
        """
        shown = list(map(operator.is_, grads, self._views))
        if self.flat is None or self._total is None or all(shown):
            return grads
        # Two references to each shown view are our own: one in `grads`, one in its parameter.
        if self._num_references() - 2 * sum(shown) <= self._num_own:
            return grads
        old, was = self._slots, self._versions
        old_total, old_public = self._total, self.flat
        with torch.inference_mode(False):
            self._total = old_total.clone()
        self._show_total(self._total)
        if self.flat is not self._total:
            self.flat.copy_(old_public)
        for index, reference in enumerate(self._params):
            param = reference()
            if param is not None and shown[index]:
                param.shown_grad = self._views[index]
                # Without this, `open` would mistake the copy for a write by the program.
                if old[index]._version == was[index]:
                    self._versions[index] = self._slots[index]._version
        return self._grads()

    def _num_references(self) -> int:
        """References to the memory and to its views."""
        views: int = sum(map(sys.getrefcount, self._views))
        return views + num_references(self._slots[0])

    def _show_total(self, total: torch.Tensor) -> None:
        """Make the views that `.grad` shows of a new sum."""
        with torch.inference_mode(False):
            same = total.dtype == self.policy.dtype
            self.flat = public = total if same else torch.empty_like(total, dtype=self.policy.dtype)
            self._slots = [self._slice(public, index) for index in range(len(self._params))]
            self._views = [self._show(own, index) for index, own in enumerate(self._slots)]
        self._versions = [-1] * len(self._params)
        self._num_own = self._num_references()

    def _slice(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        piece = self.layout.piece(index, self.axis.index)
        return flat[piece.begin : piece.end]

    def _parts(self, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """Flat pieces that make up the full gradient (layout.numel,) in reduce_dtype, in order.

        Missing gradients and padding are zeros.
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

    def _reduction(
        self, parts: Callable[[], list[torch.Tensor]], reads: Sequence[torch.Tensor]
    ) -> Reduction:
        """Of the full gradient that `parts` makes from the tensors it `reads`."""
        if self._total is None:
            raise RuntimeError("a gradient was reduced before it was opened")
        accumulates = self._content is Content.CURRENT
        self._content = Content.CURRENT
        return Reduction(self._total, self.policy.reduce_dtype, parts, reads, accumulates)


def _flat(grad: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    flat = grad if grad.dim() == 1 else grad.reshape(-1)
    return flat if flat.dtype == dtype else flat.to(dtype)
