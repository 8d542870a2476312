"""The gradient of one storage: this rank's part of the sum over ranks, and its views in the parameters' `.grad`."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Sequence

import torch

from bmtrain.runtime.mesh import Axis
from bmtrain.shard.layout import Layout
from bmtrain.shard.transport import Outgoing, Transport

# Bytes. Smaller gradients stay where they are when they are cleared: making them anew costs the host 50 us, and a small model waits
# for its host.
LEAST_FREED = 2**24


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradientPolicy:
    """Dtypes of a storage's gradient: of the parameters, on the wire and in the sum over micro-batches."""

    dtype: torch.dtype
    reduce_dtype: torch.dtype
    accumulate_dtype: torch.dtype


class Gradient:
    """Collects full gradients of a storage during backward passes; afterwards each parameter's `.grad` is its slice.

    Life of one backward pass: `open` (look what the user left in `.grad`), `add` any number of times, then `close`.
    Values of parameters whose `.grad` is None count as zero, so clearing gradients is as cheap as the user's loop makes it.
    Memory of cleared gradients, if it is much, is free in the next forward pass, where activations take it, until gradients are
    there again.
    """

    def __init__(
        self,
        layout: Layout,
        params: Sequence[weakref.ref[torch.nn.Parameter]],
        policy: GradientPolicy,
        device: torch.device,
        transport: Transport,
        axis: Axis,
    ) -> None:
        self.layout, self.policy, self.axis = layout, policy, axis
        self._params, self._device, self._transport = params, device, transport
        self._total: torch.Tensor | None = None  # (shard_numel,) in accumulate_dtype
        self._public: torch.Tensor | None = None  # the same in the parameters' dtype: what `.grad` shows
        self._views: list[torch.Tensor] = []
        self._versions: list[int] = []
        self._live = [False] * len(layout.slots)
        self._touched = [False] * len(layout.slots)
        self._deferred: torch.Tensor | None = None
        self._empty = True
        self._is_filled = False  # whether all of `_total` has been written since it was allocated, padding too
        self._stays = False  # a graph knows where it is
        self.is_open = False

    @property
    def flat(self) -> torch.Tensor | None:
        """This rank's gradient of all slots, padding zero: (shard_numel,) in the parameters' dtype. None where there is none."""
        return self._public

    @property
    def touched(self) -> list[bool]:
        """Per slot: whether this backward pass has produced a gradient for it on this rank."""
        return list(self._touched)

    @property
    def has_deferred(self) -> bool:
        """Whether gradients wait on this rank for a later reduction."""
        return self._deferred is not None

    def expect(self) -> None:
        """A backward pass may come. Collective the first time."""
        self._free_if_cleared()
        self._transport.expect(self.layout.numel, self.policy.reduce_dtype, self.axis)

    def open(self) -> None:
        """Begin a backward pass: keep what lives in `.grad`, forget the rest."""
        self.is_open = True
        grads = self._grads()
        self._live = [grad is not None for grad in grads]
        self._empty = not any(self._live)
        self._allocate()
        for index, grad in enumerate(grads):
            if grad is not None:
                self._take_over(index, grad)
        if not self._empty:
            for index, live in enumerate(self._live):
                if not live and self._total is not None:
                    self._slice(self._total, index).zero_()
        if self._deferred is None:
            self._touched = [False] * len(self._live)

    def add(self, grads: Sequence[torch.Tensor | None], *, defer: bool) -> None:
        """Add one full gradient, a tensor per slot or None for zeros. `defer` keeps it on this rank until a later call."""
        self._touched = [t or g is not None for t, g in zip(self._touched, grads, strict=True)]
        if not defer and self._deferred is None:
            self._reduce(lambda: self._parts(grads), [grad for grad in grads if grad is not None])
            return
        full = torch.cat(self._parts(grads))
        self._deferred = full.to(self.policy.accumulate_dtype) if self._deferred is None else self._deferred.add_(full)
        if not defer:
            self.flush()

    def discard_deferred(self) -> None:
        """Forget what was deferred."""
        self._deferred = None

    def flush(self) -> None:
        """Reduce what was deferred."""
        deferred, self._deferred = self._deferred, None
        if deferred is not None:
            self._reduce(lambda: [_flat(deferred, self.policy.reduce_dtype)], [deferred])

    def close(self, touched: Sequence[bool]) -> None:
        """End the pass: show the sum in `.grad` of parameters that got a gradient on any rank (`touched`) or had one before."""
        self.is_open = False
        if self._total is None or self._public is None:
            return
        if self._public is not self._total:
            self._public.copy_(self._total)
        for index, reference in enumerate(self._params):
            param = reference()
            if param is not None and param.requires_grad and (self._live[index] or touched[index]):
                param.grad = self._views[index]
                self._versions[index] = self._views[index]._version

    def settle(self) -> tuple[bool, ...]:
        """Between passes: `.grad` moves to where `close` leaves it, for good, whatever the user has put there.

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
        return tuple([param is not None and param.requires_grad for param in (reference() for reference in self._params)])

    def hide(self, given: Sequence[bool]) -> None:
        """Take back what has been shown since `settle` returned `given`: no gradient was computed after all."""
        for reference, had in zip(self._params, given, strict=True):
            param = reference()
            if param is not None and not had:
                param.grad = None

    def shows(self, param: torch.nn.Parameter, index: int) -> bool:
        """True if `param.grad` is the slice that this object wrote."""
        return bool(self._views) and param.grad is self._views[index]

    def _grads(self) -> list[torch.Tensor | None]:
        """What is in `.grad` of the parameters."""
        return [None if param is None else param.grad for param in (reference() for reference in self._params)]

    def _free_if_cleared(self) -> None:
        if self._total is None or self._total.nbytes < LEAST_FREED or self._stays or self.is_open:
            return
        if any(grad is not None for grad in self._grads()):
            return
        self._total = self._public = None
        self._views = []

    def _allocate(self) -> None:
        """Memory, unless there is some: zeros if the user's gradients fill it in part, else anything, for a sum will fill it."""
        if self._total is None:
            policy, numel = self.policy, self.layout.shard_numel
            with torch.inference_mode(False):
                self._total = torch.empty(numel, dtype=policy.accumulate_dtype, device=self._device)
                same = policy.accumulate_dtype == policy.dtype
                self._public = self._total if same else torch.empty(numel, dtype=policy.dtype, device=self._device)
                self._views = [self._slice(self._public, index) for index in range(len(self._params))]
            self._versions, self._is_filled = [-1] * len(self._params), False
        if not (self._empty or self._is_filled):
            self._total.zero_()
            self._is_filled = True

    def _slice(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        piece = self.layout.piece(index, self.axis.index)
        return flat[piece.begin : piece.end]

    def _take_over(self, index: int, grad: torch.Tensor) -> None:
        """Make the sum equal to what the user left in `.grad`, if that is not what `close` put there."""
        view = self._views[index]
        untouched = grad is view and view._version == self._versions[index]
        if untouched or self._total is None:
            return
        if grad is not view:
            view.copy_(grad)
        if self._public is not self._total:
            self._slice(self._total, index).copy_(view)

    def _parts(self, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """One behind the other the full gradient (layout.numel,) in reduce_dtype, zeros in padding and in place of missing ones."""
        zeros = functools.partial(torch.zeros, dtype=self.policy.reduce_dtype, device=self._device)
        parts, end = [], 0
        for slot, grad in zip(self.layout.slots, grads, strict=True):
            if slot.offset > end:
                parts.append(zeros(slot.offset - end))
            parts.append(zeros(slot.numel) if grad is None else _flat(grad, self.policy.reduce_dtype))
            end = slot.end
        if self.layout.numel > end:
            parts.append(zeros(self.layout.numel - end))
        return parts

    def _reduce(self, parts: Callable[[], list[torch.Tensor]], reads: Sequence[torch.Tensor]) -> None:
        """Reduce the full gradient that `parts` makes, out of the tensors that it `reads`."""
        if self._total is None:
            raise RuntimeError("a gradient was reduced before it was opened")
        outgoing = Outgoing(self.policy.reduce_dtype, parts, reads)
        self._transport.reduce(self._total, outgoing, self.axis, accumulate=not self._empty)
        self._empty, self._is_filled = False, True


def _flat(grad: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    flat = grad if grad.dim() == 1 else grad.reshape(-1)
    return flat if flat.dtype == dtype else flat.to(dtype)
