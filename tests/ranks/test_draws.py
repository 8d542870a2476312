"""Random numbers in training: other ones for other rows, and nothing else that differs by rank."""

import contextlib
import pathlib

import pytest
import torch
import torch.nn.functional as F
from tests.ranks import models
from tests.ranks.runner import run_ranks
from tests.tensors import grad_of
from torch import nn
from torch.utils.checkpoint import checkpoint

import bmtrain as bmt
from bmtrain.runtime import world

WIDTH = 12


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + F.dropout(torch.tanh(self.map(x)), 0.5, self.training)


class Listed(nn.Module):
    """Layers that are left out at random; dropout outside of blocks, and under a checkpoint."""

    def __init__(self):
        super().__init__()
        self.before = nn.Dropout(0.5)
        self.layers = nn.ModuleList([Layer() for _ in range(3)])
        self.after = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))

    def forward(self, x):
        x = self.before(x)
        for layer in self.layers:
            if not self.training or torch.rand(()) > 0.3:
                x = layer(x)
        return checkpoint(self.after, x, use_reentrant=False)


class Nested(nn.Module):
    """A block with blocks inside, of which it leaves some out."""

    def __init__(self):
        super().__init__()
        self.outer = bmt.Block(Inner())

    def forward(self, x):
        return self.outer(x)


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.map, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList([Layer(), Layer()])
        for number, layer in enumerate(self.blocks):
            self.blocks[number] = bmt.Block(layer)

    def forward(self, x):
        for block in self.blocks:
            if torch.rand(()) > 0.3:
                x = block(x)
        return self.map(x)


def draw(tp_size):
    """On two data-parallel ranks, or on one of two tensor-parallel ones."""
    draws = world.current("a test").draws
    for use_checkpoint in (True, False, "auto"):
        for make in (Listed, Layer, Nested):
            torch.manual_seed(3)
            draws.same_rows = False
            model = bmt.BMTrainModelWrapper(make(), use_checkpoint=use_checkpoint)
            rows, step = torch.randn(4, WIDTH), 1e-2 * torch.randn(4, WIDTH)
            state = torch.get_rng_state()

            def again(x, model=model, state=state):
                torch.set_rng_state(state)
                return model(x)

            leaf = rows.clone().requires_grad_()
            out = again(leaf)
            with torch.no_grad():
                models.assert_same(again(rows), out, "drawn again", 0.0)
                change = (again(rows + step) - again(rows - step)).sum() / 2
            torch.set_rng_state(state)
            out.sum().backward()
            assert leaf.grad is not None
            models.assert_same((leaf.grad * step).sum(), change, "masks of backward", 2e-2)
            again(rows)
            for value, alike in (
                (out.detach(), tp_size == 2),
                (torch.randperm(30).float(), True),
                (bmt.Block(nn.Linear(3, 3)).weight.gather().detach(), True),
                (model.eval()(rows).detach(), True),
            ):
                first, second = bmt.gather_result(value[None])
                assert torch.equal(first, second) == alike
    # Nothing is drawn where nothing draws: orders of rows are those of one process.
    calm = bmt.BMTrainModelWrapper(nn.Sequential(nn.Linear(WIDTH, 3), nn.Dropout(0.0)))
    state = torch.get_rng_state()
    calm[0](torch.ones(2, WIDTH))
    assert torch.equal(torch.get_rng_state(), state)


def test_ranks_draw_for_their_rows():
    run_ranks(draw, 2, 1)


def test_tensor_ranks_draw_the_same():
    run_ranks(draw, 2, 2, init={"tp_size": 2})


def resume(folder):
    world.current("a test").draws.same_rows = False

    def build():
        torch.manual_seed(5)
        model = bmt.BMTrainModelWrapper(Listed())
        manager = models.managed(bmt.optim.AdamOptimizer(model.parameters(), lr=0.1))
        return model, manager

    def train(model, manager):
        losses = []
        for _ in range(3):
            manager.zero_grad()
            loss = model(torch.ones(3, WIDTH)).square().mean()
            manager.backward(loss)
            manager.step()
            losses.append(loss.item())
        return losses

    model, manager = build()
    train(model, manager)
    with bmt.CheckpointManager(pathlib.Path(folder)) as checkpoints:
        checkpoints.save(1, model, manager)
        want = train(model, manager)
        model, manager = build()
        assert checkpoints.restore(model, manager) is not None
    assert train(model, manager) == want


class Growing(nn.Module):
    """Makes a map in its first pass, as adapters do that ask for the width of what they get."""

    def __init__(self, as_parameter=None):
        super().__init__()
        self.map, self.more, self.p = nn.Linear(WIDTH, WIDTH), None, 0.5
        self.as_parameter = as_parameter

    def forward(self, x):
        h = torch.tanh(self.map(x))
        if self.more is None:
            self.more = nn.Linear(h.shape[-1], WIDTH)
            if self.as_parameter:
                self.own = self.as_parameter(torch.randn(WIDTH))
        if self.as_parameter:
            return F.dropout(h * self.own, self.p, self.training)
        return F.dropout(self.more(h), self.p, self.training)


def grow():
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))
    pair = []
    for wrap in (bmt.BMTrainModelWrapper, lambda plain: plain):
        torch.manual_seed(3)
        pair.append(wrap(Growing()))
        pair[-1](x)
        pair[-1].p = 0.0
    model, plain = pair
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=0.01)
    manager, twin = bmt.optim.OptimManager(), torch.optim.Adam(plain.parameters(), lr=0.01)
    manager.add_optimizer(optimizer)
    for _ in range(3):
        manager.zero_grad()
        manager.backward(model(x[2 * bmt.rank() : 2 * bmt.rank() + 2]).square().mean())
        manager.step()
        twin.zero_grad()
        plain(x).square().mean().backward()
        twin.step()
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-5, atol=1e-6)

    found = []
    for use_checkpoint in (True, False):
        torch.manual_seed(3)
        block = bmt.Block(Growing(bmt.DistributedParameter), use_checkpoint=use_checkpoint)
        row = x.clone().requires_grad_()
        said = pytest.warns(UserWarning, match="Growing keeps its activations")
        with said if use_checkpoint else contextlib.nullcontext():
            block(row).sum().backward()
        found.append(grad_of(row))
    assert torch.equal(*found) and found[0].any()


def test_parameters_made_in_a_pass_are_those_of_one_process():
    """Made in training, where ranks draw numbers of their own; the pass is not recomputed, which
    would not make them again.
    """
    run_ranks(grow, 2)


def test_masks_go_on_after_a_resume(tmp_path):
    run_ranks(resume, 2, str(tmp_path))
