"""Optimizers, clipping, loss scaling and the manager compute what one process does, with everything
that a program does between: see pairs.py.
"""

import contextlib
import copy
import functools
import math
from typing import Any

import pytest
import torch
from tests.ranks import models
from tests.ranks.pairs import KINDS, Pair, groups, late_verdicts, rows, sharded
from tests.ranks.runner import on_ranks, run_ranks
from tests.tensors import grad_of
from torch import nn
from torch.optim import AdamW, lr_scheduler

import bmtrain as bmt
from bmtrain.errors import ConfigurationError, ParameterError
from bmtrain.optim import AdamOffloadOptimizer, AdamOptimizer, OptimManager
from bmtrain.shard.slices import local_of

SCHEDULES = {
    "none": None,
    "ours": lambda optimizer: bmt.lr_scheduler.Linear(optimizer, 0.01, 3, 20),
    "cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=30),
    "chain": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)],
        milestones=[2],
    ),
}
# All pairs of two settings; those of the first lines stay in the short suite. Kind, dtype, api and
# loss scale as in pairs.py (a long api changes with each step); fault; order of the norm, 0 for no
# clipping; when the host knows a verdict; schedule; micro-batches: one, or two of which each is
# reduced, or the first kept; what the program does to gradients; ranks.
PROGRAMS = """
adam     float16  non       64       inf      0        late     ours     one      dropped  3
offload  float32  nnn       0        gradient 0        now      chain    each     replaced 2
adamw    bfloat16 non       0        nan      1        now      cycle    kept     scaled   3
sgd      bfloat16 nnn       64       alone    3        late     none     kept     ordinary 2
adam     float16  nnonoonoo 64       nan      2        now      none     each     none     2
offload  float32  old       64       gradient inf      late     cycle    one      scaled   2
sgd      float32  nnn       0        inf      2        late     chain    one      none     3
offload  bfloat16 non       0        alone    inf      now      ours     each     ordinary 3
adam     bfloat16 old       64       nan      1        late     chain    one      replaced 3
adamw    float32  non       0        inf      3        now      none     one      dropped  2
offload  float16  nnonoonoo 64       inf      3        late     cycle    each     replaced 3
adamw    bfloat16 non       64       gradient 2        late     ours     kept     none     2
adam     float16  nnn       64       gradient inf      late     chain    kept     dropped  3
offload  float16  old       64       nan      1        now      none     each     dropped  3
adam     float32  nnn       0        nan      1        late     ours     one      ordinary 2
sgd      bfloat16 non       0        alone    0        now      cycle    kept     dropped  3
adam     float16  non       64       alone    3        late     chain    one      scaled   3
adamw    float32  nnn       64       alone    inf      now      none     kept     replaced 3
sgd      float32  nnn       0        gradient 3        now      ours     each     scaled   2
adam     bfloat16 nnonoonoo 64       inf      1        now      cycle    one      ordinary 3
offload  bfloat16 nnn       0        alone    2        now      cycle    kept     none     3
adam     float32  nnonoonoo 64       gradient 0        late     none     one      scaled   3
adamw    float32  non       0        nan      0        now      chain    each     ordinary 2
sgd      float32  non       0        nan      inf      late     ours     each     replaced 2
offload  float16  old       64       gradient 2        late     ours     each     ordinary 2
adam     float32  old       64       inf      3        late     chain    each     none     2
adam     float16  nnonoonoo 64       inf      inf      now      chain    one      none     3
sgd      float32  non       0        gradient 1        late     ours     each     none     3
offload  bfloat16 nnonoonoo 64       inf      2        late     ours     each     dropped  3
sgd      float32  nnn       64       inf      2        now      chain    kept     scaled   3
offload  float16  old       64       nan      0        now      cycle    one      none     2
adam     bfloat16 nnn       0        nan      2        late     chain    kept     replaced 2
sgd      float32  non       64       alone    1        now      cycle    kept     replaced 2
adam     float32  non       0        nan      3        late     chain    one      dropped  3
""".strip().splitlines()
NUM_SHORT = 14


