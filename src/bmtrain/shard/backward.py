"""What one backward pass leaves to do at its end: reductions to wait for, flags to agree on,
`.grad` to show.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

from bmtrain.distributed.transport import Transport
from bmtrain.errors import ParameterError
from bmtrain.runtime.mesh import Axis
from bmtrain.shard.gradient import Gradient
from bmtrain.shard.replicated import Replicated
from bmtrain.shard.tape import Taping
from bmtrain.torch_internals import at_end_of_backward, backward_pass, in_backward


class OpenUse(Protocol):
    """A use of gathered parameters that backward has begun to read."""

    order: int  # of calls: later ones have higher numbers, and backward comes to them earlier
    # whether backward comes to it again and again, for the micro-batches of a pipelined pass
    is_repeated: bool

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
    """

    def __init__(
        self, transport: Transport, world: Axis, taping: Taping, on_finish: Callable[[], None]
    ) -> None:
        self._transport, self._world, self._taping, self._on_finish = (
            transport,
            world,
            taping,
            on_finish,
        )
        self._gradients: list[Gradient] = []
        self._waiting: list[Gradient] = []  # their gradients are kept on this rank for now
        self._uses: list[OpenUse] = []
        self._task = -1
        self._deferring = False
        self.replicated = Replicated(world, taping, self._join)

    @property
    def has_deferred(self) -> bool:
        """Whether gradients wait on this rank for a later reduction."""
        return any(gradient.has_deferred for gradient in self._waiting)

    @contextlib.contextmanager
    def deferring(self) -> Iterator[None]:
        """Backward passes inside keep gradients on this rank; the first one outside, or `flush`,
        reduces them all.
        """
        self._taping.refuse(
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
        self._join()
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
        self._join()
        if not gradient.is_open:
            gradient.open()
            self._gradients.append(gradient)
        if not self._deferring:
            self._note_reduction(gradient)
        gradient.add(grads, defer=self._deferring)

    def add_slice(self, gradient: Gradient, index: int, grad: torch.Tensor) -> None:
        """Take the gradient of this rank's slice of slot `index`, summed over ranks already."""
        self._join()
        if not gradient.is_open:
            gradient.open()
            self._gradients.append(gradient)
        gradient.add_slice(index, grad, defer=self._deferring)

    def is_replicated(self, param: torch.nn.Parameter) -> bool:
        """Whether gradients of an ordinary parameter are summed over ranks."""
        return self._world.size == 1 or param in self.replicated

    def finish(self) -> None:
        """End the pass. Called by autograd after the last node; harmless when nothing is open."""
        self._task = -1
        for use in self._uses:
            use.drop()
        self._uses.clear()
        if not self._deferring:
            self._flush_deferred()
        self._close()
        self._on_finish()

    def flush(self) -> None:
        """Reduce what `deferring` kept back, when no later backward pass did. Collective."""
        self._taping.refuse(
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
            self._taping.now_and_after_replays(functools.partial(gradient.close, flags))
        self.replicated.reduce()
        self._gradients.clear()

    def _join(self) -> None:
        task = backward_pass()
        if task in (self._task, -1):
            return
        if self._task != -1:
            self._refuse_hooks()
            # a pass inside a pass, as reentrant checkpointing makes them: what is there is shown
            # now
            self.finish()
        self._task = task
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

    def abandon_if_dead(self) -> None:
        """Forget a pass that an exception ended.

        Called outside of backward passes, where none can be open.
        """
        if self._task == -1 or in_backward():
            return
        self._task = -1
        for use in self._uses:
            use.drop()
        for gradient in self._gradients:
            gradient.abandon()
        self._uses.clear()
        self._gradients.clear()
        self.replicated.discard()
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
                self._taping.any_rank(
                    [flag for gradient in members for flag in gradient.touched], members[0].axis
                )
            )
            agreed.update(
                {gradient: [next(flags) for _ in gradient.touched] for gradient in members}
            )
        return [agreed[gradient] for gradient in gradients]
