"""Gradients that a program keeps over a step: under a loss scale that changes they add up as
without one.
"""

import itertools
from typing import Any

import pytest
import torch
from tests.ranks import models
from tests.ranks.runner import on_ranks, run_ranks
from tests.tensors import grad_of
from torch import nn

import bmtrain as bmt

KINDS: list[Any] = [
    torch.optim.SGD,
    torch.optim.AdamW,
    bmt.optim.AdamOptimizer,
    bmt.optim.AdamOffloadOptimizer,
]
STEPS = 7


def loss_of(model, step):
    x = torch.linspace(-1, 1, 24).view(4, 6)
    return model(x).square().mean() * (step + 1)


class Run:
    """Two optimizers of one kind for a net; with a manager's options on sharded blocks."""

    def __init__(self, kind, manager=None):
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)]
        if manager is None and kind is not torch.optim.SGD:
            kind = torch.optim.AdamW
        options = {} if kind is torch.optim.SGD else {"weight_decay": 0.0}
        self.model = nn.Sequential(*(layers if manager is None else map(bmt.Block, layers)))
        parts = (self.model[0].parameters(), self.model[1:].parameters())
        self.first, self.others = (kind(part, lr=0.01, **options) for part in parts)
        self.manager = manager
        for optimizer in (self.first, self.others) if manager else ():
            manager.add_optimizer(optimizer)

    def step(self):
        if self.manager:
            self.manager.step()
        else:
            self.first.step()
            self.others.step()

    def clear(self, step):
        """The first layer's gradients every second step, the others' every third."""
        for optimizer, every in ((self.first, 2), (self.others, 3)):
            if step % every == 0:
                optimizer.zero_grad()

    def train(self, clipped):
        for step in range(STEPS):
            self.clear(step)
            loss = loss_of(self.model, step)
            if self.manager is None:
                loss.backward()
            elif step % 2:
                self.manager.backward(loss / 2, reduce_gradients=False)
                self.manager.backward(loss_of(self.model, step) / 2)
            else:
                self.manager.backward(loss)
            clip = self.manager.clip_grad_norm if self.manager else nn.utils.clip_grad_norm_
            if clipped:
                clip(self.model.parameters(), 0.5)
            self.step()
        return models.cloned_state(self.model)


def growing():
    for number, kind in enumerate(KINDS):
        for clipped in (False, True):
            manager = bmt.optim.OptimManager(
                loss_scale=2.0**10, loss_scale_steps=1000 if clipped is bool(number % 2) else 1
            )
            got, want = Run(kind, manager).train(clipped), Run(kind).train(clipped)
            models.assert_same_dicts(got, want, f"{kind}, {clipped}")
            assert manager.skipped_steps == 0


def shrinking():
    """The scale shrinks in a skipped step, over which other gradients are kept."""
    for kind in KINDS:
        plain, manager = Run(kind), bmt.optim.OptimManager(loss_scale=2.0**10)
        loss_of(plain.model, 1).backward()
        plain.first.zero_grad()
        loss_of(plain.model, 2).backward()
        plain.step()
        run = Run(kind, manager)
        manager.backward(loss_of(run.model, 1))
        for param in run.model[0].parameters():
            param.grad = torch.full_like(param, torch.inf)
        manager.step()
        assert manager.skipped_steps == 1 and manager.loss_scale == 2.0**9
        run.first.zero_grad()
        manager.scale_loss(loss_of(run.model, 2)).backward()
        manager.step()
        got, want = models.cloned_state(run.model), models.cloned_state(plain.model)
        models.assert_same_dicts(got, want, "after an overflow")


def by_old_calls():
    """As programs of earlier versions have them."""
    plain = Run(torch.optim.AdamW)
    model = Run(torch.optim.AdamW, bmt.optim.OptimManager()).model
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=0.01, scale=2.0**10, scale_steps=2)
    for step in range(STEPS):
        loss_of(plain.model, step).backward()
        plain.step()
        optimizer.loss_scale(loss_of(model, step)).backward()
        bmt.optim_step(optimizer)
    got, want = models.cloned_state(model), models.cloned_state(plain.model)
    models.assert_same_dicts(got, want, "old calls")


PROGRAMS = ["one pass", "a pass each", "parts", "one clips both"]


