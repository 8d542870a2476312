"""Optimizers, clipping, loss scaling and the manager against torch's, and their state across world
sizes.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.ranks import models
from tests.ranks.runner import run_ranks
from tests.tensors import grad_of
from torch import nn

import bmtrain as bmt
from bmtrain.errors import ConfigurationError, ParameterError
from bmtrain.optim import AdamOffloadOptimizer, AdamOptimizer, OptimManager
from bmtrain.shard.slices import Slices

BOTH: dict[str, Callable[..., Any]] = {"adam": AdamOptimizer, "offload": AdamOffloadOptimizer}


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Prime sizes, one layer smaller than the world."""
    torch.manual_seed(11)
    return nn.Sequential(
        nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 2), nn.Linear(2, 1, bias=True)
    ).to(dtype)


def sharded_net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    model = net(dtype)
    model[0] = bmt.Block(model[0])
    return bmt.BMTrainModelWrapper(model)


def inputs(step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(12, 7, generator=torch.Generator().manual_seed(step)).to(dtype)


def mine(step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return inputs(step, dtype).chunk(bmt.world_size())[bmt.rank()]


def loss_of(model: nn.Module, x: torch.Tensor, step: int) -> torch.Tensor:
    return (model(x).float() + 0.1 * step).square().mean()


def groups(model: nn.Module) -> list[dict[str, Any]]:
    biases = [param for name, param in model.named_parameters() if name.endswith("bias")]
    weights = [param for name, param in model.named_parameters() if not name.endswith("bias")]
    return [
        {"params": weights, "weight_decay": 0.3},
        {"params": biases, "lr": 0.02, "weight_decay": 0.0},
    ]


def steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    numbers: range,
    *,
    manager: OptimManager | None = None,
) -> OptimManager:
    if manager is None:
        manager = OptimManager()
        manager.add_optimizer(optimizer)
    for step in numbers:
        manager.zero_grad(set_to_none=step % 2 == 0)
        manager.backward(loss_of(model, mine(step), step))
        manager.step()
    return manager


def plain_steps(optimizer: Callable[[Any], torch.optim.Optimizer], num_steps: int) -> nn.Sequential:
    model = net()
    stepper = optimizer(groups(model))
    for step in range(num_steps):
        stepper.zero_grad(set_to_none=step % 2 == 0)
        loss_of(model, inputs(step), step).backward()
        stepper.step()
    return model


Factory = Callable[[Any], torch.optim.Optimizer]
NATIVE: dict[str, Factory] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "adamw fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "adamw amsgrad": lambda params: torch.optim.AdamW(params, lr=0.01, amsgrad=True, foreach=False),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.5),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01),
}
PAIRS: dict[str, tuple[Factory, Factory]] = {
    "maximize": (
        lambda params: torch.optim.AdamW(params, lr=0.01, maximize=True),
        lambda params: AdamOptimizer(params, lr=0.01, maximize=True),
    ),
    "offload maximize": (
        lambda params: torch.optim.AdamW(params, lr=0.01, maximize=True),
        lambda params: AdamOffloadOptimizer(params, lr=0.01, maximize=True),
    ),
    "betas and eps": (
        lambda params: torch.optim.AdamW(params, lr=0.01, betas=(0.5, 0.7), eps=1e-3),
        lambda params: AdamOptimizer(params, lr=0.01, betas=(0.5, 0.7), eps=1e-3),
    ),
}
PAIRS |= {name: (factory, factory) for name, factory in NATIVE.items()}


def train_pairs() -> dict[str, dict[str, torch.Tensor]]:
    out = {}
    for name, (_, factory) in PAIRS.items():
        model = sharded_net()
        steps(model, factory(groups(model)), range(5))
        out[name] = models.cloned_state(model)
    return out