def change_gradients(what, params):
    if what == "scaled":
        grad_of(params[0]).mul_(0.5)
        grad_of(params[-1]).mul_(2.0)
    elif what == "replaced":
        params[1].grad = grad_of(params[1]) * 3
    elif what in ("dropped", "ordinary"):
        params[2 if what == "dropped" else -1].grad = None


def program(line):
    """Steps that are skipped at first, in the middle, twice in a row, and before the last."""
    kind, dtype, api, scale, fault, order, when, schedule, micro, change, _ = line.split()
    count = 1 if micro == "one" else 2
    with late_verdicts() if when == "late" else contextlib.nullcontext():
        pair = Pair(kind, getattr(torch, dtype), api, SCHEDULES[schedule], float(scale) or None)
        for step in range(9):
            spoilt = step in (0, 3, 4, 7)
            pair.api = api if len(api) == 3 else (2 * api)[step : step + 3]
            pair.zero_grad(set_to_none=step % 2 == 0)
            for place in range(count):
                keep = micro == "kept" and place == 0
                pair.backward(step, fault if spoilt and place == 0 else "", keep, count, place)
                if step % 3:
                    pair.edit(functools.partial(change_gradients, change))
            if order != "0":
                pair.clip(order=float(order))
            pair.step()
            pair.check(f"step {step}", with_gradients=not spoilt)


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(line, marks=() if number < NUM_SHORT else pytest.mark.long, id=str(number))
        for number, line in enumerate(PROGRAMS)
    ],
)
def test_programs_train_as_one_process_does(line):
    """Norms, gradients, weights, masters, moments, step counts, rates and loss scale after every
    step; a step that is not finite on one rank is skipped on all, as if its batch had not been.
    """
    run_ranks(program, int(line.rsplit(maxsplit=1)[-1]), line)


OPTIONS = ({"maximize": True}, {"betas": (0.5, 0.7), "eps": 1e-3, "weight_decay": 0.2})


def kinds():
    for options in OPTIONS:
        for ours in ("adam", "offload"):
            Pair(ours, torch.bfloat16, **options).train(4)


def test_optimizers_do_what_torch_does():
    """With every option."""
    run_ranks(kinds, 3)


@on_ranks(3)
def test_what_the_program_writes_into_an_adam():
    """Rates that are held at first, step counts, moments, weights that masters follow; small steps
    are not lost.
    """
    for kind in ("adam", "offload"):
        holding = functools.partial(KINDS[kind][0], hold_steps=3)
        pair = Pair((holding, AdamW))
        for step in range(5):
            for group, rate in zip(pair.reference.param_groups, (0.01, 0.02), strict=True):
                group["lr"] = rate * (step >= 3)
            pair.train(range(step, step + 1))
        pair = Pair(kind, torch.float16, scale=8.0).train(2)
        first, master = next(pair.model.parameters()), pair.masters[0]
        for state in (pair.optimizer.state[first], pair.reference.state[master]):
            state["step"] *= 0  # as that of a layer that was made anew
            for name in ("exp_avg", "exp_avg_sq"):
                state[name].zero_()
        pair.train(range(2, 4))
        pair.write(lambda params: [param.mul_(2.0) for param in params[:3]])
        pair.train(range(4, 6))
        pair.write(lambda params: [param.copy_(torch.ones_like(param)) for param in params])
        pair.train(range(6, 8))
        for dtype in (torch.bfloat16, torch.float16):  # steps that half precision cannot show
            pair = Pair(kind, dtype)
            for group in (*pair.optimizer.param_groups, *pair.reference.param_groups):
                group["lr"] = 1e-5
            pair.tolerance = 1e-6
            pair.run(12)
            pair._check_states("masters")
            for got, want in zip(pair.model.parameters(), pair.masters, strict=True):
                whole = got.gather() if isinstance(got, bmt.DistributedParameter) else got
                assert torch.equal(whole, want.to(dtype)), "not the rounded master"


