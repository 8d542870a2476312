"""The running backward pass, and its end: agree on flags, wait for reductions, show `.grad`."""

from __future__ import annotations

import contextlib
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
from bmtrain.shard.gradient import Gradient
from bmtrain.torch_internals import NO_PASS, at_end_of_backward, backward_pass, in_backward


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
        for gradient in done:
            gradient.close(touched[gradient])
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
