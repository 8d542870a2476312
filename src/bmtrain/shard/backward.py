"""What one backward pass leaves to do at its end: reductions to wait for, flags to agree on,
`.grad` to show.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol

import torch

from bmtrain.distributed.ledger import Ledger
from bmtrain.distributed.transport import Transport
from bmtrain.errors import ParameterError
from bmtrain.runtime.mesh import Axis
from bmtrain.shard.gradient import Gradient
from bmtrain.torch_internals import at_end_of_backward, backward_pass

NO_PASS: Final = -1  # the number of a backward pass where there is none
Work = Callable[[], object]
# For a part of a pass that is computed twice, a context for each time: both draw the same random
# numbers.
Draws = Iterator[contextlib.AbstractContextManager[object]]


class Tape(Protocol):
    """Takes over the host's part of a pass that will be repeated without the host."""

    is_capturing: bool  # whether the device only notes down what it is given
    after: list[Work]  # for after each repetition

    def any_rank(self, flags: list[bool], ask: Callable[[], list[bool]]) -> list[bool]:
        """`ask()`, or what it has answered before."""

    def number(self, value: Callable[[], float], device: torch.device) -> float | torch.Tensor:
        """`value()`, as it is in each repetition."""

    def draws(self) -> Draws:
        """The contexts of the next part of the pass that is computed twice."""

    def refuse(self, what: str) -> None:
        """Raise if the pass cannot be repeated because of `what`."""