@on_ranks(3)
def test_gradients_belong_to_the_program():
    """Micro-batches that are kept back, read, given up, clipped or stepped, and gradients that are
    kept over steps which change the loss scale.
    """
    for kind, dtype in (
        ("adam", torch.float16),
        ("sgd", torch.float32),
        ("offload", torch.bfloat16),
    ):
        pair = Pair(kind, dtype, scale=64.0, growth=2).train(1)
        pair.zero_grad()
        for number in range(2):
            pair.backward(number, keep=True)
            pair.check("what is kept back can be read")
        pair.backward(2, keep=True)
        pair.zero_grad()
        pair.backward(3, keep=True)
        pair.optimizer.zero_grad()
        pair.twin.zero_grad()
        pair.backward(4)
        pair.check("after zero_grad")
        pair.backward(5, keep=True)
        pair.step()
        pair.check("kept, then stepped")
        for number in range(6, 10):
            pair.backward(number, keep=True)
            if number % 2:
                pair.clip(20.0)
            pair.step()
            pair.check("gradients of before are added to")
        pair.backward(10, keep=True)
        state = copy.deepcopy(pair.manager.state_dict())
        state["loss_scale_state"] = {"value": 8.0, "good_steps": 0}
        pair.backward(11, keep=True)
        pair.manager.load_rest(state)
        pair.scale, pair.num_good, pair.num_skipped = 8.0, 0, state["num_skipped"]
        pair.backward(12)
        pair.check("another scale while gradients are kept back")
        pair.step()
        pair.check("at the end")
        pair.zero_grad()
        for clear in (pair.optimizer.zero_grad, functools.partial(pair.zero_grad, False)):
            pair.backward(13, "alone", keep=True)  # given up: it does not count
            clear()
            pair.twin.zero_grad()
            pair.is_finite = True
            pair.backward(14)
            pair.step()
        pair.train(range(15, 17))
        assert pair.num_skipped == 0


class Three:
    """A manager with optimizers of three kinds, a schedule and a loss scale."""

    def __init__(self, scale, rate):
        self.model = sharded()
        body, plain = list(self.model.body.parameters()), list(self.model.plain.parameters())
        one, two = AdamOptimizer(body[:2], lr=rate), AdamOffloadOptimizer(body[2:], lr=rate)
        three = torch.optim.SGD(plain, lr=rate, momentum=0.9)
        self.manager = OptimManager(loss_scale=scale, loss_scale_steps=3)
        self.manager.add_optimizer(one, bmt.lr_scheduler.Linear(one, 0.01, 2, 9))
        self.manager.add_optimizer(two)
        self.manager.add_optimizer(three)

    def train(self, steps):
        for step in steps:
            self.manager.zero_grad()
            own = models.own(rows(step))
            self.manager.backward(self.model(own) / len(own))
            self.manager.step()
        return self

    @property
    def numbers(self):
        manager = self.manager
        return [manager.loss_scale, manager.lr_schedulers[0].current_lr, manager._num_steps]


def leave():
    run = Three(32, 0.02).train(range(4))
    weights = models.cloned_state(run.model)
    states = [copy.deepcopy(run.manager.state_dict(gather_opt=whole)) for whole in (True, False)]
    run.train(range(4, 8))
    saved = weights, states[0], models.cloned_state(run.model), run.numbers
    come_back((weights, states[1], *saved[2:]), 0.0)
    return saved


def come_back(saved, tolerance):
    weights, state, end, numbers = saved
    run = Three(7, 0.5)
    run.model.load_state_dict(weights)
    run.manager.load_state_dict(state)
    if tolerance:  # the saved state was whole
        again = run.manager.state_dict(gather_opt=True)["optimizers"]
        for one, other in zip(again, state["optimizers"], strict=True):
            for index, values in other["state"].items():
                models.assert_same_dicts(
                    {name: torch.as_tensor(x) for name, x in one["state"][index].items()},
                    {name: torch.as_tensor(x) for name, x in values.items()},
                    f"state {index}",
                    0.0,
                )
    run.train(range(4, 8))
    models.assert_same_dicts(models.cloned_state(run.model), end, "resumed", tolerance)
    assert run.numbers == numbers


def test_states_go_on_at_any_number_of_ranks():
    """As if never interrupted, at the same number bit by bit; schedule and loss scale too."""
    saved = run_ranks(leave, 3)[0]
    # Sums are taken in another order, and Adam divides small gradients by themselves.
    run_ranks(come_back, 2, saved, 4e-6)


