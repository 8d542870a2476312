"""BatchNorm in training is one process's: its statistics are those of all ranks' rows."""

import copy
import functools
import gc
import math
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.garbage import without_collector
from tests.ranks import models
from tests.ranks.runner import on_ranks, run_ranks
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


class Reading(nn.Module):
    """Reads statistics that a norm has moved."""

    def __init__(self, norm):
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4), norm(4, track_running_stats=True)

    def forward(self, x):
        y = self.norm(self.first(x).unsqueeze(2).expand(-1, -1, 3) * torch.arange(3))
        return torch.tanh(y) * self.norm.running_var[:, None] + self.norm.running_mean[:, None]


@pytest.mark.parametrize("world_size", [1, 2])
def test_recomputation_reads_statistics_as_they_were(world_size):
    run_ranks(read_statistics, world_size)


def read_statistics():
    torch.manual_seed(4)
    for norm in (nn.BatchNorm1d, nn.InstanceNorm1d):
        plain, rows = Reading(norm).double(), torch.randn(6, 4, dtype=torch.float64)
        block = bmt.Block(copy.deepcopy(plain), use_checkpoint=True)
        for training in (False, True, True):
            for m in (block, plain):
                m.train(training)
                loss = m(rows).square().sum()
                (loss / bmt.world_size() if m is block else loss).backward()
            models.assert_same_gradients(block, plain, f"{norm.__name__}, {training}", 1e-9)


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


def through_a_helper(x, mean, var, weight, is_training):
    return torch.batch_norm(x, weight, None, mean, var, is_training, 0.1, 1e-5, False)


class ByFunction(nn.Module):
    """Is no BatchNorm, and normalises every position of its rows, by one function and another."""

    mean: torch.Tensor
    var: torch.Tensor

    def __init__(self):
        super().__init__()
        self.map, self.weight = nn.Linear(4, 3, bias=False), nn.Parameter(torch.rand(3))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("var", torch.ones(3))

    def _norm(self, x):
        return through_a_helper(x, self.mean, self.var, self.weight, self.training)

    def forward(self, x):
        out = self.map(x.permute(0, 2, 3, 1)).flatten(0, 2)
        out = out + torch.tanh(F.batch_norm(out, None, None, training=True))
        out = self._norm(out)
        return out.view(len(x), -1, 3)


class ByAttribute(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_of = F.batch_norm

    def forward(self, x):
        return x + torch.tanh(self.norm_of(x, None, None, training=True))


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
                nn.Sequential(
                    nn.Conv2d(4, 4, 1, bias=False),
                    nn.InstanceNorm2d(4, track_running_stats=True, momentum=0.3),
                    ByAttribute(),
                ),
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


class Native(nn.BatchNorm1d):
    def forward(self, x):
        running = self.running_mean, self.running_var
        return torch.native_batch_norm(x, None, None, *running, self.training, 0.1, 1e-5)[0]


class InstancesInParts(nn.InstanceNorm1d):
    def __init__(self, num_columns):
        super().__init__(num_columns, track_running_stats=True)

    def forward(self, x):
        parts = [super(InstancesInParts, self).forward(part[:, :, None]) for part in x.chunk(2)]
        return torch.cat(parts)


@on_ranks(2)
def test_other_forward_passes_are_refused_in_training():
    world.current("a test").draws.same_rows = False
    kinds = {InParts: "InParts", Scaled: "InParts", ByHand: "ByHand", Native: "Native"}
    kinds[InstancesInParts] = "InstancesInParts"
    for kind, name in kinds.items():
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


class ByScript(nn.Module):
    def __init__(self, script):
        super().__init__()
        self.script = script

    def forward(self, x):
        return self.script(x)


def by_script(x: torch.Tensor) -> torch.Tensor:
    return F.batch_norm(x, None, None, training=True)


@on_ranks(2)
def test_scripts_change_their_mode_and_are_refused_statistics():
    """Outside of blocks, in a list, as a model: what takes statistics of batches may only be evaluated."""
    world.current("a test").draws.same_rows = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch would have programs compile instead
        kind = nn.LayerNorm
        one, *layers = [torch.jit.script(nn.Sequential(kind(4), nn.Linear(4, 4))) for _ in "abc"]
        norm = torch.jit.script(nn.Sequential(nn.BatchNorm1d(4)).eval())
        traced = torch.jit.trace(nn.Sequential(nn.BatchNorm1d(4)).eval(), torch.ones(2, 4))
        function = torch.jit.script(by_script)
    plain: Any = nn.ModuleDict(
        {"one": one, "layers": nn.ModuleList(layers), "n": norm, "t": traced}
    )
    model = bmt.BMTrainModelWrapper(copy.deepcopy(plain))
    rows = torch.arange(16.0).sin().view(4, 4)
    for mode in (False, True):
        outs = []
        for each, x in ((plain, rows), (model, rows.chunk(2)[bmt.rank()])):
            each.train(mode)
            each["n"].eval()
            parts = (each["one"], *each["layers"], each["n"], each["t"])
            outs.append(functools.reduce(lambda out, part: part(out), parts, x))
            outs[-1].square().sum().backward()
        models.assert_same(outs[1], outs[0].chunk(2)[bmt.rank()], "results")
        models.assert_same_gradients(model, plain, "gradients")
    models.assert_same(bmt.BMTrainModelWrapper(copy.deepcopy(one))(rows), one(rows), "whole")
    for refused in (model.train()["n"], bmt.BMTrainModelWrapper(ByScript(function))):
        with pytest.raises(ParameterError, match="has a forward pass of its own"):
            refused(rows)