@pytest.mark.parametrize("world_size", [1, 3])
def test_optimizers_do_what_torch_does(world_size: int) -> None:
    """torch's own optimizers unchanged, and ours with every option, give torch's parameters; both
    ways of zero_grad.
    """
    got = run_ranks(train_pairs, world_size)
    for name, (factory, _) in PAIRS.items():
        want = plain_steps(factory, 5).state_dict()
        for rank in got:
            models.assert_same_dicts(rank[name], want, f"{name} on {world_size} ranks")


def train_and_save() -> dict[str, Any]:
    """Four steps, the gathered state after them, and four steps more."""
    out: dict[str, Any] = {}
    for name, factory in {**BOTH, "sgd": NATIVE["sgd"], "adamw": NATIVE["adamw"]}.items():
        model = sharded_net()
        optimizer = factory(groups(model))
        manager = steps(model, optimizer, range(4))
        middle = (models.cloned_state(model), copy.deepcopy(manager.state_dict(gather_opt=True)))
        local = copy.deepcopy(manager.state_dict())
        steps(model, optimizer, range(4, 8), manager=manager)
        out[name] = (*middle, models.cloned_state(model))
        again = sharded_net()
        again.load_state_dict(middle[0])
        other = factory(groups(again))
        second = OptimManager()
        second.add_optimizer(other)
        second.load_state_dict(local)
        steps(again, other, range(4, 8), manager=second)
        models.assert_same_dicts(
            again.state_dict(), model.state_dict(), f"{name}: this rank's own state", 0.0
        )
    return out


def resume(saved: dict[str, Any]) -> dict[str, Any]:
    out = {}
    for name, factory in {**BOTH, "sgd": NATIVE["sgd"], "adamw": NATIVE["adamw"]}.items():
        model = sharded_net()
        model.load_state_dict(saved[name][0])
        optimizer = factory(groups(model))
        manager = OptimManager()
        manager.add_optimizer(optimizer)
        manager.load_state_dict(saved[name][1])
        again = manager.state_dict(gather_opt=True)
        for index, state in again["optimizers"][0]["state"].items():
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    assert torch.equal(
                        value, saved[name][1]["optimizers"][0]["state"][index][key]
                    ), f"{name}: {index} {key}"
        steps(model, optimizer, range(4, 8), manager=manager)
        out[name] = models.cloned_state(model)
    return out


def test_gathered_state_goes_on_at_any_world_size() -> None:
    """State of 3 ranks goes on at 1, 2, 3 and 4 as if never interrupted; at the same size
    bitwise.
    """
    saved = run_ranks(train_and_save, 3)[0]
    for world_size in (1, 2, 3, 4):
        for name, state in run_ranks(resume, world_size, saved)[0].items():
            # Else sums are taken in another order, and Adam divides small gradients by themselves:
            # 1.1e-6 on one processor.
            tolerance = 0.0 if world_size == 3 else 4e-6
            models.assert_same_dicts(
                state, saved[name][2], f"{name}: 3 ranks to {world_size}", tolerance
            )


def half_master(dtype: torch.dtype, kind: str) -> None:
    """Master weights are exact, survive their state dict, and follow weights loaded later."""
    model = sharded_net(dtype)
    # too small a step for half precision to show
    optimizer = BOTH[kind](model.parameters(), lr=1e-5)
    start = {name: value.float() * 2 for name, value in model.state_dict().items()}
    exact = nn.Sequential(*(copy.deepcopy(m) for m in net(dtype).float()))
    reference = torch.optim.AdamW(exact.parameters(), lr=1e-5, weight_decay=0.0)
    manager = OptimManager()
    manager.add_optimizer(optimizer)
    for step in range(30):
        manager.zero_grad()
        manager.backward(loss_of(model, mine(step, dtype), step))
        whole = models.full_gradients(model)
        for name, param in exact.named_parameters():
            param.grad = whole[name].float()  # type: ignore[union-attr]
        reference.step()
        manager.step()
    for (name, value), want in zip(model.state_dict().items(), exact.parameters(), strict=True):
        assert value.dtype == dtype
        assert torch.equal(value, want.detach().to(dtype)), (
            f"{kind} {dtype} {name} is not the rounded master"
        )
    state = optimizer.state_dict(gather=True)
    for index, want in enumerate(exact.parameters()):
        models.assert_same(
            state["state"][index]["master"], want.detach(), f"{kind} {dtype} master {index}", 1e-6
        )
    model.load_state_dict({name: value.to(dtype) for name, value in start.items()})
    manager.zero_grad()
    manager.backward(loss_of(model, mine(0, dtype), 0) * 0)
    manager.step()
    for name, value in model.state_dict().items():
        error = (value.float() - start[name]).abs().max()
        assert error <= 1e-4 * start[name].abs().max() + 2e-5, (
            f"{kind} {dtype} {name}: the loaded weights were undone"
        )
    master = optimizer.state_dict(gather=True)["state"]
    for index, (name, value) in enumerate(start.items()):
        assert (master[index]["master"] - value).abs().max() < 2e-5, (
            f"{kind} {dtype} {name}: the master did not follow"
        )


