"""AdamW over sharded parameters, with exact fp32 state for half-precision weights."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from bmtrain.errors import ConfigurationError, ParameterError
from bmtrain.kernels.adam import AdamSettings, adamw_update
from bmtrain.optim import gathered, resharding
from bmtrain.optim.clip import parameters_of
from bmtrain.optim.loss_scale import LossScale
from bmtrain.optim.runs import Run, contiguous_runs
from bmtrain.runtime import world
from bmtrain.shard.engine import Engine
from bmtrain.shard.parameter import DistributedParameter


class RunState:
    """fp32 state of one run: the moments, and for half-precision parameters the exact weights."""

    def __init__(self, run: Run, device: torch.device) -> None:
        values = run.values
        self.mean = torch.zeros(run.numel, dtype=torch.float32, device=device)
        self.square = torch.zeros(run.numel, dtype=torch.float32, device=device)
        self.is_exact = values.dtype == torch.float32 and values.device == device
        self.master = values if self.is_exact else torch.empty(run.numel, dtype=torch.float32, device=device)
        if not self.is_exact:
            self.master.copy_(values)
        self.version = run.version

    def follow(self, run: Run) -> None:
        """Take over weights that somebody else has written since the last update, a checkpoint for example."""
        if self.is_exact or self.version == run.version:
            return
        values = run.values.to(self.master.device)
        # Weights that are the rounded masters are our own: those masters are more exact than what was written.
        self.master.copy_(torch.where(self.master.to(values.dtype) == values, self.master, values.float()))
        self.version = run.version

    def views(self, begin: int, end: int) -> dict[str, torch.Tensor]:
        """The state of elements [begin, end) of the run."""
        out = {"exp_avg": self.mean[begin:end], "exp_avg_sq": self.square[begin:end]}
        return out if self.is_exact else {"master": self.master[begin:end], **out}


class AdamBase(torch.optim.Optimizer):
    """What the two Adams share: groups, state layout, state dicts, and the loss scale of 0.1.x programs."""

    def __init__(  # noqa: PLR0913 (BMTrain's arguments)
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0, hold_steps: int = 0, *, maximize: bool = False,
        scale: float | None = None, scale_factor: float = 2, scale_steps: int = 1024,
    ) -> None:  # fmt: skip
        current = world.current(type(self).__name__)
        _check(lr, betas, eps, weight_decay, hold_steps)
        decay = {"weight_decay": weight_decay, "hold_steps": hold_steps, "maximize": maximize}
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "eps": eps, **decay})
        flat = parameters_of(self.param_groups)
        for param in flat:
            if param.device != current.device:
                raise ParameterError(
                    f"{type(self).__name__} got a parameter of shape {tuple(param.shape)} on {param.device}, this rank computes on "
                    f"{current.device}: move the model there (model.to(bmtrain.device())) before making the optimizer."
                )
        self._engine = current.service(Engine)
        self._engine.replicate(param for param in flat if not isinstance(param, DistributedParameter))
        self._runs: list[tuple[int, Run, RunState]] = []
        fp16 = any(param.dtype == torch.float16 for param in flat)
        self.dynamic_scale = LossScale(scale if scale is not None else (65536.0 if fp16 else 1.0), scale_factor, scale_steps)
        self._scaled: weakref.ref[torch.Tensor] | None = None

    @property
    def scale(self) -> float:
        """The loss scale of programs of the 0.1.x API; an OptimManager's where one drives this optimizer."""
        return self.dynamic_scale.value

    def loss_scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to call `.backward()` on in programs of the 0.1.x API: scaled, and a mean over ranks."""
        scaled = loss * (self.scale / self._engine.mesh.world.size)
        self._scaled = weakref.ref(scaled)
        return scaled

    def has_scaled(self, loss: torch.Tensor) -> bool:
        """Whether `loss` is what `loss_scale` returned last."""
        return self._scaled is not None and self._scaled() is loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; the state is laid out anew at the next step."""
        super().add_param_group(param_group)
        self._runs = []

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, scale: float = 1.0) -> Any:
        """Update all parameters that have a gradient, dividing gradients by `scale` on the fly."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._lay_out()
        for number, run, state in self._runs:
            state.follow(run)
            for part, grad in run.gradients():
                for piece in part.split(self._step_of):
                    offset = piece.begin - part.begin
                    self._update(self.param_groups[number], run, state, piece, grad[offset : offset + piece.numel], scale)
        self._finish()
        for _, run, state in self._runs:
            state.version = run.version
        return loss

    def _update(self, group: dict[str, Any], run: Run, state: RunState, piece: Run, grad: torch.Tensor, scale: float) -> None:
        """Update the part `piece` of `run`."""
        raise NotImplementedError

    def _make_state(self, run: Run) -> RunState:
        return RunState(run, self._state_device())

    def _state_device(self) -> torch.device:
        """Where the state lives."""
        return self._engine.device

    def _finish(self) -> None:
        """Wait for updates still under way."""

    def _settings(self, group: dict[str, Any], piece: Run, scale: float) -> AdamSettings:
        """Count the step of `piece` and return this update's hyperparameters."""
        step = int(self.state[piece.params[0]]["step"]) + 1
        for param in piece.params:
            self.state[param]["step"] = step
        beta1, beta2 = group["betas"]
        return AdamSettings(
            lr=0.0 if step <= group["hold_steps"] else float(group["lr"]), beta1=beta1, beta2=beta2, eps=group["eps"],
            weight_decay=group["weight_decay"], step=step, scale=scale, maximize=group["maximize"],
        )  # fmt: skip

    def _step_of(self, param: torch.nn.Parameter) -> object:
        return self.state[param]["step"]

    def _lay_out(self) -> None:
        """Give every parameter its state as views of flat tensors; state that exists already is copied in."""
        if self._runs:
            return
        for number, group in enumerate(self.param_groups):
            for run in contiguous_runs(param for param in group["params"]):
                state = self._make_state(run)
                for param in run.params:
                    old = dict(self.state[param])
                    views = state.views(*run.offset(param))
                    for name, view in views.items():
                        if name in old:
                            view.copy_(old[name].reshape(-1))
                    self.state[param] = {"step": int(old.get("step", 0)), **views}
                self._runs.append((number, run, state))

    def state_dict(self, gather: bool = False) -> dict[str, Any]:
        """The optimizer's state: this rank's slices, or with `gather` (collective) whole CPU tensors for any world size."""
        self._lay_out()
        state: dict[str, Any] = super().state_dict()
        if not gather:
            return state
        flat = parameters_of(self.param_groups)
        return {**state, "state": gathered.gather_states(flat, state["state"])}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load either form of `state_dict`, or one of BMTrain (see `resharding.local_states`). Collective."""
        flat = parameters_of(self.param_groups)
        states = resharding.local_states(self.param_groups, state_dict)
        self._runs = []
        self._load_groups(state_dict["param_groups"])
        self.state.clear()
        for index, param in enumerate(flat):
            if index in states:
                self.state[param] = dict(states[index])
        self._lay_out()

    def _load_groups(self, saved: Iterable[dict[str, Any]]) -> None:
        for group, old in zip(self.param_groups, saved, strict=True):
            group.update({name: value for name, value in old.items() if name != "params"})


class AdamOptimizer(AdamBase):
    """AdamW for parameters of any dtype, sharded or not.

    Weight decay is decoupled for every dtype. fp16 and bf16 parameters keep an fp32 master copy and fp32 moments.

    Args:
        params: parameters or groups, as in torch.optim.
        lr, betas, eps, weight_decay, maximize: as in torch.optim.AdamW (weight_decay 0 by default).
        hold_steps: for the first n steps the learning rate is 0 while the moments build up.
        scale, scale_factor, scale_steps: the loss scale of 0.1.x programs (`loss_scale`, `scale`, `optim_step`).

    Raises:
        ParameterError: for parameters on another device than the rank's.
        ConfigurationError: for hyperparameters out of range.
    """

    def _update(self, group: dict[str, Any], run: Run, state: RunState, piece: Run, grad: torch.Tensor, scale: float) -> None:
        own = slice(piece.begin - run.begin, piece.end - run.begin)
        settings = self._settings(group, piece, scale)
        weight = piece.values
        master = weight if state.is_exact else state.master[own]
        adamw_update(weight, grad, master, state.mean[own], state.square[own], settings)


def _check(lr: float, betas: tuple[float, float], eps: float, weight_decay: float, hold_steps: int) -> None:
    limits = {"lr": lr >= 0, "betas": len(betas) == 2 and all(0 <= b < 1 for b in betas), "eps": eps >= 0}
    limits |= {"weight_decay": weight_decay >= 0, "hold_steps": hold_steps >= 0}
    for name, good in limits.items():
        if not good:
            raise ConfigurationError(f"{name} is out of range: expected 0 <= betas < 1 and nothing else below 0.")
