"""Gradients: of a storage, this rank's shard of the sum over ranks, shown as views in `.grad`; and
the running backward pass, whose end agrees on flags, waits for reductions and shows them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from bmtrain.distributed.ledger import Ledger
from bmtrain.distributed.transport import Reduction, Transport
from bmtrain.errors import ParameterError
from bmtrain.runtime.mesh import Axis
from bmtrain.runtime.world import check_zero_level
from bmtrain.shard.cut import Cut
from bmtrain.shard.label import Label
from bmtrain.shard.layout import Layout
from bmtrain.shard.sharded import Sharded, cut_like
from bmtrain.shard.slices import Slices
from bmtrain.torch_internals import (
    NO_PASS,
    at_end_of_backward,
    backward_pass,
    in_backward,
    plain_functions,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardPolicy:
    """How a storage is sharded, and the dtypes of its gradient; None is the parameters' dtype."""

    zero_level: int = 3
    reduce_dtype: torch.dtype | None = None
    accumulate_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        check_zero_level(self.zero_level)


class Gradient:
    """Sums the full gradients of a storage over backward passes and shows each slice in `.grad`.

    A backward pass calls `open`, then `add` or `add_slice` any number of times, then `close`. It
    adds to the gradients that are there, in place, as plain PyTorch does. If one was cleared or
    replaced since, which the program may still hold, all move to a new sum. The slice of a
    parameter whose `.grad` is None counts as zero, so clearing gradients launches no kernel. Memory
    that has been cleared is freed in the next forward pass, which needs it for activations.
    """

    def __init__(
        self,
        layout: Layout,
        params: Sequence[weakref.ref[Any]],
        dtype: torch.dtype,
        policy: ShardPolicy,
        device: torch.device,
        transport: Transport,
        label: Label,
        cuts: Sequence[Cut],
    ) -> None:
        self.layout, self.axis, self.label = layout, label.axis, label
        # of the parameters, on the wire, and of the sum over micro-batches
        self._dtype, self._reduce_dtype = dtype, policy.reduce_dtype or dtype
        self._accumulate_dtype = policy.accumulate_dtype or dtype
        self._params = params  # filled in by the storage later
        self._device, self._transport, self._cuts = device, transport, cuts
        pieces = [layout.piece(index, self.axis.index) for index in range(len(cuts))]
        self._ranges = [slice(piece.begin, piece.end) for piece in pieces]
        self._total: torch.Tensor | None = None  # (shard_numel,) in accumulate_dtype
        # The same in the parameters' dtype, shown in `.grad`; one tensor if the dtypes agree.
        self.flat: torch.Tensor | None = None
        self._views: list[Slices | None] = [None] * len(cuts)  # of `flat`, as far as `.grad` shows
        self._version = -1  # of `flat` when it was shown; another one means that it was written
        # Whether reductions are added to the sum. If not, the next one overwrites it.
        self._accumulates = False
        # Slots whose hooks get what the pass adds: what `.grad` held before is added behind them.
        self._hooked: set[int] = set()
        # By slot: gradients of slices, summed over ranks already, added at the end of the pass.
        self._slices: list[tuple[int, torch.Tensor]] = []
        self._keeps_slices = False  # `_slices` are deferred
        self.had_grad = [False] * len(cuts)
        self.touched = [False] * len(cuts)
        self._deferred: torch.Tensor | None = None
        #: whether gradients were held back at the beginning of the pass
        self.had_deferred = False
        #: whether a pass has raised that added to what earlier ones had deferred
        self.is_lost = False
        self.is_open = False

    @property
    def has_hooks(self) -> bool:
        """Whether any parameter has hooks."""
        return any(
            (param := ref()) is not None and (param.grad_hooks or param.post_hooks)
            for ref in self._params
        )

    @property
    def has_deferred(self) -> bool:
        """Whether this rank holds gradients back for a later reduction."""
        return self._deferred is not None or self._keeps_slices or self.is_lost

    def prepare_for_backward(self) -> None:
        """A backward pass may come: free cleared memory, prepare for the reduction.

        Collective the first time.
        """
        # While a pass is writing there it must not be freed.
        if self._total is not None and not self.is_open:
            for reference in self._params:
                param = reference()
                if param is not None and param.shown_grad is not None:
                    break
            else:
                self._total = self.flat = None
                self._views = [None] * len(self._params)
        self._transport.allocate_exchange(self.layout.numel, self._reduce_dtype, self.axis)

    def open(self) -> None:
        """Begin a backward pass: keep what is in `.grad`, drop the rest of the sum."""
        self.is_open = True
        grads, carried, is_kept = list[Any](), list[bool](), list[bool]()
        self.had_grad, self._hooked = [], set()
        is_moved = self.flat is None
        for index, (reference, view) in enumerate(zip(self._params, self._views, strict=True)):
            param = reference()
            grad = None if param is None else param.shown_grad
            has_grad = grad is not None
            is_hooked = param is not None and bool(param.grad_hooks or param.post_hooks)
            if is_hooked:
                self._hooked.add(index)
            grads.append(grad)
            self.had_grad.append(has_grad)
            carried.append(has_grad and not is_hooked)
            is_kept.append(grad is view)
            is_moved |= (has_grad and is_hooked) or (view is not None and grad is not view)
        self._accumulates = any(carried)
        old: Any = self._total if self._accumulates else None
        is_public = self.flat is self._total
        is_intact = self.flat is not None and (is_public or self.flat._version == self._version)
        if is_moved:
            self._views = [
                v if kept else None for v, kept in zip(self._views, is_kept, strict=True)
            ]
            self._total = self.flat = None  # freed before the new sum is allocated
            make = torch.zeros if self._accumulates else torch.empty
            with torch.inference_mode(False):
                self._total = make(
                    self.layout.shard_numel, dtype=self._accumulate_dtype, device=self._device
                )
        total: Any = self._total
        for index, grad in enumerate(grads) if self._accumulates else ():
            own = self._ranges[index]
            if not carried[index]:
                total[own].zero_()
            elif not (is_kept[index] and is_intact):
                # the program has written or replaced it
                total[own].copy_(grad.local)
            elif is_moved:
                total[own].copy_(old[own])
        self.had_deferred = self.has_deferred
        if not self.has_deferred:
            self.touched = [False] * len(self.had_grad)

    def add(self, grads: Sequence[torch.Tensor | None], *, defer: bool) -> Reduction | None:
        """Add one full gradient: a tensor per slot, None for zeros.

        `defer` holds it back on this rank until a later call, which reduces the sum of both.

        Returns:
            The reduction that the caller has to start; None if it is held back.
        """
        dense: list[torch.Tensor | None] = []
        reads: list[torch.Tensor] = []
        with plain_functions():  # ten times as fast
            for index, (reference, grad) in enumerate(zip(self._params, grads, strict=True)):
                param = reference()
                # Frozen since the forward pass: autograd would add no gradient either.
                if grad is None or (param is not None and not param.requires_grad):
                    dense.append(None)
                    continue
                self.touched[index] = True
                reads.append(grad.to_dense() if grad.is_sparse else grad)
                dense.append(reads[-1])
        self._check_deferring(defer)
        if not defer and self._deferred is None:
            return self._reduction(functools.partial(self._parts, dense), reads)
        full = torch.cat(self._parts(dense))
        self._deferred = (
            full.to(self._accumulate_dtype) if self._deferred is None else self._deferred.add_(full)
        )
        return None if defer else self.flush()

    def add_slice(self, index: int, grad: torch.Tensor, *, defer: bool) -> None:
        """Add the gradient of this rank's slice of slot `index`, already summed over ranks."""
        self._check_deferring(defer)
        param = self._params[index]()
        if param is None or param.requires_grad:  # as above
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
        """Leave a pass that has raised: what it has not added to in place is as it was.

        What the pass itself has deferred is dropped. Sums with what earlier passes had deferred
        cannot be taken apart: see `lose_deferred`.
        """
        self.is_open, self._version = False, -1
        if not self.had_deferred:
            self._deferred, self._keeps_slices = None, False
        self._slices.clear()

    def flush(self) -> Reduction | None:
        """The reduction of what was deferred, which the caller has to start."""
        deferred, self._deferred, self._keeps_slices = self._deferred, None, False
        if deferred is None:
            return None
        return self._reduction(lambda: [deferred.to(self._reduce_dtype)], [deferred])

    def close(self, touched: Sequence[bool]) -> None:
        """End the pass: show the sum in `.grad`.

        It is shown for parameters that got a gradient on any rank (`touched`) or had one before.
        All ranks must show the same: an optimizer steps on what it finds in `.grad`, and ranks that
        find different ones step on different parameters.
        """
        self.is_open = False
        total = self._total
        if total is None:
            return
        if self._slices and not self._keeps_slices:
            if not self._accumulates:  # no reduction has overwritten it
                total.zero_()
                self._accumulates = True
            for index, grad in self._slices:
                total[self._ranges[index]].add_(grad)
            self._slices.clear()
        if self.flat is None and total.dtype != self._dtype:
            with torch.inference_mode(False):
                self.flat = torch.empty_like(total, dtype=self._dtype)
        self.flat = flat = total if self.flat is None else self.flat
        if flat is not total:
            flat.copy_(total)
        before, self._views, shown = self._views, [None] * len(self._params), []
        for index, reference in enumerate(self._params):
            param = reference()
            if param is not None and (self.had_grad[index] or touched[index]):
                view, own = before[index], flat[self._ranges[index]]
                if index in self._hooked:
                    self._run_hooks(param, own, index, is_touched=touched[index])
                if view is None or view is not param.shown_grad:
                    view = self._shown(own, index)
                # Who holds what `.grad` showed sees the new sum.
                view.local_tensor = own
                param.shown_grad = self._views[index] = view
                # Tensors that were gathered from `.grad` are copies: counting the write makes the
                # next use of an old one an error.
                view.num_own_writes += 1
                shown.append((index, param))
        self._version = flat._version
        for index, param in shown:
            if touched[index] and index in self._hooked:
                for hook in list(param.post_hooks.values()):
                    hook(param)

    def _run_hooks(self, param: Any, own: torch.Tensor, index: int, *, is_touched: bool) -> None:
        """Hand what the pass adds to the hooks, then add what `.grad` held before."""
        with torch.no_grad():
            if is_touched:
                grad = self._shown(own.clone(), index)
                for hook in list(param.grad_hooks.values()):
                    result = hook(grad)
                    grad = grad if result is None else cut_like(result, param)
                own.copy_(grad.local)
            if param.shown_grad is not None:
                own.add_(param.shown_grad.local)
            if self._total is not None and self.flat is not self._total:
                self._total[self._ranges[index]].copy_(own)

    def _shown(self, local: torch.Tensor, index: int) -> Slices:
        """A slice as `.grad` shows it."""
        out = Sharded(local, self._cuts[index])
        out.is_gradient = True
        return out

    def _check_deferring(self, defer: bool) -> None:
        if (defer or self.has_deferred) and self.has_hooks:
            raise ParameterError(
                "a parameter with hooks got a gradient under reduce_gradients=False: "
                "hooks see the gradient of every pass, summed "
                "over ranks. Call backward without it."
            )

    def shows(self, grads: Sequence[object], index: int) -> bool:
        """Whether `grads`, of the slots from `index` on, are the views that this object shows."""
        shown = self._views[index : index + len(grads)]
        return len(shown) == len(grads) and all(
            view is not None and grad is view for grad, view in zip(grads, shown, strict=True)
        )

    def _parts(self, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """Flat pieces that make up the full gradient (layout.numel,) in reduce_dtype, in order.

        Missing gradients and padding are zeros.
        """
        zeros = functools.partial(torch.zeros, dtype=self._reduce_dtype, device=self._device)
        parts, end = [], 0
        for slot, grad in zip(self.layout.slots, grads, strict=True):
            if slot.offset > end:
                parts.append(zeros(slot.offset - end))
            flat = zeros(slot.numel) if grad is None else grad.reshape(-1)
            parts.append(flat.to(self._reduce_dtype))
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
        # Collectives of one size match whatever they carry: without the note, ranks that reduce in
        # different orders would add up gradients of different storages in silence.
        self._transport.ledger.note(self.axis, f"the gradient of {self.label.text}")
        accumulates, self._accumulates = self._accumulates, True
        return Reduction(self._total, self._reduce_dtype, parts, reads, accumulates)


def any_rank(ledger: Ledger, flags: list[bool], axis: Axis) -> list[bool]:
    """Which flags are true on any rank of the axis.

    Collective on the CPU, so that no device has to be synchronised.
    """
    if axis.size == 1 or not flags:
        return flags
    return list(map(bool, ledger.largest(flags, axis, "parameters with gradients")))


def refuse_create_graph() -> None:
    """ParameterError if a pass with create_graph=True has reached a sharded parameter, or code that
    torch has compiled.

    The reduction is outside of any graph, so the gradient would have none.
    """
    if torch.is_grad_enabled():
        raise ParameterError(
            "backward(create_graph=True) came to a sharded parameter, whose gradient "
            "is summed over ranks outside of any graph, or to compiled code, which torch cannot "
            "differentiate twice. Take gradients of gradients with respect to inputs of the model, "
            "after init_distributed(compile=False), or to whole = param.gather() and compute with "
            "that."
        )


class Backward:
    """The backward pass that is running.

    A gradient that arrives joins the pass; autograd calls `finish` at its end.

    Attributes:
        pass_number: autograd's number of the pass; NO_PASS while none runs.
        reduces: False while autograd takes the gradients of this rank itself.
        replicated: takes part in the end of every pass too.
    """

    def __init__(self, transport: Transport, on_end: Callable[[], None]) -> None:
        self._transport, self._on_end = transport, on_end
        self._gradients: list[Gradient] = []
        self._waiting: list[Gradient] = []  # their gradients are deferred on this rank
        #: those that backward has reached and not ended, of class Use, in that order
        self.uses: dict[Any, None] = {}
        self.pass_number = NO_PASS
        # Called by autograd at the end of the pass. Autograd alone keeps it, so it dies with a pass
        # that raises.
        self._end: weakref.ref[object] | None = None
        self.replicated: Any = None  # the ordinary parameters, once there are some
        self._deferring = False
        self.reduces = True

    @property
    def has_deferred(self) -> bool:
        """Whether this rank holds gradients back for a later reduction."""
        return any(gradient.has_deferred for gradient in self._waiting)

    @contextlib.contextmanager
    def deferring(self) -> Iterator[None]:
        """Backward passes inside keep gradients on this rank.

        The first pass outside reduces them all, or else `flush`.
        """
        before, self._deferring = self._deferring, True
        try:
            yield
        finally:
            self._deferring = before

    @contextlib.contextmanager
    def not_reducing(self) -> Iterator[None]:
        """Autograd gets the full gradients of this rank from the nodes of the graph."""
        before, self.reduces = self.reduces, False
        try:
            yield
        finally:
            self.reduces = before

    def begin_use(self, use: Any) -> None:
        """Backward has reached `use`: drop the uses it has left behind that nothing will end.

        Without this, the buffers of frozen blocks would stay resident until the end of the pass.
        """
        self.join()
        # Not from inside a pipeline: a drop may reduce gradients over all ranks, and the stages
        # reach this point one after the other. The first would wait for ranks that wait for its
        # gradients: deadlock.
        for other in () if use.is_repeated else list(self.uses):
            if other.order > use.order and other.is_droppable:
                other.release_all()
                self.uses.pop(other, None)
        self.uses.setdefault(use)

    def add(self, found: Sequence[tuple[Gradient, Sequence[torch.Tensor | None]]]) -> None:
        """Reduce full gradients of storages; inside `deferring`, keep them on this rank."""
        self.join()
        # Those of one axis and dtype together.
        together: dict[tuple[str, torch.dtype], tuple[Axis, list[Reduction]]] = {}
        for gradient, grads in found:
            self._open(gradient)
            reduction = gradient.add(grads, defer=self._deferring)
            if reduction is not None:
                key, axis = (gradient.axis.name, reduction.dtype), gradient.axis
                together.setdefault(key, (axis, []))[1].append(reduction)
        for axis, members in together.values():
            self._transport.reduce(members, axis)

    def add_slice(self, gradient: Gradient, index: int, grad: torch.Tensor) -> None:
        """Add the gradient of this rank's slice of slot `index`, already summed over ranks.

        Raises:
            ParameterError: inside `not_reducing`: no rank has its own part of the sum.
        """
        if not self.reduces:
            raise ParameterError(
                "torch.autograd.grad in a backward pass came to a sharded parameter whose slices "
                "were computed with: compute with whole = param.gather(), and differentiate with "
                "respect to that."
            )
        self.join()
        self._open(gradient)
        gradient.add_slice(index, grad, defer=self._deferring)

    def _open(self, gradient: Gradient) -> None:
        if not gradient.is_open:
            gradient.open()
            self._gradients.append(gradient)

    def finish(self) -> None:
        """End the pass. Called by autograd after the last node; harmless when nothing is open."""
        self.pass_number = NO_PASS
        for use in list(self.uses):
            use.release_all()
        self.uses.clear()
        self._close(flushes=not self._deferring)
        self._on_end()

    def flush(self) -> None:
        """Reduce what `deferring` held back and no later backward pass has reduced. Collective.

        Raises:
            ParameterError: if a pass has raised since, and part of the sum is lost.
        """
        self.abandon_if_dead()
        self._refuse_lost()
        self._waiting = [gradient for gradient in self._waiting if gradient.has_deferred]
        if self._waiting:
            self._close(flushes=True)

    def _close(self, *, flushes: bool) -> None:
        """Show the finished gradients, as all ranks agree; deferred ones stay hidden."""
        for gradient in self._waiting if flushes else ():
            self._open(gradient)
            reduction = gradient.flush()
            if reduction is not None:
                self._transport.reduce([reduction], gradient.axis)
        if flushes:
            self._waiting.clear()
        done: list[Gradient] = []
        by_axis: dict[str, list[Gradient]] = {}
        for gradient in self._gradients:
            gradient.is_open = False
            if not gradient.has_deferred:
                done.append(gradient)
                by_axis.setdefault(gradient.axis.name, []).append(gradient)
            elif gradient not in self._waiting:
                self._waiting.append(gradient)
        # For each slot of each gradient, whether any rank that shares it has touched it. All ranks
        # of an axis bring the same gradients in the same order, and every rank goes through the
        # axes in the order of their names: in different orders they would wait for each other, a
        # deadlock.
        touched: dict[Gradient, list[bool]] = {}
        for name in sorted(by_axis):
            members = by_axis[name]
            # A rank adds to its own slices: where one has cleared them and another has not, the
            # gradient is a sum of nothing that one process computes.
            added = [flag for gradient in members for flag in gradient.had_grad]
            ledger, axis = self._transport.ledger, members[0].axis
            ledger.note(
                axis,
                f"the end of a backward pass with {len(members)} gradients ({sum(added)} of "
                f"{len(added)} parameters had one before: {zlib.crc32(bytes(added)):08x})",
            )
            own = [flag for gradient in members for flag in gradient.touched]
            flags = iter(any_rank(ledger, own, axis))
            for gradient in members:
                touched[gradient] = list(itertools.islice(flags, len(gradient.touched)))
        # `close` reads and writes the sums on the compute stream. Without this wait it would race
        # with the reductions in flight, and so would the optimizer.
        self._transport.wait_for_reductions()
        try:
            for gradient in done:
                gradient.close(touched[gradient])
        except BaseException:  # of a hook: else the next pass would close these gradients again
            self.abandon()
            raise
        # Collectives too: at this place on every rank.
        try:
            if self.replicated is not None:
                self.replicated.reduce()
        finally:  # what one of them refuses must not come up in the next pass
            self._gradients.clear()

    def join(self) -> None:
        """A gradient has arrived: make sure that the pass ends with `finish`."""
        pass_number = backward_pass()
        if pass_number in (self.pass_number, NO_PASS):
            return
        if self.pass_number != NO_PASS and (self._end is None or self._end() is None):
            self.abandon()  # it has raised, and nothing was gathered since
        if self.pass_number != NO_PASS:
            self._refuse_hooks()
            # A pass inside a pass, as reentrant checkpointing runs one. Autograd tells only the
            # number of the innermost, so what the outer pass has brought so far is shown now.
            self.finish()
        self._refuse_lost()
        self.pass_number = pass_number
        end = functools.partial(self.finish)
        self._end = weakref.ref(end)
        at_end_of_backward(end)

    def abandon_if_dead(self) -> None:
        """Drop a pass that an exception has ended: outside of backward none can be running."""
        if self.pass_number != NO_PASS and not in_backward():
            self.abandon()

    def _refuse_lost(self) -> None:
        """ParameterError while a sum over micro-batches is incomplete."""
        for gradient in self._waiting:
            if gradient.is_lost:
                raise ParameterError(
                    "a backward pass raised while gradients were held back "
                    "(reduce_gradients=False): part of their sum is lost. Clear the gradients "
                    "(manager.zero_grad()) and begin with the first micro-batch again."
                )

    def _refuse_hooks(self) -> None:
        """ParameterError if hooks would see a gradient in two parts.

        A nested pass ends the outer one early: a hook would be called with what had arrived by
        then, and again with the rest.
        """
        if any(gradient.has_hooks for gradient in self._gradients):
            raise ParameterError(
                "a parameter with hooks got a gradient in a backward pass that runs "
                "another one inside, as reentrant checkpoints do: call them with "
                "use_reentrant=False, or change `.grad` later."
            )

    def abandon(self) -> None:
        """Drop a pass that an exception has ended.

        Nothing here is collective: other ranks may not have failed, and would not come.
        """
        self.pass_number = NO_PASS
        for use in list(self.uses):
            use.release_all()
        # Gradients are put back on the compute stream, and the next pass reads and writes the sums
        # there. Without this wait, a reduction in flight could overwrite both.
        self._transport.wait_for_reductions()
        is_incomplete = any(
            each.had_deferred if each.is_open else each.has_deferred for each in self._waiting
        )
        for gradient in self._gradients:
            gradient.abandon()
        if is_incomplete:
            self._waiting = list(dict.fromkeys([*self._waiting, *self._gradients]))
            for gradient in self._waiting:
                gradient.lose_deferred()
        self.uses.clear()
        self._gradients.clear()
        if self.replicated is not None:
            self.replicated.discard()
        self._on_end()