def all_half_masters() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        for kind in BOTH:
            half_master(dtype, kind)


@pytest.mark.parametrize("world_size", [1, 2])
def test_half_precision_has_exact_masters(world_size: int) -> None:
    """bf16 and fp16: weights are the rounded fp32 masters; a checkpoint loaded after steps is
    honoured.
    """
    run_ranks(all_half_masters, world_size)


def hold() -> None:
    for factory in BOTH.values():
        model = sharded_net()
        before = models.cloned_state(model)
        optimizer = factory(model.parameters(), lr=0.1, hold_steps=3)
        manager = steps(model, optimizer, range(3))
        models.assert_same_dicts(model.state_dict(), before, "during hold_steps", 0.0)
        plain = net()
        reference = torch.optim.AdamW(plain.parameters(), lr=0.0, weight_decay=0.0)
        for step in range(4):
            reference.param_groups[0]["lr"] = 0.1 if step == 3 else 0.0
            reference.zero_grad()
            loss_of(plain, inputs(step), step).backward()
            reference.step()
        steps(model, optimizer, range(3, 4), manager=manager)
        models.assert_same_dicts(model.state_dict(), plain.state_dict(), "after hold_steps")


@pytest.mark.parametrize("world_size", [1, 3])
def test_hold_steps_builds_moments_only(world_size: int) -> None:
    """Learning rate 0 for the first n steps; then as if the moments had been built by torch."""
    run_ranks(hold, world_size)


def overflow() -> None:
    """Only one rank's loss overflows."""
    last = bmt.world_size() - 1
    for factory in (AdamOptimizer, torch.optim.SGD):
        model = sharded_net()
        optimizer = factory(model.parameters(), lr=0.01)
        scheduler = bmt.lr_scheduler.NoDecay(optimizer, 0.01, 0, -1)
        manager = OptimManager(
            loss_scale=8,
            loss_scale_factor=4,
            loss_scale_steps=2,
            min_loss_scale=1,
            max_loss_scale=16,
        )
        manager.add_optimizer(optimizer, scheduler)
        before = models.cloned_state(model)
        for bad, want in ((math.inf, 2.0), (math.nan, 1.0)):
            manager.zero_grad()
            loss = loss_of(model, mine(0), 0)
            manager.backward(loss * bad if bmt.rank() == last else loss)
            iteration = scheduler.num_iter
            manager.step()
            assert manager.loss_scale == want, f"{factory.__name__}: {manager.loss_scale}"
            assert scheduler.num_iter == iteration, "the schedule went on at a skipped step"
        models.assert_same_dicts(
            model.state_dict(), before, f"{factory.__name__} after skipped steps", 0.0
        )
        scales = []
        for step in range(6):
            manager.zero_grad()
            manager.backward(loss_of(model, mine(step), step))
            manager.step()
            scales.append(manager.loss_scale)
        assert scales == [1, 4, 4, 16, 16, 16], f"{factory.__name__}: {scales}"
        plain = net()
        reference: torch.optim.Optimizer = torch.optim.AdamW(
            plain.parameters(), lr=0.01, weight_decay=0
        )
        if factory is torch.optim.SGD:
            reference = torch.optim.SGD(plain.parameters(), lr=0.01)
        for step in range(6):
            reference.zero_grad()
            loss_of(plain, inputs(step), step).backward()
            reference.step()
        models.assert_same_dicts(
            model.state_dict(), plain.state_dict(), f"{factory.__name__} under a loss scale"
        )