class HostSteps:
    """What the host does in passes beside giving the device its work. One per run.

    Attributes:
        tape: what takes it over; None in a pass that is not to be repeated.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.tape: Tape | None = None

    @property
    def is_capturing(self) -> bool:
        """Whether the device only notes down what it is given."""
        return self.tape is not None and self.tape.is_capturing

    def any_rank(self, flags: list[bool], axis: Axis) -> list[bool]:
        """Which flags are true on any rank of the axis. Travels on the CPU: no device waits."""
        if axis.size == 1 or not flags:
            return flags
        if self.tape is None:
            return [bool(flag) for flag in self._ledger.largest(flags, axis)]
        return self.tape.any_rank(
            flags, lambda: [bool(flag) for flag in self._ledger.largest(flags, axis)]
        )

    def number(self, value: Callable[[], float], device: torch.device) -> float | torch.Tensor:
        """`value()`, as it is in each pass: on a tape a 0-dim fp32 tensor on `device`, filled
        before each repetition.
        """
        return value() if self.tape is None else self.tape.number(value, device)

    def now_and_again(self, work: Work) -> None:
        """Do `work` now, and again after each repetition of this pass."""
        work()
        if self.tape is not None:
            self.tape.after.append(work)

    def when_computed(self, work: Work) -> None:
        """Do `work`, which needs values on the host, now; after each repetition, while the device
        only notes down what it is given.
        """
        if self.tape is not None and self.tape.is_capturing:
            self.tape.after.append(work)
        else:
            work()

    def draws(self) -> Draws:
        """The contexts of the next part of the pass that is computed twice.

        Without a tape they do nothing: there the state of a generator can be read, and set again.
        """
        return (
            itertools.repeat(contextlib.nullcontext()) if self.tape is None else self.tape.draws()
        )

    def refuse(self, what: str) -> None:
        """Raise if the pass is being captured, and cannot be because of `what`."""
        if self.tape is not None:
            self.tape.refuse(what)


class Participant(Protocol):
    """What takes part in every backward pass beside the gradients of storages."""

    def reduce(self) -> None:
        """The pass is over. Collective."""

    def discard(self) -> None:
        """The pass has failed: forget what it has left."""


class OpenUse(Protocol):
    """A use of gathered parameters that backward has begun to read."""

    order: int  # of calls: later ones have higher numbers, and backward comes to them earlier

    @property
    def is_repeated(self) -> bool:
        """Whether backward comes to it again and again, for the micro-batches of a pipelined
        pass.
        """

    @property
    def is_droppable(self) -> bool:
        """Whether no gradient will end this use (all its parameters are frozen, say) and no code is
        running in it.
        """

    def drop(self) -> None:
        """Let go of the full buffers."""


def refuse_create_graph() -> None:
    """ParameterError in a pass with create_graph=True that has come to a sharded parameter: its
    gradient would have no graph.
    """
    if torch.is_grad_enabled():
        raise ParameterError(
            "backward(create_graph=True) came to a sharded parameter, whose gradient "
            "is summed over ranks outside of any graph. "
            "Take gradients of gradients with respect to inputs of the model, or to "
            "whole = param.gather() and compute with that."
        )


class Backward:
    """The current backward pass.

    Joined by gradients as they arrive; finished by autograd itself when the pass is over.

    Attributes:
        task: autograd's number of the pass; NO_PASS where there is none.
        participants: what is called at the end of each pass, too.
    """

    def __init__(
        self, transport: Transport, host: HostSteps, on_finish: Callable[[], None]
    ) -> None:
        self._transport, self._host, self._on_finish = transport, host, on_finish
        self._gradients: list[Gradient] = []
        self._waiting: list[Gradient] = []  # their gradients are kept on this rank for now
        self._uses: list[OpenUse] = []
        self.task = NO_PASS
        self.participants: list[Participant] = []
        self._deferring = False

    @property
    def has_deferred(self) -> bool:
        """Whether gradients wait on this rank for a later reduction."""
        return any(gradient.has_deferred for gradient in self._waiting)

    @contextlib.contextmanager
    def deferring(self) -> Iterator[None]:
        """Backward passes inside keep gradients on this rank; the first one outside, or `flush`,
        reduces them all.
        """
        self._host.refuse(
            "reduce_gradients=False keeps gradients back on the host's account: call "
            "backward without it"
        )
        before, self._deferring = self._deferring, True
        try:
            yield
        finally:
            self._deferring = before

    def begin_use(self, use: OpenUse) -> None:
        """Backward reads `use` from now on; uses that it has left behind and that nothing will end
        are dropped.
        """
        self.join()
        # Not from inside a pipeline, which the stages enter one after the other: dropping may
        # reduce gradients over all ranks.
        left = (
            []
            if use.is_repeated
            else [u for u in self._uses if u.order > use.order and u.is_droppable]
        )
        for other in left:
            other.drop()
            self._uses.remove(other)
        if use not in self._uses:
            self._uses.append(use)

    def end_use(self, use: OpenUse) -> None:
        """All gradients of `use` are computed."""
        use.drop()
        if use in self._uses:
            self._uses.remove(use)

    def add(self, gradient: Gradient, grads: Sequence[torch.Tensor | None]) -> None:
        """Reduce one full gradient of a storage."""
        self.join()
        if not gradient.is_open:
            gradient.open()
            self._gradients.append(gradient)
        if not self._deferring:
            self._note_reduction(gradient)
        gradient.add(grads, defer=self._deferring)

    def add_slice(self, gradient: Gradient, index: int, grad: torch.Tensor) -> None:
        """Take the gradient of this rank's slice of slot `index`, summed over ranks already."""
        self.join()
        if not gradient.is_open:
            gradient.open()
            self._gradients.append(gradient)
        gradient.add_slice(index, grad, defer=self._deferring)

    def finish(self) -> None:
        """End the pass. Called by autograd after the last node; harmless when nothing is open."""
        self.task = NO_PASS
        for use in self._uses:
            use.drop()
        self._uses.clear()
        if not self._deferring:
            self._flush_deferred()
        self._close()
        self._on_finish()

    def flush(self) -> None:
        """Reduce what `deferring` kept back, when no later backward pass did. Collective."""
        self._host.refuse(
            "gradients were clipped or applied inside: call clip_grad_norm and step after "
            "the function"
        )
        self._waiting = [gradient for gradient in self._waiting if gradient.has_deferred]
        if self._waiting:
            self._flush_deferred()
            self._close()

    def _flush_deferred(self) -> None:
        for gradient in self._waiting:
            if gradient not in self._gradients:
                gradient.open()
                self._gradients.append(gradient)
            if gradient.has_deferred:
                self._note_reduction(gradient)
            gradient.flush()
        self._waiting.clear()

    def _note_reduction(self, gradient: Gradient) -> None:
        """Ranks that reduce gradients in different orders must not mix them up."""
        self._transport.ledger.note(gradient.axis, f"the gradient of {gradient.label.text}")

    def _close(self) -> None:
        """Show the finished gradients, agreed by all ranks; those kept back stay hidden."""
        self._waiting += [
            gradient
            for gradient in self._gradients
            if gradient.has_deferred and gradient not in self._waiting
        ]
        done = [gradient for gradient in self._gradients if not gradient.has_deferred]
        for gradient in self._gradients:
            gradient.is_open = False
        touched = self._agree(done)
        self._transport.wait_for_reductions()
        for gradient, flags in zip(done, touched, strict=True):
            self._host.now_and_again(functools.partial(gradient.close, flags))
        for participant in self.participants:
            participant.reduce()
        self._gradients.clear()

    def join(self) -> None:
        """A gradient has arrived: the pass must end with `finish`."""
        task = backward_pass()
        if task in (self.task, NO_PASS):
            return
        if self.task != NO_PASS:
            self._refuse_hooks()
            # a pass inside a pass, as reentrant checkpointing makes them: what is there is shown
            # now
            self.finish()
        self.task = task
        at_end_of_backward(self.finish)

    def _refuse_hooks(self) -> None:
        """A hook would be called with a part of what the pass gives its parameter, and again with
        the rest.
        """
        if any(gradient.has_hooks for gradient in self._gradients):
            raise ParameterError(
                "a parameter with hooks got a gradient in a backward pass that runs "
                "another one inside, as reentrant checkpoints "
                "and recomputed blocks with TorchScript do: give those blocks "
                "use_checkpoint=False, or change `.grad` later."
            )

    def abandon(self) -> None:
        """Forget a pass that an exception has ended."""
        self.task = NO_PASS
        for use in self._uses:
            use.drop()
        for gradient in self._gradients:
            gradient.abandon()
        self._uses.clear()
        self._gradients.clear()
        for participant in self.participants:
            participant.discard()
        self._transport.wait_for_reductions()
        self._on_finish()

    def _agree(self, gradients: Sequence[Gradient]) -> list[list[bool]]:
        """For each slot of each gradient, whether any rank that shares it has touched it.

        Ranks of one axis have the same gradients on it, in the same order; every rank takes the
        axes in the same order.
        """
        by_axis: dict[str, list[Gradient]] = {}
        for gradient in gradients:
            by_axis.setdefault(gradient.axis.name, []).append(gradient)
        agreed: dict[Gradient, list[bool]] = {}
        for name in sorted(by_axis):
            members = by_axis[name]
            self._transport.ledger.note(
                members[0].axis, f"the end of a backward pass with {len(members)} gradients"
            )
            flags = iter(
                self._host.any_rank(
                    [flag for gradient in members for flag in gradient.touched], members[0].axis
                )
            )
            agreed.update(
                {gradient: [next(flags) for _ in gradient.touched] for gradient in members}
            )
        return [agreed[gradient] for gradient in gradients]