@on_ranks(2)
def test_a_loss_scale_has_bounds():
    """A scale that falls and rises between the bounds that a manager is given."""
    model = sharded()
    manager = OptimManager(8, 4, 2, 1, 16)
    manager.add_optimizer(AdamOptimizer(model.parameters()))
    scales = []
    for event in "ssgggggg":
        manager.zero_grad()
        loss = model(rows(0)) * (math.inf if event == "s" else 1)
        manager.backward(loss)
        manager.step()
        scales.append(manager.loss_scale)
    assert scales == [2, 1, 1, 4, 4, 16, 16, 16]


def clip(order, scale):
    what = f"norm {order}, scale {scale}"
    whole = models.shard_whole(3, True)  # tied, tiny, 0-dim and plain parameters
    optimizer = AdamOptimizer(whole.parameters())
    manager = models.managed(optimizer, loss_scale=scale)
    tokens, targets = (models.own(part) for part in models.batch(1))
    manager.backward(models.loss_of(whole, tokens, targets, 1))
    plain = models.make_whole()
    models.loss_of(plain, *models.batch(1), 1).backward()
    want = nn.utils.clip_grad_norm_(plain.parameters(), 0.01, norm_type=order)
    got = manager.clip_grad_norm(optimizer.param_groups, 0.01, norm_type=order)
    models.assert_same(got, want, what)
    scaled = {
        name: None if grad is None else grad * (scale or 1)
        for name, grad in models.plain_gradients(plain).items()
    }
    models.assert_same_dicts(models.full_gradients(whole), scaled, what)
    again = manager.clip_grad_norm(whole.parameters(), 1e9, norm_type=order)
    assert abs(again.item() - 0.01) < 1e-5, what


@on_ranks(3)
def test_norms_and_clipping_are_torchs():
    """Of all parameters, tied ones once, unscaled; and the clipped gradients."""
    for order, scale in ((2, 256.0), (1, None), (math.inf, 256.0), (3.0, None)):
        clip(order, scale)
    assert OptimManager().clip_grad_norm([{"params": []}], 1.0) == 0


@pytest.mark.parametrize("order", [2, 1, math.inf, 3.0])
@on_ranks(3)
def test_norms_are_not_finite_where_a_gradient_is_not(order):
    """On all ranks, whoever owns it, of ordinary parameters too; all of them then scale alike.
    Gradients of all dtypes, not finite in one place of one rank; then as they were.
    """
    params: list[Any] = [
        bmt.DistributedParameter(torch.ones(shape, dtype=dtype))
        for shape, dtype in (
            ((64 * bmt.world_size(), 64), torch.float32),  # of which each rank has a part
            (9, torch.float16),
            (9, torch.float64),
        )
    ]
    params.append(nn.Parameter(torch.ones(2, dtype=torch.bfloat16)))
    count = sum(param.numel() for param in params)
    manager, want = OptimManager(), 2 * (1 if order == math.inf else count ** (1 / order))
    for bad in (None, math.inf, math.nan, None):
        for owner in range(bmt.world_size()):
            for spoilt in params[::3]:
                for param in params:
                    param.grad = torch.full_like(param, 2.0)
                if bad is not None and bmt.rank() == owner:
                    local_of(grad_of(spoilt))[-1] = bad
                found = manager.clip_grad_norm(params, 1.0, norm_type=order)
                norm = float(found)
                assert found.dtype == torch.float64
                if bad is None:
                    assert norm == pytest.approx(want)
                    clipped = torch.full_like(params[3], 2 / want)
                    models.assert_same(params[3].grad, clipped, "clipped", 0.01)
                elif math.isnan(bad):
                    assert math.isnan(norm)
                    assert all(local_of(grad_of(param)).isnan().all() for param in params)
                else:
                    assert not math.isfinite(norm)


