"""BatchNorm in training is one process's: its statistics are those of all ranks' rows."""

import copy
import gc
import math

import pytest
import torch
from tests.garbage import without_collector
from tests.ranks import models
from tests.ranks.runner import on_ranks
from torch import nn

import bmtrain as bmt
from bmtrain.errors import ParameterError
from bmtrain.runtime import world


class Net(nn.Module):
    """In blocks and outside of them, of all kinds."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU())
        self.layers = nn.ModuleList(
            [
                nn.Sequential(
                    nn.Conv2d(4, 4, 1, bias=False), nn.BatchNorm2d(4, momentum=None), nn.Tanh()
                ),
                nn.Sequential(nn.BatchNorm2d(4, affine=False), nn.Conv2d(4, 4, 1, bias=False)),
                nn.Sequential(
                    nn.Conv2d(4, 4, 1, bias=False), nn.BatchNorm2d(4, track_running_stats=False)
                ),
            ]
        )
        self.frozen, self.last = nn.BatchNorm2d(4).eval(), nn.BatchNorm1d(4)

    def train(self, mode=True):
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(torch.tanh(self.frozen(x)).mean((2, 3)))


@pytest.mark.parametrize("use_checkpoint", [True, False])
@on_ranks(3)
def test_statistics_are_of_all_rows(use_checkpoint):
    world.current("a test").draws.same_rows = False
    torch.manual_seed(2)
    plain, rows = Net().train().double(), torch.randn(10, 2, 5, 5, dtype=torch.float64)
    model = bmt.BMTrainModelWrapper(copy.deepcopy(plain), use_checkpoint=use_checkpoint)
    assert isinstance(model.last, nn.BatchNorm1d)
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain))
    sizes = [5, 2, 3]
    own = rows.split(sizes)[bmt.rank()]
    for step in range(3):
        for optimizer, m, x in ((ours, model, own), (theirs, plain, rows)):
            optimizer.zero_grad()
            (m(x.roll(step, 1)) ** 3).sum().backward()
        models.assert_same_gradients(model, plain, f"gradients of step {step}", 1e-9)
        ours.step()
        theirs.step()
        models.assert_same_state(model, plain, "state", 1e-9)
    before = models.cloned_state(model)
    model(own * math.inf)
    models.assert_same_dicts(models.cloned_state(model), before, "after what is not finite", 0.0)
    # Without running statistics those of a batch are taken in evaluation, too.
    models.assert_same(
        model.eval()(own), plain.eval()(rows).split(sizes)[bmt.rank()], "evaluation", 1e-9
    )


class WithMore(nn.Module):
    """Gives something beside its output that takes statistics of all rows, too."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x):
        y = x + torch.tanh(self.first(x))
        return y, torch.tanh(self.last(self.norm(y)))


@on_ranks(2)
def test_when_a_rank_collects_a_part_of_the_graph_changes_nothing():
    """Rank 0's collector has taken a part of the graph before backward, rank 1's has not."""
    world.current("a test").draws.same_rows = False
    torch.manual_seed(3)
    plain, rows = nn.ModuleList([WithMore()]), torch.randn(6, 4)
    model = bmt.BMTrainModelWrapper(copy.deepcopy(plain), use_checkpoint=True)
    own = rows.split(3)[bmt.rank()]
    with without_collector():
        for m, x in ((model, own), (plain, rows)):
            out, *more = m[0](x)
            more.append(more)
            del more
            if bmt.rank() == 0:
                gc.collect()
            out.square().sum().backward()
    models.assert_same_gradients(model, plain, "gradients")


class Own(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x)


@on_ranks(2)
def test_another_forward_pass_is_refused_in_training():
    world.current("a test").draws.same_rows = False
    plain = nn.Sequential(Own(3))
    model = bmt.BMTrainModelWrapper(copy.deepcopy(plain))
    with pytest.raises(ParameterError, match=r"Own has a forward pass of its own.*BatchNorm"):
        model(torch.ones(2, 3))
    models.assert_same(model.eval()(torch.ones(2, 3)), plain.eval()(torch.ones(2, 3)), "evaluation")