@pytest.mark.parametrize("world_size", [1, 3])
def test_all_ranks_skip_when_one_overflows(world_size: int) -> None:
    """Skipped steps change nothing but the scale, which stays in its bounds, grows after good steps
    and does not change results.
    """
    run_ranks(overflow, world_size)


def overflow_at_minimum() -> None:
    model = sharded_net()
    manager = OptimManager(loss_scale=1, min_loss_scale=1)
    manager.add_optimizer(AdamOptimizer(model.parameters()))
    manager.backward(loss_of(model, mine(0), 0) * math.inf)
    with pytest.warns(UserWarning, match="smallest loss scale"):
        manager.step()
    assert manager.loss_scale == 1


def test_overflow_at_the_smallest_scale_warns() -> None:
    """A diverging run says so."""
    run_ranks(overflow_at_minimum, 2)


def clip(order: float, scale: float | None) -> None:
    what = f"norm {order}, scale {scale}, {bmt.world_size()} ranks"
    whole = models.shard_whole(3, True)  # tied, tiny, 0-dim and plain parameters
    optimizer = AdamOptimizer(whole.parameters())
    manager = OptimManager(loss_scale=scale)
    manager.add_optimizer(optimizer)
    tokens, targets = (part.chunk(bmt.world_size())[bmt.rank()] for part in models.batch(1))
    manager.backward(models.loss_of(whole, tokens, targets, 1))
    plain = models.make_whole()
    models.loss_of(plain, *models.batch(1), 1).backward()
    want = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01, norm_type=order)
    got = manager.clip_grad_norm(optimizer.param_groups, 0.01, norm_type=order)
    models.assert_same(got, want, what)
    scaled = {
        name: None if grad is None else grad * (scale or 1)
        for name, grad in models.plain_gradients(plain).items()
    }
    models.assert_same_dicts(models.full_gradients(whole), scaled, what)
    again = manager.clip_grad_norm(whole.parameters(), 1e9, norm_type=order)
    assert abs(again.item() - 0.01) < 1e-5, what


def clip_all() -> None:
    for order in (2, 1, math.inf, 3.0):
        for scale in (None, 256.0):
            clip(order, scale)
    manager = OptimManager()
    empty = manager.clip_grad_norm([{"params": []}], 1.0)
    assert empty.item() == 0


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_norms_and_clipping_are_torchs(world_size: int) -> None:
    """2, 1, 3 and inf norms of all parameters, tied ones once, unscaled; and the clipped
    gradients.
    """
    run_ranks(clip_all, world_size)


def norms_of_nan() -> None:
    for order in (2, 1, math.inf, 3.0):
        for owner in range(bmt.world_size()):
            param = bmt.DistributedParameter(torch.ones(64 * bmt.world_size(), 64))
            param.sum().backward()
            slices = grad_of(param)
            assert isinstance(slices, Slices)
            if bmt.rank() == owner:
                slices.local[-1] = math.nan
            norm = bmt.optim.clip_grad_norm(param, 1.0, norm_type=order)
            assert norm.isnan(), (order, owner, norm)
            assert slices.local.isnan().all(), (order, owner)


@pytest.mark.parametrize("world_size", [1, 3])
def test_norms_are_nan_where_a_gradient_is(world_size: int) -> None:
    """On all ranks, whichever owns it: a maximum over ranks would lose it."""
    run_ranks(norms_of_nan, world_size)


