"""torch.compile of blocks: compiled once for equal blocks, and exact."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.ranks import models
from tests.ranks.runner import run_ranks
from torch import nn

import bmtrain as bmt


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 11), nn.Linear(11, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def compiled() -> None:
    for level, recompute in ((2, False), (3, False), (3, True)):
        what = f"ZeRO-{level}, recompute={recompute}, {bmt.world_size()} ranks"
        torch._dynamo.reset()
        torch.manual_seed(3)
        plain = nn.ModuleList([Layer() for _ in range(5)])
        blocks = nn.ModuleList([bmt.Block(copy.deepcopy(m), use_checkpoint=recompute, zero_level=level) for m in plain])
        backend = models.Counting()
        for block in blocks:
            block.compile(backend=backend)
        for _ in range(2):
            plain.zero_grad()
            blocks.zero_grad()
            losses = []
            for net in (plain, blocks):
                x = torch.linspace(-1, 1, 18).view(3, 6)
                for layer in net:
                    x = layer(x)
                losses.append(x.square().sum())
            losses[0].backward()
            (losses[1] / bmt.world_size()).backward()
            models.assert_same(losses[1].detach(), losses[0].detach(), what)
            models.assert_same_dicts(models.full_gradients(blocks), models.plain_gradients(plain), what)
        assert backend.num_graphs <= 2, f"{what}: compiled {backend.num_graphs} graphs for 5 equal blocks"


@pytest.mark.parametrize("world_size", [1, 2])
def test_equal_blocks_compile_once(world_size: int) -> None:
    """Five equal blocks give one graph (one more at most for the first input without gradient), and plain gradients."""
    run_ranks(compiled, world_size, timeout=60)
