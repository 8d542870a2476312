"""Steps whose loss or gradients are not finite: they are left out, whatever steps, as if their
batch had not been.
"""

from __future__ import annotations

import contextlib
import copy
import io
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.ranks.runner import run_ranks
from torch import nn

import bmtrain as bmt
from bmtrain.errors import ConfigurationError, NonFiniteError
from bmtrain.optim import AdamOffloadOptimizer, AdamOptimizer, OptimManager
from bmtrain.optim.verdict import Verdict

Fault = Callable[[torch.Tensor], torch.Tensor]


class ZeroGradient(torch.autograd.Function):
    """A loss that is NaN and has gradients of zero, as a mean over no targets."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor) -> torch.Tensor:
        return loss * math.nan

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(grad)


class BadGradient(torch.autograd.Function):
    """A finite loss whose gradient is not."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor) -> torch.Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * math.inf


FAULTS: dict[str, Fault] = {
    "loss": lambda loss: loss * math.nan,
    "loss alone": ZeroGradient.apply,
    "gradient": BadGradient.apply,
}
OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "adam": lambda params: AdamOptimizer(params, lr=0.01, weight_decay=0.1),
    "offload": lambda params: AdamOffloadOptimizer(params, lr=0.01),
    "torch adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
}


def make_model(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 2), nn.Linear(2, 1)).to(dtype)


def rows(step: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(12, 7, generator=torch.Generator().manual_seed(step)).to(dtype)


class Training:
    """A small model in two micro-batches a step, an ordinary layer behind it."""

    def __init__(self, optimizer: str, dtype: torch.dtype = torch.float32, **manager: Any) -> None:
        model = make_model(dtype)
        model[0] = bmt.Block(model[0])
        self.model: nn.Module = bmt.BMTrainModelWrapper(model)
        torch.manual_seed(12)
        self.plain = nn.Linear(1, 1).to(dtype)
        self.dtype = dtype
        params = [*self.model.parameters(), *self.plain.parameters()]
        self.optimizer = OPTIMIZERS[optimizer](params)
        self.schedule = bmt.lr_scheduler.Linear(self.optimizer, 0.01, 3, 20)
        self.manager = OptimManager(**manager)
        self.manager.add_optimizer(self.optimizer, self.schedule)

    def step(self, step: int, fault: Fault | None = None, clip: bool = True) -> None:
        mine = rows(step, self.dtype).chunk(bmt.world_size())[bmt.rank()]
        self.manager.zero_grad()
        for place, part in enumerate(mine.chunk(2)):
            loss = self.plain(self.model(part)).float().square().mean() / 2
            last_rank = bmt.rank() == bmt.world_size() - 1
            if fault is not None and place == 0 and last_rank:
                loss = fault(loss)
            self.manager.backward(loss)
        if clip:
            self.manager.clip_grad_norm(self.optimizer.param_groups, 1.0)
        self.manager.step()

    def state(self) -> Any:
        weights = [p.detach().clone() for p in (*self.model.parameters(), *self.plain.parameters())]
        state = copy.deepcopy(self.manager.state_dict())
        del state["num_skipped"]
        return [weights, state]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return bool((one == other).all())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def left_out(late: bool) -> list[str]:
    """Which set-ups differ from the run without the bad batches."""
    Verdict.needs_waiting = late  # type: ignore[method-assign, assignment]
    wrong = []
    settings = [
        (optimizer, fault, dtype, clip)
        for optimizer in OPTIMIZERS
        for fault in FAULTS
        for dtype, clip in ((torch.float32, True), (torch.bfloat16, False))
        if optimizer == "adam" or clip
    ]
    for optimizer, fault, dtype, clip in settings:
        broken, whole = Training(optimizer, dtype), Training(optimizer, dtype)
        for step in range(7):
            bad = step in (0, 3, 4, 6)
            broken.step(step, FAULTS[fault] if bad else None, clip)
            if not bad:
                whole.step(step, None, clip)
        if not same(broken.state(), whole.state()):
            wrong.append(f"{optimizer}, {fault}, {dtype}")
        if (broken.manager.skipped_steps, broken.manager.skipped_in_a_row) != (4, 1):
            wrong.append(f"{optimizer}, {fault}: counted {broken.manager.skipped_steps}")
    return wrong


@pytest.mark.parametrize(("world_size", "late"), [(1, True), (2, False)])
def test_bad_batches_leave_nothing(world_size: int, late: bool) -> None:
    """Weights, states, schedules and counts are bitwise those of a run without these batches: for
    our optimizers and torch's, faults of losses and gradients in one micro-batch of one rank.
    """
    assert run_ranks(left_out, world_size, late) == [[]] * world_size


def as_plain() -> None:
    for name, make in (
        ("torch adamw", lambda params: torch.optim.AdamW(params, lr=0.01)),
        ("adam", lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1, fused=True)),
    ):
        training = Training(name)
        training.manager = OptimManager()
        training.manager.add_optimizer(training.optimizer)
        model = make_model(torch.float32)
        torch.manual_seed(12)
        model.append(nn.Linear(1, 1))
        plain = make(model.parameters())
        for group in training.optimizer.param_groups:
            group["lr"] = 0.01
        for step in range(6):
            bad = step in (1, 4)
            training.step(step, FAULTS["gradient"] if bad else None, clip=False)
            if bad:
                continue
            plain.zero_grad()
            for part in rows(step, torch.float32).chunk(2):
                (model(part).square().mean() / 2).backward()
            plain.step()
        for mine, want in zip(
            [*training.model.parameters(), *training.plain.parameters()],
            model.parameters(),
            strict=True,
        ):
            assert torch.equal(mine.detach() + 0, want.detach()), name


