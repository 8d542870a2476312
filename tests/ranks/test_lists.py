"""Lists of modules under BMTrainModelWrapper: whose owner calls some of them by its rows, or uses
them in other ways than by calling them. Gradients and steps are one process's.
"""

import copy
import functools
from typing import Any

import pytest
import torch
from tests.ranks import models
from tests.ranks.runner import on_ranks, run_ranks
from torch import nn

import bmtrain as bmt
from bmtrain.block.block import Block
from bmtrain.block.choices import chosen_lists

WIDTH, EXPERTS, ROWS = 6, 4, 12


class Experts(nn.Module):
    """The last expert gets no row of any rank."""

    experts: Any

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS)])

    def top(self, x):
        scores = self.gate(x)[:, :-1].softmax(-1)
        return scores.max(-1).values[:, None], scores.argmax(-1)


class Enumerated(Experts):
    def forward(self, x):
        weight, top = self.top(x)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (top == number).nonzero()[:, 0]
            if len(rows):
                y = y.index_add(0, rows, expert(x[rows]) * weight[rows])
        return x + y


class Continued(Experts):
    def forward(self, x):
        weight, top = self.top(x)
        y = torch.zeros_like(x)
        mask = nn.functional.one_hot(top, EXPERTS).T
        for number in range(EXPERTS):
            expert = self.experts[number]
            (rows,) = torch.where(mask[number])
            if rows.shape[0] == 0:
                continue
            y = y.index_add(0, rows, expert(x[rows]) * weight[rows])
        return x + y


class Hit(Experts):
    def forward(self, x):
        weight, top = self.top(x)
        y = torch.zeros_like(x)
        for number in top.unique():
            rows = (top == number).nonzero()[:, 0]
            y = y.index_add(0, rows, self.experts[int(number)](x[rows]) * weight[rows])
        return x + y


class OfDict(Experts):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleDict({str(n): expert for n, expert in enumerate(self.experts)})

    def forward(self, x):
        weight, top = self.top(x)
        out = [self.experts[str(int(n))](row) for n, row in zip(top, x, strict=True)]
        return x + torch.stack(out) * weight


class Among(nn.Module):
    """Beside a list that is always called whole, in a module of its own and of the same one."""

    def __init__(self):
        super().__init__()
        self.body = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.experts, self.inner = Enumerated().experts, Stack()
        self.other = Hit()

    def forward(self, x):
        for layer in self.body:
            x = torch.tanh(layer(x))
        x = self.inner(self.other(x))
        picked = x[:, :3].argmax(-1)
        for number in range(3):
            rows = picked == number
            if rows.any():
                x = torch.where(rows[:, None], self.experts[number](x), x)
        return x


class Stack(nn.Module):
    """All of its layers, under conditions that are no choice."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.drop = 0.0

    def forward(self, x, mask=None):
        for number, layer in enumerate(self.layers):
            if self.training and torch.rand([]) < self.drop:
                continue
            if mask is not None and number:
                x = layer(x * mask)
            elif self.training:
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
            else:
                x = layer(x)
        return x


class Table(nn.Module):
    """A container with ways of its own, and a forward pass."""

    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def __getitem__(self, name):
        return getattr(self, name)

    def __iter__(self):
        return iter((self.q, self.k))

    def __len__(self):
        return 2

    def __contains__(self, name):
        return name in ("q", "k")

    def attend(self, x):
        return self.q(x) * self.k(x)

    def forward(self, x):
        return self.attend(x)


def a_table():
    return Table()


def a_sequence():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


def a_dict():
    return nn.ParameterDict({name: nn.Parameter(torch.rand(WIDTH)) for name in "qk"})


def a_list():
    return nn.ParameterList([nn.Parameter(torch.rand(WIDTH)) for _ in range(2)])


USES = {
    "indexed": (a_sequence, lambda one, x: one[0](x) * one[-1](x)),
    "unpacked": (a_sequence, lambda one, x: torch.stack([part(x) for part in one]).prod(0)),
    "counted": (a_sequence, lambda one, x: one(x) * len(one) if one else x),
    "sliced": (a_sequence, lambda one, x: one[:1](x)),
    "table": (a_table, lambda one, x: one["q"](x) + len(one) * ("k" in one) * one(x)),
    "own method": (a_table, lambda one, x: one.attend(x) + one(x)),
    "parameter dict": (a_dict, lambda one, x: x * one["q"] + one["k"] * ("k" in one)),
    "parameter list": (a_list, lambda one, x: x * one[0] + one[1] + len(one)),
}


class Users(nn.Module):
    def __init__(self, name):
        super().__init__()
        make, self.use = USES[name]
        self.layers = nn.ModuleList([make() for _ in range(2)])

    def forward(self, x):
        for layer in self.layers:
            x = x + self.use(layer, x)
        return x


def compared(make):
    torch.manual_seed(3)
    plain, rows = make(), torch.randn(ROWS, WIDTH)
    model = bmt.BMTrainModelWrapper(copy.deepcopy(plain))
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, plain))
    for step in range(3):
        x = rows.roll(step, 0)
        for optimizer, m, own in ((ours, model, x.chunk(bmt.world_size())), (theirs, plain, [x])):
            optimizer.zero_grad()
            m(own[bmt.rank() % len(own)]).square().sum().backward()
        models.assert_same_gradients(model, plain, f"gradients of step {step}")
        ours.step()
        theirs.step()
    models.assert_same_dicts(models.cloned_state(model), models.cloned_state(plain), "weights")


@pytest.mark.parametrize("make", [Enumerated, Continued, Hit, OfDict, Among])
@on_ranks(3)
def test_experts_that_only_some_ranks_call(make):
    compared(make)
    assert isinstance(bmt.BMTrainModelWrapper(make()), Block)


def using(names):
    for name in names:
        compared(functools.partial(Users, name))


def test_members_are_used_as_their_owner_does():
    run_ranks(using, 2, list(USES))


def test_what_is_a_choice():
    assert not chosen_lists(Stack()) and not chosen_lists(Users("indexed"))
    assert chosen_lists(Among()) == chosen_lists(OfDict()) == {"experts"}
