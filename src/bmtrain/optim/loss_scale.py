"""Dynamic loss scaling: keeps small fp16 gradients representable without overflowing large ones."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable

import torch

from bmtrain.distributed.agreement import HostCopy
from bmtrain.errors import ConfigurationError
from bmtrain.kernels.scale import scale_
from bmtrain.optim.flat import gradients_of, parameters_of, spans_of
from bmtrain.runtime.arguments import BOUND, POSITIVE, SIZE, check
from bmtrain.runtime.log import tell, warn
from bmtrain.runtime.world import World
from bmtrain.shard.engine import Engine


class LossScale:
    """A dynamic loss scale: shrinks on overflow, grows after `growth_steps` good steps in a row.

    Runs that need none have one that is always 1: skipped steps are counted alike.

    Source: Micikevicius et al., "Mixed Precision Training" (2018), section 3.2.

    Attributes:
        num_skipped: steps that were skipped.
        num_in_a_row: those since the last good step at which the scale was the smallest already, so
            that it is not what made them overflow. A scale whose factor is 1 is always that.
        factor: that of the constructor, or 1 divided by it where that is less than 1.

    Raises:
        ConfigurationError: for values out of range.
    """

    def __init__(
        self,
        value: float,
        factor: float = 2.0,
        growth_steps: int = 1024,
        minimum: float = 1.0,
        maximum: float = math.inf,
    ) -> None:
        check(
            "loss scaling",
            loss_scale=(value, POSITIVE),
            factor=(factor, POSITIVE),
            steps=(growth_steps, SIZE),
            min=(minimum, POSITIVE),
            max=(maximum, BOUND),
        )
        if minimum > maximum:
            raise ConfigurationError(
                f"loss scaling got min={minimum}, max={maximum}: expected min <= max."
            )
        self.factor, self.growth_steps = max(factor, 1 / factor), growth_steps
        self.minimum, self.maximum = minimum, maximum
        self._value = min(max(float(value), minimum), maximum)
        self.good_steps = 0
        self.num_skipped = self.num_in_a_row = 0
        #: of a step that the device skips if this number, on its way here, is not finite; and what
        #: undoes then what the host did for the step
        self.awaited: tuple[HostCopy, Callable[[], None]] | None = None

    def __str__(self) -> str:
        """What must be the same on all ranks, once the last step is known to be good or bad."""
        return (
            f"loss scale {self._value:.17g}, factor {self.factor:g} after {self.growth_steps} "
            f"steps, {self.good_steps} done, from {self.minimum:g} to {self.maximum:g}"
        )

    @property
    def value(self) -> float:
        """The scale for the next loss. Waits until the last step is known to be good or bad, unless
        the scale is the same in either case.
        """
        if self.minimum < self.maximum:
            self.wait()
        return self._value

    @property
    def num_good(self) -> int:
        """Good steps since the scale last changed. Waits as `value` does."""
        self.wait()
        return self.good_steps

    def judge(self, is_finite: bool) -> None:
        """Update the scale after a step whose gradients were all finite, or not."""
        if is_finite:
            self.num_in_a_row = 0
            self.good_steps += 1
            if self.good_steps >= self.growth_steps:
                self._value = min(self._value * self.factor, self.maximum)
                self.good_steps = 0
            return
        self.num_skipped += 1
        self.num_in_a_row += self._value in (self.minimum, self._value / self.factor)
        self.shrink()

    def wait(self) -> None:
        """Wait for the pending check, if any, and act on it."""
        awaited, self.awaited = self.awaited, None
        if awaited is not None:
            is_finite = math.isfinite(awaited[0].values()[0])
            if not is_finite:
                awaited[1]()
            self.judge(is_finite)

    def shrink(self) -> None:
        """Lower the scale after an overflow, and say that the step is skipped."""
        self.good_steps = 0
        if self.minimum == self.maximum:
            tell(
                "the loss or a gradient is not finite, or so large that Adam's second moment would "
                "be infinite for good: the step is skipped on all ranks "
                f"({self.num_in_a_row} in a row, {self.num_skipped} in all)"
            )
            return
        if self._value <= self.minimum:
            warn(
                f"gradients overflow at the smallest loss scale {self.minimum}: the step "
                "is skipped; the loss may be diverging."
            )
        before, self._value = self._value, max(self._value / self.factor, self.minimum)
        tell(f"gradient overflow: loss scale {before:g} -> {self._value:g}, the step is skipped")

    def state_dict(self) -> dict[str, float]:
        """The state for `load_state_dict`."""
        return {"value": self.value, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, float] | float) -> None:
        """Restore a saved state; a plain number, as BMTrain saves it, is the scale alone."""
        self.wait()
        saved = state if isinstance(state, dict) else {"value": state, "good_steps": 0}
        self._value, self.good_steps = float(saved["value"]), int(saved["good_steps"])


class CarriedScales:
    """The loss scales that gradients carry, by the optimizers of managers and those whose own scale
    the program reads. One per run: managers may share a backward pass.

    A step may change the scale. What is kept over it, because the program does not clear it, would
    be added to gradients of another scale, or clipped and applied by another.
    """

    def __init__(self, world: World) -> None:
        self._engine = world.service(Engine)
        self.of = weakref.WeakKeyDictionary[torch.optim.Optimizer, float]()

    def become(self, optimizer: torch.optim.Optimizer, value: float) -> None:
        """Multiply the gradients that are there, so that they carry this scale.

        Exact if the ratio of the scales is a power of two, as it is by default.
        """
        ratio = value / self.of.get(optimizer, value)
        self.of[optimizer] = value
        if ratio == 1:
            return
        self._engine.backward.flush()
        factor = torch.full((), ratio, dtype=torch.float64, device=self._engine.device)
        for parts in gradients_of(spans_of(parameters_of(optimizer.param_groups))):
            scale_((part.grad for part in parts), factor)