def looked_at_early() -> None:
    model, plain = sharded_net(), net()
    manager = OptimManager()
    manager.add_optimizer(AdamOptimizer(model.parameters()))
    for step in range(2):
        manager.backward(loss_of(model, mine(step), step), reduce_gradients=False)
        loss_of(plain, inputs(step), step).backward()
        models.assert_same_dicts(
            models.full_gradients(model), models.plain_gradients(plain), f"micro-batch {step}"
        )


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_gradient_that_is_kept_back_can_be_read(world_size: int) -> None:
    """It is reduced then, and what comes later is added."""
    run_ranks(looked_at_early, world_size)


def abandoned() -> None:
    model = sharded_net()
    manager = OptimManager()
    manager.add_optimizer(AdamOptimizer(model.parameters()))
    manager.backward(loss_of(model, mine(0), 0), reduce_gradients=False)
    manager.zero_grad()
    manager.backward(loss_of(model, mine(1), 1))
    plain = net()
    loss_of(plain, inputs(1), 1).backward()
    models.assert_same_dicts(
        models.full_gradients(model), models.plain_gradients(plain), "after zero_grad"
    )


@pytest.mark.parametrize("world_size", [1, 2])
def test_zero_grad_clears_what_was_kept_back(world_size: int) -> None:
    """A micro-batch whose reduction was deferred is gone after zero_grad, as in plain
    accumulation.
    """
    run_ranks(abandoned, world_size)


def edited() -> None:
    """The program writes gradients itself between micro-batches."""
    plain, model = net(), sharded_net()
    for step in range(3):
        loss_of(plain, inputs(step), step).backward()
        (loss_of(model, mine(step), step) / bmt.world_size()).backward()
        for module in (plain, model):
            params = list(module.parameters())
            grad_of(params[0]).mul_(0.5)
            params[1].grad = grad_of(params[1]) * 3
            params[2].grad = None if step == 1 else params[2].grad
    models.assert_same_dicts(
        models.full_gradients(model), models.plain_gradients(plain), "edited gradients"
    )


@pytest.mark.parametrize("world_size", [1, 3])
def test_gradients_belong_to_the_program(world_size: int) -> None:
    """Gradients scaled in place, replaced or cleared between backward passes count as in plain
    PyTorch.
    """
    run_ranks(edited, world_size)


def old_program() -> dict[str, torch.Tensor]:
    model = sharded_net()
    optimizer = AdamOffloadOptimizer(
        model.parameters(), lr=0.01, weight_decay=0.1, scale=64, scale_factor=2, scale_steps=3
    )
    scheduler = bmt.lr_scheduler.NoDecay(optimizer, 0.01, 0, -1)
    scales = []
    for step in range(5):
        optimizer.zero_grad()
        loss = optimizer.loss_scale(loss_of(model, mine(step), step))
        loss.backward()
        norm = bmt.optim.clip_grad_norm(
            optimizer.param_groups, 0.05, scale=optimizer.scale, norm_type=2
        )
        assert norm > 0
        bmt.optim_step(optimizer, scheduler)
        scales.append(optimizer.scale)
    assert scales == [64, 64, 128, 128, 128]
    before = models.cloned_state(model)
    optimizer.zero_grad()
    (
        optimizer.loss_scale(loss_of(model, mine(0), 0)) * (math.inf if bmt.rank() == 0 else 1)
    ).backward()
    bmt.optim_step(optimizer, scheduler)
    assert optimizer.scale == 64
    models.assert_same_dicts(model.state_dict(), before, "after an overflow", 0.0)
    return before


@pytest.mark.parametrize("world_size", [1, 2])
def test_programs_of_the_first_api(world_size: int) -> None:
    """loss_scale, scale, clip_grad_norm and optim_step train as torch does, and skip an overflow on
    all ranks.
    """
    plain = net()
    reference = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.1)
    for step in range(5):
        reference.zero_grad()
        loss_of(plain, inputs(step), step).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        reference.step()
    for state in run_ranks(old_program, world_size):
        models.assert_same_dicts(state, plain.state_dict(), "0.1.x program")