def test_it_is_plain_torch_without_the_batch() -> None:
    """One process of PyTorch that is not shown the bad batches has the same bits."""
    run_ranks(as_plain, 1)


def said_and_raised() -> tuple[str, str]:
    out = io.StringIO()
    training = Training("adam", max_skipped_steps=2)
    with contextlib.redirect_stdout(out):
        for step, bad in enumerate((True, False, True, True)):
            training.step(step, FAULTS["loss"] if bad else None)
        before = training.state()
        with pytest.raises(NonFiniteError, match=r"2 steps in a row were skipped") as raised:
            training.step(5)
    assert same(training.state(), before)
    return out.getvalue(), str(raised.value)


def test_it_is_said_and_ends() -> None:
    """By rank 0; after `max_skipped_steps` in a row all ranks raise, and nothing has changed."""
    (said, error), (silent, same_error) = run_ranks(said_and_raised, 2)
    start = "the loss or a gradient is not finite: the step is skipped on all ranks"
    assert said.splitlines() == [
        f"{start} (1 in a row, 1 in all)",
        f"{start} (1 in a row, 2 in all)",
        f"{start} (2 in a row, 3 in all)",
    ]
    assert silent == "" and error == same_error


def scaled() -> None:
    training = Training("adam", torch.float16, loss_scale=4, max_skipped_steps=3)
    for step in range(5):
        training.step(step, FAULTS["gradient"]) if step < 2 else skip_quietly(training, step)
    assert training.manager.loss_scale == 1 and training.manager.skipped_steps == 5
    with pytest.raises(NonFiniteError, match="3 steps in a row"):
        training.step(9)


def skip_quietly(training: Training, step: int) -> None:
    with pytest.warns(UserWarning, match="smallest loss scale"):
        training.step(step, FAULTS["gradient"])


def test_a_loss_scale_that_can_fall_is_no_fault() -> None:
    """Only steps that are skipped at the smallest scale count towards the end."""
    run_ranks(scaled, 1)


def dropped() -> None:
    training = Training("adam")
    for clear in (training.manager, training.optimizer):
        loss = training.plain(training.model(rows(0, torch.float32))).mean()
        training.manager.backward(ZeroGradient.apply(loss))
        clear.zero_grad()
        loss = training.plain(training.model(rows(0, torch.float32))).mean()
        training.manager.backward(loss)
        training.manager.step()
        training.manager.zero_grad()
    assert training.manager.skipped_steps == 0


def test_a_loss_that_is_given_up_does_not_count() -> None:
    """Its gradients were cleared, by the manager or the optimizer, before the step."""
    run_ranks(dropped, 1)


def sparse() -> None:
    torch.manual_seed(1)
    table, layer = nn.Embedding(10, 4, sparse=True), nn.Linear(4, 1)
    manager = OptimManager()
    for optimizer in (
        torch.optim.SparseAdam(table.parameters()),
        torch.optim.SGD(layer.parameters(), lr=0.1),
    ):
        manager.add_optimizer(optimizer)
    for factor, skipped in ((1.0, 0), (math.nan, 1), (1.0, 1)):
        before = table.weight.detach().clone()
        manager.zero_grad()
        manager.backward(layer(table(torch.tensor([1, 2, 2]))).sum() * factor)
        assert table.weight.grad is not None
        assert layer.weight.grad is not None
        want = table.weight.grad.to_dense().square().sum() + layer.weight.grad.square().sum()
        norm = manager.clip_grad_norm([table.weight, layer.weight], math.inf)
        torch.testing.assert_close(norm, want.sqrt(), equal_nan=True)
        manager.step()
        assert manager.skipped_steps == skipped
        assert torch.equal(table.weight, before) == math.isnan(factor)


def test_sparse_gradients_are_looked_at() -> None:
    """Rows that occur twice count as their sum."""
    run_ranks(sparse, 1)


def old_interface() -> None:
    for scale in (None, 1.0):
        model = bmt.BMTrainModelWrapper(make_model(torch.float32))
        optimizer = AdamOptimizer(model.parameters(), lr=0.01, scale=scale)
        schedule = bmt.lr_scheduler.Linear(optimizer, 0.01, 3, 20)
        before = [p.detach().clone() for p in model.parameters()]
        loss = F.mse_loss(model(rows(0, torch.float32)), torch.zeros(12, 1)) * math.inf
        optimizer.loss_scale(loss).backward()
        with pytest.warns(UserWarning, match="optim_step: a gradient is not finite"):
            bmt.optim_step(optimizer, schedule)
        assert schedule.num_iter == 0 and not optimizer.state_dict()["state"].get("step")
        for param, want in zip(model.parameters(), before, strict=True):
            assert torch.equal(param.detach() + 0, want)


def test_optim_step_skips_too() -> None:
    """BMTrain 0.1's loop without a loss scale."""
    run_ranks(old_interface, 1)


def test_a_limit_below_one_is_refused() -> None:
    run_ranks(refused, 1)


def refused() -> None:
    with pytest.raises(ConfigurationError, match="max_skipped_steps is 0"):
        OptimManager(max_skipped_steps=0)
