"""OptimManager: scales the loss, runs backward, clips, and steps optimizers and schedulers.

`optim_step` is the step of programs written for BMTrain 0.1.x, before there was a manager.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from bmtrain.distributed.agreement import HostCopy
from bmtrain.distributed.ledger import Ledger
from bmtrain.distributed.results import LastLoss
from bmtrain.errors import ConfigurationError, NonFiniteError
from bmtrain.optim.adam import AdamBase, check_rates, copy_of
from bmtrain.optim.clip import clip_gradients, global_sum_of_squares
from bmtrain.optim.flat import FlatSpan, gradient_of, gradients_of, parameters_of, spans_of
from bmtrain.optim.loss_scale import CarriedScales, LossScale
from bmtrain.optim.saved import check_manager_state, gather_states, local_states, local_values
from bmtrain.optim.schedules import check_steps_alone, step_schedules
from bmtrain.runtime import world
from bmtrain.runtime.arguments import POSITIVE, SIZE, check
from bmtrain.runtime.log import warn
from bmtrain.shard.engine import Engine
from bmtrain.shard.parameter import DistributedParameter
from bmtrain.shard.sharded import described


def _refuse(manager: OptimManager, value: object) -> None:
    """Assigned to, BMTrain's attributes of a manager would be of no effect."""
    raise ConfigurationError(
        f"OptimManager: the loss scale, its factor, steps and bounds cannot be set to {value!r} "
        "later: give them to OptimManager(loss_scale=..., loss_scale_factor=..., "
        "loss_scale_steps=..., min_loss_scale=..., max_loss_scale=...), or load a state_dict."
    )


