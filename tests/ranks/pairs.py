"""A sharded training beside its twin, plain PyTorch in one process on all ranks' rows: every call
goes to both, and weights, gradients, states and counts are compared.
"""

import contextlib
import math
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from tests.ranks import models
from torch import nn

import bmtrain as bmt
from bmtrain.distributed.agreement import HostCopy
from bmtrain.optim import AdamOffloadOptimizer, AdamOptimizer, OptimManager, clip_grad_norm

SIZES = ((7, 13), (13, 2), (2, 1), (1, 3))
ROWS = 12
Fault = Callable[[torch.Tensor], torch.Tensor]


class Net(nn.Module):
    """Prime sizes, layers smaller than the world, the last one never sharded.

    In half precision each layer sees the rows themselves: gradients are then whole numbers, the
    same in any order of sums.
    """

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(11)
        self.body = nn.Sequential(*(nn.Linear(*sizes) for sizes in SIZES[:3])).to(dtype)
        self.plain = nn.Linear(*SIZES[3]).to(dtype)

    def forward(self, x):
        total, h = torch.zeros(()), x[:, :7]
        for layer, (before, after) in zip([*self.body, self.plain], SIZES, strict=True):
            if x.dtype == torch.float32:
                h = torch.tanh(layer(h))
            else:
                total = total + (layer(x[:, :before]) * x[:, :after]).float().sum()
        return total + ((h - 1).square().sum() if x.dtype == torch.float32 else 0)


def sharded(dtype=torch.float32):
    """The same values in a block, a wrapper, and an ordinary layer."""
    net = Net(dtype)
    net.body[0] = bmt.Block(net.body[0])
    net.body = bmt.BMTrainModelWrapper(net.body)
    return net