def deltas() -> tuple[float, float, torch.Tensor]:
    model = sharded_net()
    optimizer = AdamOffloadOptimizer(model.parameters(), lr=0.01, record_delta=True)
    steps(model, optimizer, range(2))
    before = models.cloned_state(model)
    manager = steps(model, optimizer, range(2, 3))
    assert manager.optimizers == [optimizer]
    after = model.state_dict()
    return (
        optimizer.get_avg_delta(),
        optimizer.get_var_delta(),
        torch.cat([(after[n] - before[n]).reshape(-1) for n in after]),
    )


@pytest.mark.parametrize("world_size", [1, 3])
def test_record_delta(world_size: int) -> None:
    """Mean and variance of the last update of every weight of the whole model, padding not
    counted.
    """
    for mean, variance, change in run_ranks(deltas, world_size):
        assert mean == pytest.approx(change.double().mean().item(), rel=1e-4)
        assert variance == pytest.approx(change.double().var(unbiased=False).item(), rel=1e-4)


def manager_state() -> None:
    model = sharded_net()
    a, b = list(model[0].parameters()), [p for m in list(model)[1:] for p in m.parameters()]
    manager = OptimManager(loss_scale=32, loss_scale_steps=3)
    one, two = AdamOptimizer(a, lr=0.01), torch.optim.SGD(b, lr=0.1, momentum=0.9)
    manager.add_optimizer(one, bmt.lr_scheduler.Linear(one, 0.01, 2, 9))
    manager.add_optimizer(two)
    steps(model, one, range(4), manager=manager)
    states = (
        copy.deepcopy(manager.state_dict(gather_opt=True)),
        copy.deepcopy(manager.state_dict()),
    )
    weights = models.cloned_state(model)
    steps(model, one, range(4, 8), manager=manager)
    want = models.cloned_state(model)
    for state in states:
        again = sharded_net()
        again.load_state_dict(weights)
        a, b = list(again[0].parameters()), [p for m in list(again)[1:] for p in m.parameters()]
        second = OptimManager(loss_scale=7, loss_scale_steps=3)
        one, two = AdamOptimizer(a, lr=0.5), torch.optim.SGD(b, lr=0.5, momentum=0.1)
        second.add_optimizer(one, bmt.lr_scheduler.Linear(one, 0.01, 2, 9))
        second.add_optimizer(two)
        second.load_state_dict(state)
        steps(again, one, range(4, 8), manager=second)
        models.assert_same_dicts(again.state_dict(), want, "resumed manager", 0.0)
        assert second.loss_scale == manager.loss_scale
        assert second.lr_schedulers[0].current_lr == manager.lr_schedulers[0].current_lr


@pytest.mark.parametrize("world_size", [1, 2])
def test_manager_state_round_trip(world_size: int) -> None:
    """Optimizers of both kinds, the schedule and the loss scale go on bitwise."""
    run_ranks(manager_state, world_size)


def without_argument() -> None:
    model, plain = sharded_net(), net()
    manager = OptimManager()
    manager.add_optimizer(AdamOptimizer(model.parameters()))
    loss = loss_of(model, mine(1), 1)
    whole = loss_of(plain, inputs(1), 1)
    models.assert_same(bmt.sum_loss(loss).detach(), whole.detach(), "sum_loss")
    manager.backward()
    whole.backward()
    models.assert_same_dicts(
        models.full_gradients(model), models.plain_gradients(plain), "backward()"
    )


@pytest.mark.parametrize("world_size", [1, 3])
def test_backward_without_a_loss(world_size: int) -> None:
    """The README's `backward()` runs on the loss last given to sum_loss, whose value is the mean
    over ranks.
    """
    run_ranks(without_argument, world_size)


def replicas() -> list[torch.Tensor]:
    """Plain parameters, initialised differently on every rank."""
    torch.manual_seed(bmt.rank())
    plain = nn.Linear(7, 3)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
    steps(plain, optimizer, range(3))
    return [param.detach() for param in plain.parameters()]


