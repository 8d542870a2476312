"""AdamW over sharded parameters, with exact fp32 state for half-precision weights."""

from __future__ import annotations

import copy
import inspect
import operator
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from bmtrain.errors import ArgumentError, ParameterError
from bmtrain.kernels.adam import AdamSettings, update_tensors
from bmtrain.optim.adam_state import AdamLayout, Make, ParamBatch, UpdatePart
from bmtrain.optim.flat import FlatSpan, parameters_of
from bmtrain.optim.form import NAMES, StateForm, in_fp32
from bmtrain.optim.loss_scale import CarriedScales, LossScale
from bmtrain.optim.saved import (
    THEIR_NAMES,
    check_adam_state,
    check_masters,
    gather_states,
    local_states,
    local_values,
)
from bmtrain.runtime import world
from bmtrain.runtime.arguments import AMOUNT, COUNT, FLAG, NUMBER, PART, POSITIVE, Rule, check
from bmtrain.shard.engine import Engine
from bmtrain.shard.parameter import DistributedParameter
from bmtrain.shard.slices import local_of

Steps = list[tuple[AdamSettings, list[UpdatePart]]]
BETAS = Rule(
    "two numbers from 0 to below 1",
    lambda betas: (
        isinstance(betas, tuple | list) and len(betas) == 2 and all(map(PART.holds, betas))
    ),
)
# of a parameter group
RULES = {
    "lr": AMOUNT,
    "betas": BETAS,
    "eps": AMOUNT,
    "weight_decay": AMOUNT,
    "hold_steps": COUNT,
    "maximize": FLAG,
}


