"""BatchNorm in training is one process's: its statistics are those of all ranks' rows."""

import copy
import gc
import math

import pytest
import torch
import torch.nn.functional as F
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
@pytest.mark.parametrize("kind", ["torch's", "derived"])
@on_ranks(3)
def test_statistics_are_of_all_rows(kind, use_checkpoint):
    world.current("a test").draws.same_rows = False
    torch.manual_seed(2)
    plain = (Net if kind == "torch's" else Derived)().train().double()
    rows = torch.randn(10, 2, 5, 5, dtype=torch.float64)
    model = bmt.BMTrainModelWrapper(copy.deepcopy(plain), use_checkpoint=use_checkpoint)
    assert isinstance(model.last, type(plain.last))
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


class Activated(nn.BatchNorm2d):
    """As timm's: torch's own lines, and what comes after a norm."""

    num_batches_tracked: torch.Tensor

    def forward(self, x):
        factor = self.momentum or 0.0
        if self.training and self.track_running_stats:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                factor = 1.0 / float(self.num_batches_tracked)
        return F.relu(
            F.batch_norm(
                x,
                self.running_mean if not self.training or self.track_running_stats else None,
                self.running_var if not self.training or self.track_running_stats else None,
                self.weight,
                self.bias,
                self.training or self.running_mean is None,
                factor,
                self.eps,
            )
        )


class Residual(nn.BatchNorm2d):
    def forward(self, x, *, scale=1.0):
        return x + scale * super().forward(x)


class ByFunction(nn.Module):
    """Is no BatchNorm, and normalises every position of its rows."""

    mean: torch.Tensor
    var: torch.Tensor

    def __init__(self):
        super().__init__()
        self.map, self.weight = nn.Linear(4, 3, bias=False), nn.Parameter(torch.rand(3))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("var", torch.ones(3))

    def forward(self, x):
        out = self.map(x.permute(0, 2, 3, 1)).flatten(0, 2)
        out = F.batch_norm(out, self.mean, self.var, self.weight, training=self.training)
        return out.view(len(x), -1, 3)


class Derived(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            [
                nn.Sequential(nn.Conv2d(2, 4, 3, bias=False), Activated(4)),
                nn.Sequential(
                    nn.Conv2d(4, 4, 1, bias=False), Activated(4, momentum=None), Residual(4)
                ),
                nn.Sequential(Activated(4, affine=False), Residual(4, track_running_stats=False)),
            ]
        )
        self.last, self.by_function = Residual(4), ByFunction()

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return torch.tanh(self.by_function(torch.tanh(self.last(x, scale=0.5))))


SCALE = torch.ones(1)


class InParts(nn.BatchNorm1d):
    def forward(self, x, scale=SCALE):
        parts = [super(InParts, self).forward(part) for part in x.chunk(2)]
        return torch.cat(parts) * scale


class Scaled(nn.Module):
    """Gives a tensor of one row beside the rows."""

    def __init__(self, num_columns):
        super().__init__()
        self.norm = InParts(num_columns)

    def forward(self, x):
        return self.norm(x, SCALE)


class ByHand(nn.BatchNorm1d):
    def forward(self, x):
        return (x - x.mean(0)) / (x.var(0) + self.eps).sqrt()


@on_ranks(2)
def test_other_forward_passes_are_refused_in_training():
    world.current("a test").draws.same_rows = False
    for kind, name in ((InParts, "InParts"), (Scaled, "InParts"), (ByHand, "ByHand")):
        plain = nn.Sequential(kind(3))
        model = bmt.BMTrainModelWrapper(copy.deepcopy(plain))
        before = models.cloned_state(model)
        with pytest.raises(ParameterError, match=rf"{name} has a forward pass of its own"):
            model(torch.ones(4, 3))
        models.assert_same_dicts(models.cloned_state(model), before, "after a refusal", 0.0)
        models.assert_same(
            model.eval()(torch.ones(4, 3)), plain.eval()(torch.ones(4, 3)), "evaluation"
        )


@on_ranks(2, init={"tp_size": 2})
def test_rows_of_tensor_parallel_ranks_count_once():
    world.current("a test").draws.same_rows = False
    plain, rows = nn.Sequential(nn.BatchNorm1d(3)), torch.arange(12.0).view(4, 3)
    model = bmt.BMTrainModelWrapper(copy.deepcopy(plain))
    models.assert_same(model(rows), plain(rows), "training")
    models.assert_same_state(model, plain, "state")