def rows(step, dtype=torch.float32):
    """Small whole numbers (ROWS, 13) of all ranks."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(-2, 3, (ROWS, 13), generator=generator).to(dtype)


class ZeroGradient(torch.autograd.Function):
    """A loss that is NaN and has gradients of zero, as a mean over no targets."""

    @staticmethod
    def forward(ctx, loss):
        return loss * math.nan

    @staticmethod
    def backward(ctx, grad):
        return torch.zeros_like(grad)


class BadGradient(torch.autograd.Function):
    """A finite loss whose gradient is not."""

    @staticmethod
    def forward(ctx, loss):
        return loss.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * math.inf


FAULTS: dict[str, Fault] = {
    "nan": lambda loss: loss * math.nan,
    "inf": lambda loss: loss * math.inf,
    "alone": ZeroGradient.apply,
    "gradient": BadGradient.apply,
}
Factory = Callable[..., Any]
SGD: Factory = lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True)  # noqa: E731
#: of this library and torch's; one alone is given to both sides
KINDS: dict[str, tuple[Factory, ...]] = {
    "adam": (AdamOptimizer, torch.optim.AdamW),
    "offload": (AdamOffloadOptimizer, torch.optim.AdamW),
    "sgd": (SGD,),
    "adamw": (lambda params: torch.optim.AdamW(params, lr=0.01),),
}


def groups(params):
    """Weights and biases, with settings of their own."""
    return [
        {"params": params[::2], "weight_decay": 0.3},
        {"params": params[1::2], "lr": 0.02, "weight_decay": 0.0},
    ]


@contextlib.contextmanager
def late_verdicts():
    """The CPU knows at once what is finite; inside the host asks as late as with a GPU."""
    with mock.patch.object(HostCopy, "needs_waiting", True):
        yield


class Pair:
    """Both trainings.

    Args:
        kind: of the optimizer, in KINDS; or both factories.
        api: of backward, clipping and step: "n" for the manager's, "o" for those of 0.1.x; "old"
            for a program without a manager.
        schedule: makes one for an optimizer.
        scale: the first loss scale, None for none.
        growth: good steps after which it doubles.
        limit: skipped steps in a row that end the run.
        options: of the optimizers of this library and of AdamW.
    """

    def __init__(
        self,
        kind="adam",
        dtype=torch.float32,
        api="nnn",
        schedule=None,
        scale=None,
        growth=3,
        limit=100,
        **options,
    ):
        self.dtype, self.api, self.growth = dtype, api, growth
        self.model, self.twin = sharded(dtype), Net(dtype)
        makers = KINDS[kind] if isinstance(kind, str) else kind
        is_ours = len(makers) == 2
        options |= {"lr": 0.01} if is_ours else {}
        # half-precision weights have exact masters
        self.masters: list[Any] = [
            nn.Parameter(p.detach().float()) if is_ours else p for p in self.twin.parameters()
        ]
        if dtype == torch.float32:
            self.masters = list(self.twin.parameters())
        own = options | (
            {"scale": scale or 1.0, "scale_steps": growth} if api == "old" and is_ours else {}
        )
        self.optimizer = makers[0](groups(list(self.model.parameters())), **own)
        self.reference = makers[-1](groups(self.masters), **options)
        self.schedules: list[Any] = [
            schedule and schedule(one) for one in (self.optimizer, self.reference)
        ]
        self.manager = OptimManager(scale, loss_scale_steps=growth, max_skipped_steps=limit)
        if api != "old":
            self.manager.add_optimizer(self.optimizer, self.schedules[0])
        self.scale, self.num_good, self.num_skipped, self.is_finite = scale, 0, 0, True
        self.tolerance = 1e-5 if dtype == torch.float32 else 1e-3

    @property
    def sides(self):
        """The parameters of both."""
        return [list(net.parameters()) for net in (self.model, self.twin)]

    @property
    def loss_scale(self):
        """As the sharded side says it."""
        value: float = self.optimizer.scale if self.api == "old" else self.manager.loss_scale
        return value

    def backward(self, number, fault="", keep=False, count=1, place=0):
        """Of micro-batch `place` of `count`; a fault spoils the loss of the last rank."""
        x = rows(number, self.dtype)
        part = x.chunk(bmt.world_size())[bmt.rank()].chunk(count)[place]
        loss = self.model(part) * (bmt.world_size() / 16)
        if fault and bmt.rank() == bmt.world_size() - 1:
            loss = FAULTS[fault](loss)
        if self.api[0] == "n":
            self.manager.backward(loss, reduce_gradients=not keep)
        else:
            self.optimizer.loss_scale(loss).backward()
        whole = (
            self.twin(torch.cat([one.chunk(count)[place] for one in x.chunk(bmt.world_size())]))
            / 16
        )
        whole = FAULTS[fault](whole) if fault else whole
        self.is_finite &= bool(whole.isfinite())
        whole.backward()

    def edit(self, change):
        """The program changes something, given the parameters, on both sides."""
        with torch.no_grad():
            for params in self.sides:
                change(params)

    def clip(self, bound=0.5, order=2):
        """Clip both, and compare the norms."""
        params = self.optimizer.param_groups
        if self.api[1] == "n":
            norm = self.manager.clip_grad_norm(params, bound, norm_type=order)
        else:
            norm = clip_grad_norm(params, bound, scale=self.loss_scale, norm_type=order)
        # torch's own norm of half-precision gradients is one in half precision
        grads = [p.grad for p in self.sides[1] if p.grad is not None]
        want = torch.cat([grad.double().reshape(-1) for grad in grads]).norm(order)
        for grad in grads:
            grad.mul_(min(1.0, bound / (float(want) + 1e-6)) if want.isfinite() else math.nan)
        if self.is_finite and want.isfinite():
            torch.testing.assert_close(norm.double(), want, rtol=self.tolerance, atol=0)
        assert norm.isfinite() == want.isfinite()

    def step(self):
        """Both step, or skip."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="optim_step: a gradient is not finite")
            if self.api[2] == "n":
                self.manager.step()
            else:
                bmt.optim_step(self.optimizer, self.schedules[0])
        params = self.sides[1]
        for param, master in zip(params, self.masters, strict=True):
            if param.grad is not None:
                self.is_finite &= bool(param.grad.isfinite().all())
            if master is not param:
                master.grad = None if param.grad is None else param.grad.float()
        if self.is_finite:
            self.reference.step()
            if self.schedules[1] is not None:
                self.schedules[1].step()
            with torch.no_grad():
                for param, master in zip(params, self.masters, strict=True):
                    param.copy_(master)
        self._judge()

    def _judge(self):
        self.num_skipped += not self.is_finite
        self.num_good = self.num_good + 1 if self.is_finite else 0
        if self.scale is not None:
            self.scale /= 1 if self.is_finite else 2
            if self.num_good == self.growth:
                self.scale, self.num_good = self.scale * 2, 0
        self.is_finite = True

    def zero_grad(self, set_to_none=True):
        """Of both."""
        owner: Any = self.optimizer if self.api == "old" else self.manager
        owner.zero_grad(set_to_none=set_to_none)
        self.twin.zero_grad(set_to_none=set_to_none)
        self.is_finite = True

    def write(self, change):
        """The program writes weights, which masters follow."""
        self.edit(change)
        with torch.no_grad():
            for param, master in zip(self.sides[1], self.masters, strict=True):
                master.copy_(torch.where(master.to(param.dtype) == param, master, param))

    def run(self, steps, fault=""):
        """Steps with nothing special."""
        for step in range(steps) if isinstance(steps, int) else steps:
            self.zero_grad(set_to_none=step % 2 == 0)
            self.backward(step, fault)
            self.step()
        return self

    def train(self, steps, fault=""):
        """The same, compared at the end."""
        self.run(steps, fault).check(f"after {steps}", with_gradients=not fault)
        return self

    def check(self, what, with_gradients=True):
        """Everything is the same on both sides; gradients but for the loss scale."""
        scale = self.loss_scale
        assert scale == (self.scale or 1), f"{what}: {scale}, expected {self.scale}"
        if self.api != "old":
            assert self.manager.skipped_steps == self.num_skipped, what
        for one, other in zip(
            self.optimizer.param_groups, self.reference.param_groups, strict=True
        ):
            for name in one.keys() & {"lr", "betas", "momentum"} if self.schedules[0] else ():
                assert one[name] == other[name], what
        got, want = models.cloned_state(self.model), self.twin.state_dict()
        models.assert_same_dicts(got, want, what, self.tolerance)
        if with_gradients:
            grads = models.full_gradients(self.model)
            unscaled = {name: g if g is None else g / scale for name, g in grads.items()}
            models.assert_same_dicts(
                unscaled, models.plain_gradients(self.twin), f"{what}, gradients", self.tolerance
            )
        self._check_states(what)

    def _check_states(self, what):
        if self.optimizer.__class__ is self.reference.__class__:
            states = self.manager.state_dict(gather_opt=True)["optimizers"][0]["state"]
        else:
            states = self.optimizer.state_dict(gather=True)["state"]
        params = [p for group in self.reference.param_groups for p in group["params"]]
        for index, param in enumerate(params):
            found = states.get(index, {"step": 0})
            state = {"master": param.detach()} if "master" in found else {}
            state |= self.reference.state.get(param, {"step": 0})
            for name, value in state.items():
                got = torch.as_tensor(found[name]).float()
                models.assert_same(
                    got.reshape(torch.as_tensor(value).shape),  # of ordinary ones it is flat
                    torch.as_tensor(value).float(),
                    f"{what}: {name} {index}",
                    self.tolerance,
                )