class AdamBase(torch.optim.Optimizer):
    """Base of both Adams: parameter groups, state layout, state dicts, 0.1.x loss scale."""

    _layout: AdamLayout | None = None  # built on first use
    # Returns when nothing copies from or to states in host memory.
    _wait_for_copies: Callable[[], None] = staticmethod(lambda: None)

    def __init__(  # noqa: PLR0913 (BMTrain's arguments)
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        *sixth: Any,
        hold_steps: int = 0,
        maximize: bool = False,
        scale: float | None = None,
        scale_factor: float | None = None,
        scale_steps: int | None = None,
        moments: str = "fp32",
        master_weights: str = "fp32",
    ) -> None:
        name = type(self).__name__
        if any(sixth):
            raise ArgumentError(
                f"{name} got {', '.join(map(repr, sixth))} by position after weight_decay, where "
                "BMTrain 0.1 has scale and later releases have hold_steps: give them by name."
            )
        current = world.current(name)
        #: in how many bits states are kept
        self.form = StateForm.checked(name, moments, master_weights)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "maximize": maximize}
        defaults |= {"weight_decay": weight_decay, "hold_steps": hold_steps}
        super().__init__(params, defaults)
        for group in self.param_groups:
            check(name, **{key: (group[key], rule) for key, rule in RULES.items()})
        flat = parameters_of(self.param_groups)
        self.form.check_params(name, flat)
        for param in flat:
            if param.device != current.device:
                raise ParameterError(
                    f"{name} got a parameter of shape {tuple(param.shape)} on {param.device}, this "
                    f"rank computes on {current.device}: move the model there "
                    "(model.to(bmtrain.device())) before making the optimizer."
                )
        self._engine = current.service(Engine)
        self._engine.replicated.add(x for x in flat if not isinstance(x, DistributedParameter))
        self._stepped: list[dict[str, Any]] = []  # states of the parameters in the last step
        if scale is None:
            scale = 65536.0 if any(param.dtype == torch.float16 for param in flat) else 1.0
        factor = current.defaults.loss_scale_factor if scale_factor is None else scale_factor
        growth_steps = current.defaults.loss_scale_steps if scale_steps is None else scale_steps
        self.dynamic_scale = LossScale(scale, factor, growth_steps)
        self._carried = current.service(CarriedScales)
        #: the last tensor that `loss_scale` returned
        self.scaled: weakref.ref[torch.Tensor] | None = None

    @property
    def skips_on_device(self) -> bool:
        """Whether `step` takes a `verdict`, which the device knows before the host.

        False where host code runs with each step, a hook or a program's own `step` in place of this
        one (a subclass's, or an attribute's): it would run for skipped steps too.
        """
        own = type(self).step
        step = vars(self).get("step", own)
        # torch's schedules note that it was called.
        if getattr(step, "_wrapped_by_lr_sched", False):
            step = step.__wrapped__
        return (
            step is own
            and inspect.unwrap(own) is inspect.unwrap(AdamBase.step)
            and not (self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks)
        )

    @property
    def scale(self) -> float:
        """The loss scale of the 0.1.x API; the OptimManager's, if one drives this optimizer.

        Gradients that were kept over a step that has changed it are brought to it.
        """
        value = self.dynamic_scale.value
        self._carried.become(self, value)
        return value

    def loss_scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss for `.backward()` in the 0.1.x API: scaled, and divided by the world size.

        Args:
            loss: this rank's, a scalar.
        """
        scaled = loss * (self.scale / self._engine.mesh.world.size)
        self.scaled = weakref.ref(scaled)  # weak: a strong one would keep its graph alive
        return scaled

    steps_since_last_scale = property(operator.attrgetter("dynamic_scale.num_good"))

    def justify_scale(self, scale: float) -> None:
        """Set the loss scale of the 0.1.x API; gradients that are there are brought to it."""
        check("justify_scale", scale=(scale, POSITIVE))
        self.dynamic_scale.load_state_dict(scale)

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        scale: float = 1.0,
        *,
        verdict: torch.Tensor | None = None,
    ) -> Any:
        """Update all parameters that have a gradient, dividing gradients by `scale` on the fly.

        Returns what `closure` returns; None without one.

        Args:
            closure: computes the loss again, with gradients, before the update.
            scale: the loss scale that the gradients carry.
            verdict: 0-dim fp64 on the device. If it is NaN or infinite, weights and moments do not
                change. The host need not wait for it; once it knows, it calls `take_back`.

        Raises:
            ConfigurationError: for a learning rate that is not finite; nothing is changed.
        """
        self.dynamic_scale.wait()
        self._engine.backward.flush()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        check_rates(self)
        layout, batches = self._prepared()
        steps = []
        for batch in batches:
            group, step = self.param_groups[batch.group], batch.count_step()
            beta1, beta2 = group["betas"]
            settings = AdamSettings(
                lr=0.0 if step <= group["hold_steps"] else float(group["lr"]),
                beta1=beta1,
                beta2=beta2,
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                step=step,
                scale=scale,
                maximize=group["maximize"],
            )
            steps.append((settings, batch.parts))
        self._stepped = [state for batch in batches for state in batch.states]
        self._apply(steps, verdict)
        layout.close()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """torch's, without a call for each sharded parameter."""
        backward = self._engine.backward
        backward.abandon_if_dead()
        if not set_to_none or backward.has_deferred:
            super().zero_grad(set_to_none)
            return
        for param in parameters_of(self.param_groups):
            if isinstance(param, DistributedParameter):
                param.shown_grad = None
            else:
                param.grad = None

    def take_back(self) -> None:
        """Undo the step counts of the last step, which the device skipped."""
        for state in self._stepped:
            state["step"] -= 1
        self._stepped = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy with its own state, for the parameters that `memo` maps to copies.

        Copy the model in the same call.
        """
        self.dynamic_scale.wait()
        self._lay_out().follow()
        new = copy_of(self, memo, **self._uncopied())
        if self in self._carried.of:
            self._carried.of[new] = self._carried.of[self]
        return new

    def _uncopied(self) -> dict[str, Any]:
        """What a copy has for itself, or shares."""
        shared = {"_engine": self._engine, "_carried": self._carried}
        return {**shared, "_layout": None, "scaled": None, "_stepped": []}

    def wait(self) -> None:
        """Wait for an update that is under way: weights and states are then those of the step."""

    def _prepared(self) -> tuple[AdamLayout, list[ParamBatch]]:
        """What a step does, with all that it needs: nothing has changed if there is no memory."""
        layout = self._lay_out()
        layout.follow()
        return layout, layout.updates()

    def _place(self) -> None:
        """Decide where states will be; before they are laid out."""

    def _apply(self, steps: Steps, verdict: torch.Tensor | None) -> None:
        """Update the parts, or none of them if `verdict` is NaN or infinite."""
        for settings, parts in steps:
            update_tensors([part.tensors for part in parts], settings, verdict)

    def _memory_of(self, span: FlatSpan) -> Make:
        """What makes the tensors of the state of a span."""
        return lambda numel, dtype: torch.zeros(numel, dtype=dtype, device=self._engine.device)

    def _lay_out(self) -> AdamLayout:
        """The layout, rebuilt if the program has changed groups or states, as torch allows."""
        self.wait()
        if self._layout is not None and not self._layout.is_current(self.param_groups, self.state):
            self._drop_layout()
        if self._layout is None:
            self.form.check_params(type(self).__name__, parameters_of(self.param_groups))
            self._place()
            self._layout = AdamLayout(
                self.param_groups, self.state, self._memory_of, self.form, self._wait_for_copies
            )
        return self._layout

    def _drop_layout(self) -> None:
        """Have the states laid out anew."""
        if self._layout is not None:
            # The new layout copies the master weights, so they first need any external writes to
            # the weights.
            self._layout.follow()
            self._layout = None

    def state_dict(self, gather: bool = False) -> dict[str, Any]:
        """This rank's slices of the optimizer state, or with `gather` full tensors.

        With `gather` it is collective; the tensors are on the CPU and fit any world size.

        Moments of 8 bits and split master weights are returned in fp32, on the CPU: any Adam can
        load them.
        """
        state, flat = self.sharded_state_dict(), parameters_of(self.param_groups)
        states = state["state"]
        if self.form.is_compact:
            states = {index: in_fp32(values, flat[index]) for index, values in states.items()}
        if gather:
            return {**state, "state": gather_states(flat, states)}
        return {**state, "state": local_values(states)}

    def sharded_state_dict(self) -> dict[str, Any]:
        """The state itself, no copy: sharded tensors of sharded parameters."""
        self.dynamic_scale.wait()
        self._lay_out().follow()
        return super().state_dict()

    def begin_restore(self, saved: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
        """Take over groups and step counts of `saved`, a state dict without tensors.

        Returns the state by parameter index: tensors as of a new optimizer, to be filled.
        """
        self.dynamic_scale.wait()
        self._load_groups(saved["param_groups"])
        if self._layout is not None:
            self._layout.trust_weights()
        self._lay_out()
        live: dict[int, dict[str, Any]] = {}
        for index, param in enumerate(parameters_of(self.param_groups)):
            live[index] = self.state[param]
            live[index]["step"] = int(saved["state"].get(index, {}).get("step", 0))
            for name in live[index].keys() - {"step", "master"}:
                local_of(live[index][name]).zero_()
        return live

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load either form of `state_dict`, at any world size if it was gathered, or BMTrain's.

        Collective. A state of this rank's slices loads at the world size that wrote it.

        Raises:
            CheckpointError: on every rank, if this is no such state, or that of other parameters.
        """
        self.take_own(self.own_of(state_dict))

    def own_of(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """This rank's part of a saved state, for `take_own`. Collective; changes nothing.

        Raises:
            CheckpointError: as `load_state_dict`.
        """
        self.dynamic_scale.wait()
        check_adam_state(state_dict, {*NAMES, *THEIR_NAMES}, self)
        states = local_states(self.param_groups, state_dict)
        if self.form.master_weights == "split":
            check_masters(parameters_of(self.param_groups), states)
        return {**state_dict, "state": states}

    def take_own(self, own: dict[str, Any]) -> None:
        """Load what `own_of` returned."""
        self.wait()  # else an update that is under way would write over what is loaded
        self._layout = None
        self._load_groups(own["param_groups"])
        self.state.clear()
        for index, param in enumerate(parameters_of(self.param_groups)):
            if index in own["state"]:
                self.state[param] = dict(own["state"][index])
        self._lay_out()

    def _load_groups(self, saved: Iterable[dict[str, Any]]) -> None:
        for group, old in zip(self.param_groups, saved, strict=True):
            group.update({name: value for name, value in old.items() if name != "params"})


def check_rates(optimizer: torch.optim.Optimizer) -> None:
    """ConfigurationError for a learning rate that is not finite: weights would not be either."""
    for number, group in enumerate(optimizer.param_groups):
        check(f"{type(optimizer).__name__}, group {number}", lr=(group.get("lr", 0.0), NUMBER))


def copy_of(one: Any, memo: dict[int, Any], **own: Any) -> Any:
    """A deep copy, but for attributes that are given."""
    kind: Any = type(one)
    memo[id(one)] = new = kind.__new__(kind)
    # torch's schedules put a `step` of the object into its attributes: in the copy it would step
    # the original.
    for name in vars(one).keys() - {"step"}:
        vars(new)[name] = own[name] if name in own else copy.deepcopy(vars(one)[name], memo)
    return new


class AdamOptimizer(AdamBase):
    """AdamW for parameters of any dtype, sharded or not.

    Weight decay is decoupled for every dtype. fp16 and bf16 parameters keep an fp32 master copy and
    fp32 moments.

    Sources: Kingma and Ba, "Adam: A Method for Stochastic Optimization" (2015); Loshchilov and
    Hutter, "Decoupled Weight Decay Regularization" (2019); for 8 bits, Dettmers et al., "8-bit
    Optimizers via Block-wise Quantization" (2022).

    Args:
        params: parameters or groups, as in torch.optim, of any floating dtype, on the rank's
            device.
        lr, betas, eps, weight_decay, maximize: as in torch.optim.AdamW, except that weight_decay
            defaults to 0.
        hold_steps: number of initial steps with a learning rate of 0, while the moments build up.
        moments: "fp32", or "8bit": 2.1 instead of 8 bytes an element, in blocks of 64 elements,
            rounded stochastically.
        master_weights: of 16-bit parameters. "fp32": 4 bytes an element. "split", for bf16: 2
            bytes, with which the weights are fp32 numbers; they are rounded to bf16 away from zero
            where two numbers are as near. "none", for bf16: no bytes; weights are rounded
            stochastically. Values depend on neither the number of ranks nor a resume.
        scale, scale_factor, scale_steps: the loss scale of 0.1.x programs (`loss_scale`, `scale`,
            `optim_step`).

    Raises:
        TypeError: for more than these by position, unless they are 0: the sixth is `scale` in
            BMTrain 0.1 and `hold_steps` from 0.2 on.
        ParameterError: for parameters on a device other than the rank's.
        ConfigurationError: for hyperparameters out of range.
        NotInitializedError: before `init_distributed`.
    """
