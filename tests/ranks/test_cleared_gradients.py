"""After failed passes, refusals, clearing and deferral, the next steps are those of one process."""

from typing import Any

import pytest
import torch
from tests.ranks import models
from tests.ranks.runner import on_ranks
from torch import nn

import bmtrain as bmt
from bmtrain.errors import ParameterError, RanksDivergedError, StaleParameterError

DIM, ROWS = 5, 6
MODES = [
    {"zero_level": 3, "use_checkpoint": True},
    {"zero_level": 2, "use_checkpoint": False, "accumulate_dtype": torch.float64},
    {"zero_level": 3, "use_checkpoint": "auto"},
]
ALL = ("ab", "ab", "ab")
BROKEN, BROKEN_INSIDE = ("ab!", "ab", "ab"), ("ab", "a!b", "ab")  # in backward
HALF = ("b", "", "ab")
LATER = {"reduce_gradients": False}
LOST = (ParameterError, "part of their sum is lost")


class Fault(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise KeyError("fault")


class Part(nn.Module):
    """Computes with the layers named; with a fault in backward at "!", in forward at "?"."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x, names):
        for name in names:
            x = Fault.apply(x) if name == "!" else x + self.get_submodule(name)(x).tanh()
        return x


class Net(nn.Module):
    """Blocks that may be left out or used by half, and parameters outside of them with a penalty
    (whose gradients are those of slices).
    """

    ordinary: torch.Tensor

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.parts = nn.ModuleList(Part() for _ in ALL)
        self.row, self.gain = nn.Parameter(torch.randn(DIM)), nn.Parameter(torch.ones(1))

    def forward(self, x, names):
        called = [(part, each) for part, each in zip(self.parts, names, strict=True) if each]
        for part, each in called:
            x = part(x, each.removesuffix("!"))
            x = Fault.apply(x) if each.endswith("!") else x
        penalty = self.row.square().sum() + self.gain.square().sum()
        return (x * self.row * self.ordinary).square().mean() + 0.1 * penalty


class Run:
    """The training of a net: plain without a mode, else sharded.

    Attributes:
        seen: gradients by name, as they were at each `look`.
    """

    def __init__(self, mode):
        net: Any = Net()
        self.manager: Any = None if mode is None else bmt.optim.OptimManager()
        if mode is not None:
            for index, part in enumerate(net.parts):
                net.parts[index] = bmt.Block(part, **mode)
            net = bmt.BMTrainModelWrapper(net)
        net.ordinary = nn.Parameter(torch.ones(DIM))
        self.net, self.params = net, list(net.parameters())
        self.weight: Any = net.parts[1].a.weight
        self.optimizer = torch.optim.SGD(self.params, lr=0.1)
        if self.manager:
            self.manager.add_optimizer(self.optimizer)
        self.seen = []

    def loss(self, number, names=ALL):
        x = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(number))
        return self.net(models.own(x) if self.manager else x, names)

    def backward(self, number, names=ALL, **options):
        self.finish(self.loss(number, names), **options)

    def finish(self, loss, **options):
        self.manager.backward(loss, **options) if self.manager else loss.backward()

    def retain(self, loss):
        (self.manager.scale_loss(loss) if self.manager else loss).backward(retain_graph=True)

    def clear(self, *params, **options):
        """The gradients of some parameters, or of all."""
        for param in params:
            param.grad = None
        if not params:
            (self.manager or self.optimizer).zero_grad(**options)

    def fails(self, error, match, do, *args, **options):
        """Sharded, an error; one process does without."""
        if self.manager:
            with pytest.raises(error, match=match):
                do(*args, **options)

    def change(self, factor):
        with torch.no_grad():
            for param in self.net.parts.parameters():
                param.mul_(factor)

    def look(self):
        of = models.full_gradients if self.manager else models.plain_gradients
        self.seen.append(of(self.net))

    def step(self, number):
        self.clear()
        self.backward(number)
        self.look()
        (self.manager or self.optimizer).step()


def failed_backward(run):
    for names in (BROKEN, BROKEN_INSIDE):
        run.fails(KeyError, "fault", run.backward, 0, names)
        run.backward(1, HALF)
        run.look()
        run.clear()
        run.fails(KeyError, "fault", run.backward, 0, names)
        run.clear()
        run.change(0.9)  # nothing may be answered from what the failed pass has gathered
        with torch.no_grad():
            loss = run.loss(2).detach() * run.weight.new_ones(1)
        run.seen.append({"loss": bmt.sum_loss(loss) if run.manager else loss})


def failed_before_one_that_was_ready(run):
    for number, names in enumerate((BROKEN, BROKEN_INSIDE)):
        ready = run.loss(1)
        run.fails(KeyError, "fault", run.backward, 0, names)
        second = run.loss(number)
        broken = run.loss(2, names) if run.manager else None
        run.finish(ready)
        run.look()
        run.clear()
        run.fails(KeyError, "fault", run.finish, broken)
        run.finish(second)  # nothing was gathered in between
        run.look()
        run.clear()


def failed_forward(run):
    ready = run.loss(1)
    for context in (torch.enable_grad, torch.no_grad):
        with context():
            run.fails(AttributeError, r"\?", run.loss, 0, ("ab", "a?b", "ab"))
            run.fails(RuntimeError, "cannot be multiplied", run.net, torch.ones(2, DIM + 1), ALL)
    run.finish(ready)
    run.look()


def written_before_backward(run):
    loss = run.loss(0) if run.manager else None
    run.change(1.1)
    run.fails(StaleParameterError, "changed in place after the forward", run.finish, loss)
    run.clear()
    run.backward(1, HALF)
    run.look()


def refused_at_the_end(run):
    handle = run.net.ordinary.register_hook(lambda grad: grad)
    run.fails(ParameterError, "outside of blocks has a hook", run.backward, 0)
    handle.remove()
    run.clear()
    run.backward(1, ("a", "", ""))
    run.look()


def refused_graph(run):
    run.backward(1)
    run.fails(
        ParameterError,
        "create_graph",
        lambda: torch.autograd.grad(run.loss(0), run.params, create_graph=True),
    )
    run.clear()
    run.backward(1, HALF)
    run.look()


def refused_deferral(run):
    run.backward(0, **LATER)
    run.clear()
    handle = run.net.row.register_hook(lambda grad: grad)
    run.backward(1)  # nothing is held back any more
    run.look()
    handle.remove()
    run.clear()
    handle = run.weight.register_hook(lambda grad: grad)
    run.fails(ParameterError, "see the gradient of every pass", run.backward, 0, **LATER)
    run.clear()
    run.backward(1)
    run.look()
    handle.remove()
    run.clear()
    run.backward(0, **LATER)
    run.weight.register_hook(lambda grad: grad * 2)
    run.fails(ParameterError, "see the gradient of every pass", run.backward, 1)
    run.clear()


def cleared_on_one_rank(run):
    run.backward(0)
    if bmt.rank() == 0:
        run.clear(run.net.ordinary)
    run.fails(RanksDivergedError, "on some ranks", run.backward, 1)
    run.clear()


def hooked_and_failed(run):
    """The gradient of a hooked parameter is as it was before the pass that failed, by its hook too."""
    for register in (run.weight.register_hook, run.weight.register_post_accumulate_grad_hook):
        with register(Fault.backward.__get__(run)):
            run.fails(KeyError, "fault", run.backward, 0)
        run.clear()
        run.backward(1)
        run.look()
        run.clear()
    run.weight.register_hook(lambda grad: grad * 2)
    run.backward(0)
    run.fails(KeyError, "fault", run.backward, 1, BROKEN)
    run.clear(*[param for param in run.params if param is not run.weight])
    run.backward(2)
    run.look()


def other_halves(run):
    for options in ({}, {"set_to_none": False}):
        run.backward(0, ("a", "ab", ""))
        run.clear(**options)
        run.backward(1, ("b", "a", ""))
        run.look()
        run.clear()


def deferred_halves(run):
    run.backward(0, ("a", "ab", ""), **LATER)
    run.backward(1, ("b", "", "a"))
    run.look()
    run.backward(2, ("a", "ab", ""), **LATER)
    run.look()  # reduces what was deferred
    run.backward(3, HALF)
    run.look()
    run.clear()
    frozen = (run.weight, run.net.row, run.net.ordinary)
    run.backward(0, **LATER)
    for param in frozen[:2]:
        param.requires_grad_(False)
    loss = run.loss(1)
    frozen[2].requires_grad_(False)
    run.finish(loss)
    run.look()
    for param in frozen:
        param.requires_grad_()


def deferred_and_cleared(run):
    for params in ((), (run.net.row, run.weight, run.net.ordinary), (run.net.gain,)):
        run.backward(0, **LATER)
        run.backward(1, ("a", "b", ""), **LATER)
        run.clear(*params)
        run.backward(2, HALF, **LATER)
        run.clear(*params[:1])
        run.backward(3, ("b", "a", ""))
        run.look()
        run.clear()


def deferred_and_failed(run):
    run.fails(KeyError, "fault", run.backward, 0, BROKEN, **LATER)
    run.backward(1, HALF)  # what the pass itself had deferred is dropped
    run.look()
    run.clear()
    run.backward(0, **LATER)
    if run.manager:  # a pass that does not come to all that was held back
        hidden = Fault.apply(run.net.parts[0](torch.ones(2, DIM), "a"))
        run.fails(KeyError, "fault", run.net.parts[1](hidden, "b").sum().backward)
        run.fails(*LOST, run.manager.step)
        assert not run.net.row.storage_of.gradient._slices  # which would stay allocated
    run.clear()
    run.backward(1)
    run.look()
    run.clear()
    for names in (BROKEN, BROKEN_INSIDE):
        run.backward(0, ("a", "ab", "ab"), **LATER)
        run.fails(KeyError, "fault", run.backward, 1, names, **LATER)
        if run.manager:
            run.fails(*LOST, run.manager.step)
            run.clear(run.net.row, run.weight)
            run.fails(*LOST, run.backward, 2)
            run.fails(*LOST, run.backward, 2, **LATER)
            run.fails(*LOST, getattr, run.net.parts[2].b.weight, "grad")
            run.fails(*LOST, run.manager.clip_grad_norm, run.params, 1.0)
        run.clear()
        run.backward(2, HALF, **LATER)
        run.backward(3, ("b", "a", ""))
        run.look()
        run.clear()


def retained(run):
    loss = run.loss(0)
    run.retain(loss)
    run.look()
    run.net.zero_grad()
    run.loss(1)  # frees what was cleared
    run.retain(loss)
    run.look()
    run.finish(loss)
    run.look()


def put_back(run):
    """Gradients are taken away for a forward pass, and are there again for its backward pass."""
    run.backward(0)
    held = [param.grad for param in run.params]
    run.clear()
    loss = run.loss(1)
    for param, grad in zip(run.params, held, strict=True):
        param.grad = grad
    run.finish(loss)
    run.look()


def overlapping(run):
    first, second = run.loss(0), run.loss(1)
    run.finish(first)
    run.look()
    run.clear()
    run.finish(second)
    run.look()
    run.backward(2, HALF)
    run.look()


def held_beside_cleared(run):
    """What the program holds is added to, whatever else of the block it has cleared."""
    run.backward(0)
    held, cleared = run.weight.grad, run.net.parts[1].a.bias.grad
    before = cleared.clone()
    run.clear(run.net.parts[1].a.bias)
    run.backward(1)
    assert held is run.weight.grad and torch.equal(cleared, before)
    run.look()


PROGRAMS = [
    failed_backward,
    failed_before_one_that_was_ready,
    failed_forward,
    written_before_backward,
    refused_at_the_end,
    refused_graph,
    refused_deferral,
    cleared_on_one_rank,
    hooked_and_failed,
    other_halves,
    deferred_halves,
    deferred_and_cleared,
    deferred_and_failed,
    retained,
    put_back,
    overlapping,
    held_beside_cleared,
]


@pytest.mark.parametrize("program", PROGRAMS)
@on_ranks(2)
def test_the_next_steps_are_those_of_one_process(program):
    left_out = PROGRAMS.index(program) % len(MODES)
    plain, *sharded = [Run(mode) for mode in (None, *MODES[:left_out], *MODES[left_out + 1 :])]
    for run in (plain, *sharded):
        program(run)
        run.step(7)
        run.step(8)
        for index, (got, want) in enumerate(zip(run.seen, plain.seen, strict=True)):
            models.assert_same_dicts(got, want, f"look {index}")
        models.assert_same_state(run.net, plain.net, "values")