def test_replicas_stay_equal() -> None:
    """Ordinary parameters start from rank 0's values and get averaged gradients."""
    torch.manual_seed(0)
    plain = nn.Linear(7, 3)
    reference = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for step in range(3):
        reference.zero_grad()
        loss_of(plain, inputs(step), step).backward()
        reference.step()
    for rank in run_ranks(replicas, 3):
        for got, want in zip(rank, plain.parameters(), strict=True):
            models.assert_same(got, want.detach(), "replica")


def frozen_replica() -> None:
    plain, frozen = (
        nn.Linear(7, 3),
        nn.Parameter(torch.full((3,), float(bmt.rank())), requires_grad=False),
    )
    optimizer = AdamOptimizer([*plain.parameters(), frozen], lr=0.1)
    manager = OptimManager()
    manager.add_optimizer(optimizer)
    assert torch.equal(frozen, torch.zeros(3))
    frozen.requires_grad_(True)
    manager.backward((plain(mine(0)) * frozen + frozen).mean())
    grads = bmt.gather_result(grad_of(frozen)[None])
    assert torch.equal(grads, grads[:1].expand_as(grads))


def test_a_frozen_replica_may_be_given_and_unfrozen() -> None:
    """A plain parameter without gradient is no error in any optimizer, and is averaged once it has
    one.
    """
    run_ranks(frozen_replica, 2)


def step_replicas() -> None:
    linear = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
    x = torch.full((4, 3), float(bmt.rank()))
    linear(x).sum().backward()
    with pytest.raises(
        ConfigurationError,
        match=r"optim_step got SGD with a parameter of shape \(2, 3\) that is not sharded",
    ):
        bmt.optim_step(optimizer)
    optimizer.zero_grad()
    bmt.optim.OptimManager().add_optimizer(optimizer)
    linear(x).sum().backward()
    bmt.optim_step(optimizer)
    everyone = bmt.distributed.all_gather(linear.weight.detach())
    assert torch.equal(everyone[0], everyone[1])


def test_old_steps_cannot_part_replicas() -> None:
    run_ranks(step_replicas, 2)


def sets_step_counts(kind: str) -> None:
    """The state of one layer starts anew, as after it was made anew."""
    found = []
    for model, make in ((sharded_net(), BOTH[kind]), (net(), torch.optim.AdamW)):
        optimizer = make(model.parameters(), lr=0.05, weight_decay=0.1)
        for step in range(4):
            x = inputs(step)
            loss_of(model, x, step).backward()
            if isinstance(optimizer, torch.optim.AdamW):
                for param in model.parameters():
                    assert param.grad is not None
                    param.grad.mul_(bmt.world_size())
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                state = optimizer.state[next(iter(model.parameters()))]
                state["step"] *= 0
                for name in ("exp_avg", "exp_avg_sq"):
                    state[name].zero_()
        found.append({name: x.detach().clone() for name, x in model.state_dict().items()})
    for name, want in found[1].items():
        torch.testing.assert_close(found[0][name], want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("kind", BOTH)
def test_step_counts_that_the_program_sets(kind: str, world_size: int) -> None:
    run_ranks(sets_step_counts, world_size, kind)


def refuses_strides(kind: str) -> None:
    param = nn.Parameter(torch.arange(12.0).reshape(3, 4).t())
    before = param.detach().clone()
    optimizer = BOTH[kind]([param], lr=0.1)
    param.grad = torch.ones_like(param)
    with pytest.raises(ParameterError, match=r"param\.data\.contiguous"):
        optimizer.step()
    assert torch.equal(param, before)
    param.data, param.grad = before.contiguous(), torch.ones(4, 3)
    optimizer.step()
    torch.testing.assert_close(param.detach(), before - 0.1)


@pytest.mark.parametrize("kind", BOTH)
def test_ordinary_parameters_with_strides_are_refused(kind: str) -> None:
    run_ranks(refuses_strides, 1, kind)
