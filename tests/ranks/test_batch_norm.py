"""BatchNorm in training is one process's: statistics are those of all ranks' rows."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from tests.ranks import models
from tests.ranks.runner import run_ranks
from torch import nn

import bmtrain as bmt


class Net(nn.Module):
    """In blocks and outside of them, of all kinds."""

    def __init__(self) -> None:
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
        self.last = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.last(torch.tanh(x).mean((2, 3)))
        return out


def trained(use_checkpoint: bool) -> None:
    torch.manual_seed(2)
    plain, rows = Net().double(), torch.randn(10, 2, 5, 5, dtype=torch.float64)
    model = bmt.BMTrainModelWrapper(copy.deepcopy(plain), use_checkpoint=use_checkpoint)
    assert isinstance(model.last, nn.BatchNorm1d)
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain))
    own = rows.split([5, 2, 3] if bmt.world_size() == 3 else [10])[bmt.rank()]
    for step in range(3):
        for optimizer, m, x in ((ours, model, own), (theirs, plain, rows)):
            optimizer.zero_grad()
            (m(x.roll(step, 1)) ** 3).sum().backward()
        found, want = models.full_gradients(model), models.plain_gradients(plain)
        models.assert_same_dicts(found, want, f"gradients of step {step}", 1e-9)
        ours.step()
        theirs.step()
        models.assert_same_dicts(models.cloned_state(model), plain.state_dict(), "state", 1e-9)
    for layer in (plain.layers[2], model.layers[2]):
        layer.requires_grad_(False)
    models.assert_same(model.eval()(own)[:0], plain.eval()(rows)[:0], "shape")
    inside: Any = model.layers[0]
    got, want_out = (
        inside(own[:, :1].expand(-1, 4, -1, -1)),
        plain.layers[0](own[:, :1].expand(-1, 4, -1, -1)),
    )
    models.assert_same(got.detach(), want_out.detach(), "evaluation", 1e-9)


@pytest.mark.parametrize("use_checkpoint", [True, False])
def test_statistics_are_of_all_rows(use_checkpoint: bool) -> None:
    run_ranks(trained, 3, use_checkpoint)


class Own(nn.BatchNorm1d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def warned() -> None:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        bmt.BMTrainModelWrapper(nn.Sequential(Own(3)))
    assert found and all("forward pass of its own" in str(entry.message) for entry in found)


def test_another_forward_pass_is_named() -> None:
    run_ranks(warned, 2)