def odd_gradients():
    """Of any strides; without a bound, as they are."""
    weight, whole = nn.Parameter(torch.ones(3, 4)), bmt.DistributedParameter(torch.ones(6))
    weight.grad, whole.grad = torch.arange(12.0).view(4, 3).t(), torch.arange(12.0)[::2]
    before = [weight.grad.clone(), whole.grad.clone()]
    want = torch.cat([grad.reshape(-1) for grad in before]).norm()
    manager = OptimManager()
    models.assert_same(manager.clip_grad_norm([weight, whole], 1.0), want, "norm")
    for param, grad in zip((weight, whole), before, strict=True):
        models.assert_same(param.grad, grad / want, "clipped gradient")
    for values, norm in (([3.0, 4.0, 0.0], 5.0), ([3.0, math.inf, -1.0], math.inf)):
        weight = nn.Parameter(torch.ones(3))
        weight.grad = torch.tensor(values)
        assert manager.clip_grad_norm([weight], math.inf) == norm
        assert weight.grad.tolist() == values


def moved():
    layers = bmt.BMTrainModelWrapper(nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3)))
    params, manager = list(layers.parameters()), OptimManager()
    for move in (lambda: None, lambda: bmt.Block(layers)):
        move()
        for param in params:
            param.grad = torch.full_like(param, 2.0)
        norm = float(manager.clip_grad_norm(params, 1e9))
        assert norm == pytest.approx(2 * math.sqrt(7 * 5 + 5 + 5 * 3 + 3))


def test_odd_gradients_are_clipped():
    """Also of parameters that a block has taken over since."""
    run_ranks(odd_gradients, 1)
    run_ranks(moved, 2)


@on_ranks(3)
def test_record_delta():
    """Mean and variance of the last change of every weight, padding not counted; of those that all
    ranks have once.
    """
    model = sharded()
    optimizer = AdamOffloadOptimizer(groups(list(model.parameters())), record_delta=True)
    manager = models.managed(optimizer)
    for step in range(3):
        before = models.cloned_state(model)
        manager.zero_grad()
        manager.backward(model(rows(step)))
        manager.step()
        after = model.state_dict()
        change = torch.cat([(after[name] - before[name]).reshape(-1) for name in after]).double()
        assert optimizer.get_avg_delta() == pytest.approx(change.mean().item(), rel=1e-4)
        assert optimizer.get_var_delta() == pytest.approx(
            change.var(unbiased=False).item(), rel=1e-4
        )


@on_ranks(2)
def test_a_step_that_raised_can_be_taken_again():
    """An optimizer that raises before it steps, after the manager has divided the gradients."""
    errors = [MemoryError("sgd"), MemoryError("adam")]

    def hook(optimizer, args, kwargs):
        if broken:
            raise broken.pop()

    for error in errors:
        pair = Pair(str(error), schedule=SCHEDULES["ours"], scale=64.0).train(1)
        broken = [error]
        pair.optimizer.register_step_pre_hook(hook)
        pair.backward(1)
        with pytest.raises(MemoryError):
            pair.manager.step()
        pair.check("nothing has changed")
        pair.step()
        pair.check("taken again")
        pair.train(range(2, 4))


@on_ranks(1)
def test_ordinary_parameters_with_strides_are_refused():
    for kind in ("adam", "offload"):
        param = nn.Parameter(torch.arange(12.0).reshape(3, 4).t())
        before = param.detach().clone()
        optimizer = KINDS[kind][0]([param], lr=0.1)
        param.grad = torch.ones_like(param)
        with pytest.raises(ParameterError, match=r"param\.data\.contiguous"):
            optimizer.step()
        assert torch.equal(param, before)
        param.data, param.grad = before.contiguous(), torch.ones(4, 3)
        assert optimizer.step(lambda: 3.0) == 3.0
        torch.testing.assert_close(param.detach(), before - 0.1)


def scaled_twice():
    pair = Pair(scale=8.0, api="onn").train(2)
    pair.zero_grad()
    with pytest.raises(ConfigurationError, match=r"has scaled already.*loss\.backward") as caught:
        pair.manager.backward(pair.optimizer.loss_scale(pair.model(rows(0))))
    pair.check("nothing has run")
    pair.api = "nnn"
    pair.train(range(2, 5))
    return str(caught.value)


def test_a_loss_scaled_twice_is_an_error():
    """On every rank, before backward runs; the next loss counts."""
    assert len(set(run_ranks(scaled_twice, 2))) == 1