class OptimManager:
    """Drives any number of optimizers, the library's or torch's.

    Args:
        loss_scale: initial loss scale for fp16 training (Micikevicius et al., 2018, "Mixed
            precision training"); None turns scaling off.
        loss_scale_factor: the scale is divided by it on overflow, and multiplied by it after
            `loss_scale_steps` good steps; below 1 the other way round; 1 for a fixed scale.
        loss_scale_steps: number of good steps in a row before the scale grows.
        min_loss_scale, max_loss_scale: bounds of the scale.
        grad_scale: divisor of the loss before backward, since gradients are summed over ranks; None
            is the world size, so that gradients are means.
        max_skipped_steps: `step` raises NonFiniteError after so many steps in a row whose loss or
            gradients were not finite though the loss scale is the smallest; None for never.

    Raises:
        ConfigurationError: for values out of range.
        NotInitializedError: before `init_distributed`.

    Example:
        manager = OptimManager(loss_scale=None)
        manager.add_optimizer(optimizer, lr_scheduler)

        manager.zero_grad()
        manager.backward(loss)
        manager.clip_grad_norm(optimizer.param_groups, 1.0)
        manager.step()
    """

    def __init__(
        self,
        loss_scale: float | None = None,
        loss_scale_factor: float = 2,
        loss_scale_steps: int = 1024,
        min_loss_scale: float = 1,
        max_loss_scale: float = math.inf,
        grad_scale: float | None = None,
        max_skipped_steps: int | None = 100,
    ) -> None:
        current = world.current("OptimManager")
        self._engine = current.service(Engine)
        self._scale = (
            LossScale(1.0, maximum=1.0)
            if loss_scale is None
            else LossScale(
                loss_scale, loss_scale_factor, loss_scale_steps, min_loss_scale, max_loss_scale
            )
        )
        self._is_scaled = loss_scale is not None
        if max_skipped_steps is not None:
            check("OptimManager", max_skipped_steps=(max_skipped_steps, SIZE))
        self._max_skipped = math.inf if max_skipped_steps is None else max_skipped_steps
        if grad_scale is not None:
            check("OptimManager", grad_scale=(grad_scale, POSITIVE))
        self.grad_scale = float(current.mesh.world.size if grad_scale is None else grad_scale)
        self.optimizers: list[torch.optim.Optimizer] = []
        self.lr_schedulers: list[Any] = []
        self._num_steps = 0
        # 0-dim on the device: NaN once a loss of the step at hand was not finite, else 0
        self._mark: torch.Tensor | None = None
        # by ids of parameters, which cannot be used again while the spans hold the parameters
        self._known: dict[tuple[int, ...], list[FlatSpan]] = {}
        self._last_loss = current.service(LastLoss)
        self._carried = current.service(CarriedScales)

    @property
    def loss_scale(self) -> float:
        """The current loss scale; 1 without scaling.

        Waits until the GPU has reported whether the last step overflowed. Gradients that were kept
        over a step that has changed the scale are brought to it.
        """
        value = self._scale.value
        for optimizer in self.optimizers:
            self._carried.become(optimizer, value)
        return value

    @loss_scale.setter
    def loss_scale(self, value: object) -> None:
        _refuse(self, value)

    # What BMTrain's programs read of it.
    loss_scale_enabled = property(operator.attrgetter("_is_scaled"), _refuse)
    loss_scale_factor, loss_scale_steps, steps_since_last_scale, min_loss_scale, max_loss_scale = (
        property(operator.attrgetter(f"_scale.{name}"), _refuse)
        for name in ("factor", "growth_steps", "num_good", "minimum", "maximum")
    )

    @property
    def skipped_steps(self) -> int:
        """Number of steps skipped because a loss or gradient was not finite on some rank.

        Waits until the GPU has reported whether the last one was.
        """
        self._scale.wait()
        return self._scale.num_skipped

    @property
    def skipped_in_a_row(self) -> int:
        """Number of steps skipped since the last good one, without those that lowered the scale.

        Waits as `skipped_steps` does.
        """
        self._scale.wait()
        return self._scale.num_in_a_row

    def add_optimizer(self, optimizer: torch.optim.Optimizer, lr_scheduler: Any = None) -> None:
        """Drive `optimizer`, and its scheduler if it has one.

        Parameters that are not sharded are kept equal on all ranks. From here on `optimizer.scale`
        is the manager's loss scale, so that calls of the 0.1.x API can be mixed in.

        Args:
            optimizer: of this library or any torch.optim.Optimizer, each once.
            lr_scheduler: of this library or of torch; `step()` is called without arguments after
                every step that is not skipped.

        Raises:
            ConfigurationError: for anything but an optimizer, for one already added, or for a
                schedule whose `step` takes a required argument (ReduceLROnPlateau).
        """
        if lr_scheduler is not None:
            check_steps_alone(lr_scheduler)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigurationError(
                f"add_optimizer got {type(optimizer).__name__}: expected a torch.optim.Optimizer."
            )
        if optimizer in self.optimizers:
            raise ConfigurationError(
                "add_optimizer got an optimizer that it has already: add each once."
            )
        self._replicate(optimizer)
        # Gradients that are there already carry the scale, unless `loss_scale` has scaled their
        # loss: what a program has computed by itself is not multiplied.
        if not isinstance(optimizer, AdamBase) or optimizer.scaled is None:
            self._carried.of[optimizer] = self._scale.value
        if isinstance(optimizer, AdamBase):
            optimizer.dynamic_scale.wait()
            optimizer.dynamic_scale = self._scale
        self.optimizers.append(optimizer)
        self.lr_schedulers.append(lr_scheduler)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy with optimizers and schedules of its own. Copy the model in the same call."""
        self._scale.wait()
        own = {"_engine": self._engine, "_last_loss": self._last_loss, "_mark": None, "_known": {}}
        new = copy_of(self, memo, **own, _carried=self._carried)
        for optimizer, copied in zip(self.optimizers, new.optimizers, strict=True):
            self._carried.of[copied] = self._carried.of[optimizer]
        return new

    def _has_gradients(self, optimizer: torch.optim.Optimizer) -> bool:
        grads = map(gradient_of, parameters_of(optimizer.param_groups))
        return self._engine.backward.has_deferred or any(grad is not None for grad in grads)

    def _replicate(self, optimizer: torch.optim.Optimizer) -> None:
        """Register the optimizer's ordinary parameters for summing gradients over ranks.

        Called before every backward, because parameters may have joined its groups since.
        """
        params = parameters_of(optimizer.param_groups)
        self._engine.replicated.add(x for x in params if not isinstance(x, DistributedParameter))

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """`loss * loss_scale / grad_scale`, the value that backward runs on."""
        return loss * (self.loss_scale / self.grad_scale)

    def backward(self, loss: torch.Tensor | None = None, *, reduce_gradients: bool = True) -> None:
        """Run backward on the scaled loss and add the gradients, summed over ranks, to `.grad`.

        Args:
            loss: a scalar that requires grad; None is the one last given to `sum_loss`, as in
                BMTrain's README.
            reduce_gradients: False keeps this micro-batch's gradients of sharded parameters on the
                rank, at the cost of a full gradient's memory; the next call with True (or `step`)
                reduces their sum. Those of ordinary parameters are reduced in every pass.

        Raises:
            ConfigurationError: for a loss that is not a scalar, does not require grad, or has been
                scaled by `optimizer.loss_scale` already.
        """
        loss = _checked(self._last_loss.take() if loss is None else loss)
        for optimizer in self.optimizers:
            self._replicate(optimizer)
            if (
                isinstance(optimizer, AdamBase)
                and optimizer.scaled is not None
                and optimizer.scaled() is loss
            ):
                raise ConfigurationError(
                    "backward got a loss that optimizer.loss_scale() has scaled already: "
                    "pass the loss itself, or call loss.backward()."
                )
        if not any(map(self._has_gradients, self.optimizers)):
            self._mark = None  # the gradients of earlier losses are not used
        # Noted on the device whether the loss is finite; the host does not wait for it.
        term = loss.detach().reshape(()) * 0
        self._mark = term if self._mark is None else self._mark + term
        scaled, scale = self.scale_loss(loss), self.loss_scale
        # The pass may add to the gradients of other managers, which carry another scale.
        others = [one for one, carried in self._carried.of.items() if carried != scale]
        for optimizer in filter(self._has_gradients, others):
            self._carried.become(optimizer, scale)
        with contextlib.nullcontext() if reduce_gradients else self._engine.backward.deferring():
            scaled.backward()
        for optimizer in filter(self._has_gradients, others):
            self._carried.of[optimizer] = scale

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all optimizers, deferred ones included.

        With `set_to_none` they become None, else zeros, as in torch.
        """
        self._mark = None
        self._engine.backward.abandon_if_dead()
        has_deferred = self._engine.backward.has_deferred
        for optimizer in self.optimizers:
            for param in parameters_of(optimizer.param_groups) if has_deferred else ():
                if isinstance(param, DistributedParameter):
                    param.storage_of.gradient.discard_deferred(param.index_in_storage)
            optimizer.zero_grad(set_to_none=set_to_none)

    def clip_grad_norm(
        self, param_groups: Any, max_norm: float, norm_type: float = 2, eps: float = 1e-6
    ) -> torch.Tensor:
        """Scale gradients so that their global norm is at most `max_norm`; returns the norm before.

        `optim.clip_grad_norm` with this manager's loss scale. Collective; the host does not wait.

        Args:
            param_groups: an optimizer's `param_groups`, or parameters.
            max_norm: the bound on the unscaled gradient; inf only measures.
            norm_type: 2, another positive number, or inf.
            eps: avoids division by zero.

        Returns:
            The unscaled norm over all ranks: 0-dim on the device, fp32, or fp64 for fp64 gradients.

        Raises:
            ConfigurationError: for a `norm_type` or `max_norm` that is not positive.
        """
        self._engine.backward.flush()
        spans = self._spans_of(parameters_of(param_groups))
        return clip_gradients(spans, max_norm, self.loss_scale, norm_type, eps)

    def _spans_of(self, params: list[torch.nn.Parameter]) -> list[FlatSpan]:
        """Kept by parameter list: a training loop asks for the same few at every step."""
        key = tuple(map(id, params))
        found = self._known.get(key)
        if found is None or not all(span.is_current for span in found):
            if len(self._known) >= 8:
                self._known.clear()
            found = self._known[key] = spans_of(params)
        return found

    def step(self) -> None:
        """Update all parameters and learning rates, or skip both on all ranks.

        A step is skipped if a loss given to `backward` since the last one, or a gradient, is not
        finite on any rank, or a gradient so large that Adam's second moment, fp32, would be
        infinite for good: weights, states of optimizers and schedules, and their counts stay as
        they are, as if its batch had not been. A loss scale is lowered then. `skipped_steps` counts
        them. Loss and gradients are those of this manager: `loss.backward()` shows no loss.

        With AdamOptimizers alone and schedules that can be restored, the host does not wait for the
        verdict. The device leaves weights and state unchanged, and the host undoes its own counts
        later: when the loss scale (if there is one), `skipped_steps` or a state dict is read, at
        the latest in the next `step`. Until then, learning rates read as after a good step, and so
        does a schedule whose state is read directly; `state_dict` of the manager is always right.

        Raises:
            NonFiniteError: on all ranks, after `max_skipped_steps` in a row were skipped.
            ConfigurationError: for a learning rate that is not finite; nothing is changed.
        """
        for optimizer in self.optimizers:
            check_rates(optimizer)
        self._engine.backward.flush()
        self._scale.wait()
        if self._scale.num_in_a_row >= self._max_skipped:
            raise NonFiniteError(
                f"{self._scale.num_in_a_row} steps in a row were skipped, because the loss or a "
                "gradient was not finite on some rank; weights and optimizer states are those "
                "after the last good step. bmtrain.inspect.find_non_finite names the module: "
                "check the data and the learning rate of those steps, or resume from a "
                "checkpoint before them."
            )
        scale = self.loss_scale
        # Each rank divides by its own scale, and skips by its own rules.
        current = world.current("OptimManager")
        current.service(Ledger).note(
            current.mesh.world,
            f"a step of an OptimManager with {len(self.optimizers)} optimizers ({self._scale}, "
            f"max_skipped_steps {self._max_skipped})",
        )
        params = [x for one in self.optimizers for x in parameters_of(one.param_groups)]
        mark, self._mark = self._mark, None
        factor = _factor(self.optimizers, params, scale)
        total = global_sum_of_squares(*gradients_of(self._spans_of(params)), mark, factor)
        arriving = HostCopy([total])
        schedules = [schedule for schedule in self.lr_schedulers if schedule is not None]
        optimizers: list[Any] = [*self.optimizers]
        # Whether the device can skip a step that the host undoes later.
        if all(isinstance(one, AdamBase) and one.skips_on_device for one in optimizers) and all(
            callable(getattr(schedule, name, None))
            for schedule in schedules
            for name in ("state_dict", "load_state_dict")
        ):
            for optimizer in optimizers:
                optimizer.step(scale=scale, verdict=total)
            take_back_schedules = step_schedules(schedules, optimizers)
            self._num_steps += 1

            def take_back() -> None:
                for optimizer in optimizers:
                    optimizer.take_back()
                take_back_schedules()
                self._num_steps -= 1

            self._scale.awaited = arriving, take_back
            if not arriving.needs_waiting:
                self._scale.wait()
            return
        is_finite = math.isfinite(arriving.values()[0])
        for optimizer in optimizers if is_finite else ():
            if isinstance(optimizer, AdamBase):
                optimizer.step(scale=scale)
                continue
            self._carried.become(optimizer, 1.0)
            try:
                optimizer.step()
            finally:
                # They carry the scale again: the program may write others into them, add to them,
                # or step again after an error.
                self._carried.become(optimizer, scale)
        for schedule in schedules if is_finite else ():
            schedule.step()
        self._num_steps += is_finite
        self._scale.judge(is_finite)

    def state_dict(self, gather_opt: bool = False) -> dict[str, Any]:
        """State of optimizers, schedulers and loss scale; with `gather_opt` of full tensors.

        With `gather_opt` it is collective and fits any world size. The keys are BMTrain's, plus a
        few that BMTrain ignores.
        """
        states = []
        for optimizer in self.optimizers:
            if isinstance(optimizer, AdamBase):
                states.append(optimizer.state_dict(gather=gather_opt))
                continue
            state = optimizer.state_dict()
            params = parameters_of(optimizer.param_groups)
            own = (
                gather_states(params, state["state"])
                if gather_opt
                else local_values(state["state"])
            )
            states.append({**state, "state": own})
        return {**self._state_of_schedules(), "optimizers": states}

    def sharded_state_dict(self) -> dict[str, Any]:
        """The same with the optimizers' states themselves, no copies: sharded tensors."""
        states = [
            one.sharded_state_dict() if isinstance(one, AdamBase) else one.state_dict()
            for one in self.optimizers
        ]
        return {**self._state_of_schedules(), "optimizers": states}

    def _state_of_schedules(self) -> dict[str, Any]:
        self._scale.wait()
        return {
            "lr_schedulers": [None if s is None else s.state_dict() for s in self.lr_schedulers],
            "loss_scale": self.loss_scale,
            "loss_scale_enabled": self._is_scaled,
            "loss_scale_state": self._scale.state_dict() if self._is_scaled else None,
            "num_steps": self._num_steps,
            "num_skipped": self._scale.num_skipped,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a saved state, at the same world size or, if gathered, at any other.

        Raises:
            CheckpointError: on every rank, if this is no such state, if optimizers or schedulers
                differ in number or kind, or if ranks got different states; all is as it was.
        """
        self._scale.wait()
        check_manager_state(state_dict, self.lr_schedulers, self.optimizers)
        owns = []  # all of them are looked at before one is changed
        for optimizer, saved in zip(self.optimizers, state_dict["optimizers"], strict=True):
            if isinstance(optimizer, AdamBase):
                owns.append(optimizer.own_of(saved))
            else:
                states = local_states(optimizer.param_groups, saved)
                owns.append({**saved, "state": states})
        for optimizer, own in zip(self.optimizers, owns, strict=True):
            if isinstance(optimizer, AdamBase):
                optimizer.take_own(own)
            else:
                optimizer.load_state_dict(own)
        self.load_rest(state_dict)

    def load_rest(self, state: Mapping[str, Any]) -> None:
        """Restore all of a saved state but the optimizers."""
        for scheduler, saved in zip(self.lr_schedulers, state["lr_schedulers"], strict=True):
            if scheduler is not None and saved is not None:
                scheduler.load_state_dict(saved)
        # BMTrain saves a plain number
        saved_scale = state.get("loss_scale_state") or state.get("loss_scale")
        if self._is_scaled and saved_scale is not None and state.get("loss_scale_enabled", True):
            self._scale.load_state_dict(saved_scale)
        self._num_steps = int(state.get("num_steps", 0))
        self._scale.num_skipped = int(state.get("num_skipped", 0))
        self._scale.num_in_a_row = 0


def _factor(
    optimizers: Sequence[torch.optim.Optimizer], params: Sequence[torch.Tensor], scale: float
) -> float:
    """What makes a sum of squared gradients infinite if Adam's second moments could become so.

    Such a moment stays, and the parameter would never move again.
    """
    is_adam = all(isinstance(one, AdamBase) for one in optimizers)  # an SGD may take more
    if not is_adam or all(x.dtype == torch.float64 for x in params):
        return 1.0
    share = max(1 - group["betas"][1] for one in optimizers for group in one.param_groups)
    most = torch.finfo(torch.float32).max * scale**2 / share
    return torch.finfo(torch.float64).max / most


def _checked(loss: Any) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise ConfigurationError(
            f"backward got {described(loss)}: expected a scalar loss, a mean or a sum."
        )
    if not loss.requires_grad:
        raise ConfigurationError(
            "backward got a loss that does not require grad: no trainable parameter contributed "
            "to it, or it was computed under torch.no_grad() or detached."
        )
    return loss


def optim_step(optim: torch.optim.Optimizer, lr_scheduler: Any = None) -> None:
    """Step `optim` and its scheduler after `optimizer.loss_scale(loss).backward()`.

    Gradients that are not finite on any rank make all ranks skip the step, and lower
    `optimizer.scale` if there is a loss scale. The host waits for the device to know.

    Args:
        optim: of this library, or any torch.optim.Optimizer.
        lr_scheduler: stepped unless the step was skipped; None for none.

    Raises:
        ConfigurationError: if a parameter that is not sharded has a gradient of this rank only: its
            values would differ between ranks.
    """
    replicated = world.current("optim_step").service(Engine).replicated
    params = parameters_of(optim.param_groups)
    for param in params:
        if (
            param.grad is not None
            and not isinstance(param, DistributedParameter)
            and world.world_size() > 1
            and param not in replicated
        ):
            raise ConfigurationError(
                f"optim_step got {type(optim).__name__} with a parameter of shape "
                f"{tuple(param.shape)} that is not sharded, and whose gradients were not averaged: "
                "add it to an OptimManager before backward, or shard it with BMTrainModelWrapper."
            )
    scale = optim.scale if isinstance(optim, AdamBase) else 1.0
    factor = _factor([optim], params, scale)
    total = global_sum_of_squares(*gradients_of(spans_of(params)), factor=factor)
    is_finite = bool(total.isfinite())
    has_fp16 = any(param.dtype == torch.float16 for param in params)
    if isinstance(optim, AdamBase) and (optim.scale != 1 or has_fp16):
        if is_finite:
            optim.step(scale=optim.scale)
        optim.dynamic_scale.judge(is_finite)
    elif is_finite:
        optim.step()
    else:
        warn("optim_step: a gradient is not finite, the step is skipped on all ranks.")
    if is_finite and lr_scheduler is not None:
        lr_scheduler.step()