def of_two_managers(combinations):
    """A manager for each optimizer, with other scales that move at other times: over one pass, a pass of
    each over all parameters or over its own, some gradients kept over steps.
    """
    for number, (kind, program) in enumerate(combinations):
        one = bmt.optim.OptimManager(loss_scale=2.0**10, loss_scale_steps=2)
        two = bmt.optim.OptimManager(loss_scale=2.0**3 if number % 2 else None, loss_scale_steps=1)
        plain, ours = Run(kind), Run(kind, bmt.optim.OptimManager())
        one.add_optimizer(ours.first)
        two.add_optimizer(ours.others)
        for step in range(STEPS):
            for run in (plain, ours):
                run.clear(step)
                losses = [loss_of(run.model, step), loss_of(run.model, step + 1)]
                if program == "parts":
                    losses = [
                        sum(param.square().sum() for param in part.parameters())
                        for part in (run.model[0], run.model[1:])
                    ]
                if program in {"one pass", "one clips both"}:
                    (one.backward(losses[0]) if run is ours else losses[0].backward())
                else:
                    for manager, loss in zip((two, one), losses[::-1], strict=True):
                        manager.backward(loss) if run is ours else loss.backward()
            norms = []
            for part in (ours.model[0], ours.model[1:]):
                clips = one if program == "one clips both" or part is ours.model[0] else two
                norms.append(clips.clip_grad_norm(part.parameters(), 0.5))
            for part, norm in zip((plain.model[0], plain.model[1:]), norms, strict=True):
                torch.testing.assert_close(
                    norm, nn.utils.clip_grad_norm_(part.parameters(), 0.5), rtol=1e-5, atol=0
                )
            plain.step()
            two.step()
            one.step()
        got, want = models.cloned_state(ours.model), models.cloned_state(plain.model)
        models.assert_same_dicts(got, want, f"{kind}, {program}")
        assert one.loss_scale == 2.0**13 and one.skipped_steps == two.skipped_steps == 0


COMBINATIONS = [*itertools.product(KINDS, PROGRAMS)]


@pytest.mark.parametrize(
    ("program", "given"),
    [
        (growing, []),
        (shrinking, []),
        (by_old_calls, []),
        (of_two_managers, [COMBINATIONS[::5]]),
        pytest.param(of_two_managers, [COMBINATIONS], marks=pytest.mark.long),
    ],
)
def test_scales_do_not_show(program, given):
    run_ranks(program, 2, *given)


@on_ranks(2)
def test_no_scale_is_applied_to_gradients_set_by_hand():
    """Gradients that a program has set carry the manager's scale, and no other, before its first
    step and later, in new tensors and in those that the last step has left.
    """
    ours: Any = bmt.optim.AdamOptimizer
    cases = [(torch.float16, 4.0, ours), (torch.float32, None, ours), (torch.float32, 4.0, ours)]
    cases += [(torch.float32, 4.0, kind) for kind in KINDS]
    for number, (dtype, scale, kind) in enumerate(cases * 2):
        values, grads = torch.tensor([1.0, 2.0, 0.5]), torch.tensor([0.5, -0.25, 0.0078125])
        holder = nn.ParameterDict({"x": nn.Parameter(values.to(dtype))})
        param = (bmt.Block(holder) if number % 3 else holder)["x"]
        want = nn.Parameter(values.clone())
        plain = (kind if kind is torch.optim.SGD else torch.optim.Adam)([want], lr=1.0)
        optimizer = kind([param], lr=1.0, **({"weight_decay": 0} if kind in KINDS[1:] else {}))
        param.grad = grads.to(dtype) * (scale or 1.0)
        manager = models.managed(optimizer, loss_scale=scale)
        for factor in (1.0, -0.5, 2.0):
            want.grad, given = grads * factor, grads.to(dtype) * (factor * (scale or 1.0))
            if number < len(cases):
                param.grad = given
            else:
                grad_of(param).copy_(given)
            clipped = [nn.utils.clip_grad_norm_([want], 0.3).item()] if number % 2 else []
            if clipped:
                clipped.append(manager.clip_grad_norm([{"params": [param]}], 0.3).item())
                assert clipped[0] == pytest.approx(clipped[1], rel=1e-3)
            plain.step()
            manager.step()
            if number < len(cases):
                manager.zero_grad()
        found = bmt.gather_result(param) if number % 3 else param
        torch.testing.assert_close(found.detach().float(), want.detach(), rtol=1e-3, atol=1e-3)
