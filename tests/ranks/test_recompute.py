"""What is computed again in backward, at every level and as planned, against plain PyTorch; and
what is kept in the meantime.
"""

from __future__ import annotations

import copy
import itertools
import math
import warnings
import weakref
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from tests.ranks import models
from tests.ranks.runner import run_ranks
from torch import nn
from torch.profiler import ProfilerActivity, profile

import bmtrain as bmt
from bmtrain.errors import ConfigurationError
from bmtrain.recompute.level import Level
from bmtrain.recompute.offload import Host
from bmtrain.runtime import world
from bmtrain.torch_internals import in_backward

DIM, LENGTH, NUM_LAYERS = 16, 6, 4
ROW = LENGTH * DIM * 4  # bytes of the input of one sample
RANDOM_STATE = 5056  # bytes of that of the CPU, which every recomputation keeps


class Layer(nn.Module):
    """A transformer layer with dropout everywhere, and a change in place of what a matrix product
    returned.
    """

    def __init__(self, dropout: float = 0.1, in_place: bool = False) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(DIM), nn.LayerNorm(DIM)])
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)
        self.dropout, self.in_place = dropout, in_place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            self.qkv(self.norms[0](x))
            .unflatten(-1, (3, 2, DIM // 2))
            .movedim(-3, 0)
            .transpose(-2, -3)
        )
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)
        x = x + F.dropout(self.out(heads.transpose(-2, -3).flatten(-2)), self.dropout)
        hidden = self.up(self.norms[1](x))
        hidden = F.relu_(hidden) if self.in_place else F.gelu(hidden)
        return x + F.dropout(self.down(hidden), self.dropout)


def make_layers(**options: Any) -> nn.ModuleList:
    torch.manual_seed(3)
    return nn.ModuleList([Layer(**options) for _ in range(NUM_LAYERS)])


def inputs(rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, LENGTH, DIM, generator=generator).requires_grad_()


def run(
    layers: Sequence[nn.Module] | nn.ModuleList, x: torch.Tensor, scale: float = 1.0
) -> torch.Tensor:
    """Forward and backward; the gradient of `x` is left in it."""
    torch.manual_seed(7)
    y = x * 1.5
    for layer in layers:
        y = layer(y)
    (y.square().sum() * scale).backward()
    return y.detach()


def assert_like_plain(plain: nn.ModuleList, blocks: nn.ModuleList, rows: int, what: str) -> None:
    """Values and gradients of one step."""
    plain.zero_grad()
    blocks.zero_grad()
    want, got = inputs(rows), inputs(rows)
    models.assert_same(run(blocks, got, 1 / bmt.world_size()), run(plain, want), f"{what}: value")
    assert want.grad is not None and got.grad is not None
    models.assert_same(got.grad * bmt.world_size(), want.grad, f"{what}: gradient of the input")
    models.assert_same_dicts(models.full_gradients(blocks), models.plain_gradients(plain), what)


def every_level() -> None:
    for level, zero_level, in_place in itertools.product(Level, (2, 3), (False, True)):
        plain = make_layers(in_place=in_place)
        blocks = nn.ModuleList(
            [
                bmt.Block(copy.deepcopy(m), use_checkpoint=level, zero_level=zero_level)
                for m in plain
            ]
        )
        for _ in range(2):
            assert_like_plain(
                plain,
                blocks,
                3,
                f"{level}, ZeRO-{zero_level}, in place: {in_place}, {bmt.world_size()} ranks",
            )


@pytest.mark.parametrize("world_size", [1, 2])
def test_every_level_is_exact(world_size: int) -> None:
    """Dropout replays, also inside of attention, whose result is then not kept; what changed in
    place is computed again.
    """
    run_ranks(every_level, world_size)


class Thrice(nn.Module):
    """Products of one shape, the last of which no recomputation comes to."""

    def __init__(self) -> None:
        super().__init__()
        self.maps = nn.ModuleList([nn.Linear(DIM, DIM) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b, c = self.maps
        y: torch.Tensor = c(torch.tanh(b(torch.tanh(a(x)))))
        return y


def input_overwritten() -> None:
    for level, num_blocks in itertools.product(Level, (1, 2)):
        blocks = [bmt.Block(m, use_checkpoint=level) for m in make_layers()[:num_blocks]]
        x = inputs(2) * 1.5
        y = blocks[0](x)
        x.add_(1)
        with pytest.raises(RuntimeError, match=r"in ?place"):
            for block in blocks[1:]:
                y = block(y)
            y.sum().backward()


def test_an_input_that_is_overwritten_is_told() -> None:
    """Wherever it is kept, and whether the next to ask for it is a forward or a backward pass."""
    run_ranks(input_overwritten, 1)


def backward_twice() -> None:
    for level in Level:
        torch.manual_seed(3)
        plain = Thrice()
        block = bmt.Block(copy.deepcopy(plain), use_checkpoint=level)
        for net in (plain, block):
            y = net(inputs(2) * 1.5)
            y.square().sum().backward(retain_graph=True)
            y.sin().sum().backward()
        models.assert_same_dicts(
            models.full_gradients(block), models.plain_gradients(plain), str(level)
        )


def test_backward_twice_through_one_graph() -> None:
    """What one recomputation has left over is not found by the next."""
    run_ranks(backward_twice, 1)


def own_levels() -> None:
    for level, zero_level in itertools.product(Level, (2, 3)):
        plain = make_layers()
        own = level if bmt.rank() else Level.NOTHING
        blocks = nn.ModuleList(
            [bmt.Block(copy.deepcopy(m), use_checkpoint=own, zero_level=zero_level) for m in plain]
        )
        for _ in range(2):
            assert_like_plain(plain, blocks, 3, f"{own}, ZeRO-{zero_level}")


def test_ranks_may_differ_in_their_levels() -> None:
    """A rank that meets larger inputs than planned recomputes more than the others: gathers and
    reductions are the same.
    """
    run_ranks(own_levels, 2)


def every_level_compiled() -> None:
    for level, in_place in itertools.product((Level.CHEAP, Level.OFFLOADED), (False, True)):
        plain = make_layers(dropout=0.0, in_place=in_place)
        blocks = nn.ModuleList([bmt.Block(copy.deepcopy(m), use_checkpoint=level) for m in plain])
        for block in blocks:
            block.compile(backend="aot_eager_decomp_partition")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, about itself, when it loads its compiler
            for _ in range(2):
                assert_like_plain(plain, blocks, 3, f"{level} compiled, {bmt.world_size()} ranks")


def test_levels_in_compiled_code_are_exact() -> None:
    run_ranks(every_level_compiled, 2)


def kept_bytes(blocks: nn.ModuleList, rows: int) -> int:
    """What a forward pass of the blocks leaves in memory besides its input: allocations less
    deallocations.
    """
    y = inputs(rows) * 1.5
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profiler:
        for block in blocks:
            y = block(y)
    y.sum().backward()
    return int(sum(event.self_cpu_memory_usage for event in profiler.events()))


def kept() -> dict[str, int]:
    found = {}
    for level in Level:
        blocks = nn.ModuleList(
            [bmt.Block(m, use_checkpoint=level) for m in make_layers(dropout=0.0)]
        )
        # pinned buffers are there after the first time
        found[level.name] = [kept_bytes(blocks, 40) for _ in range(2)][-1]
    return found


def test_every_level_keeps_what_it_says() -> None:
    """In tensors as large as the input of a block; random states and sums over rows are smaller
    than one.
    """
    sizes = {
        name: round((size / NUM_LAYERS - RANDOM_STATE) / (40 * ROW))
        for name, size in run_ranks(kept, 1)[0].items()
    }
    # CHEAP: products (3 + 1 + 4 + 1), attention, the input. NOTHING: norms, GELU (4) and a sum as
    # well, but not what is only added.
    assert sizes == {"NOTHING": 16, "CHEAP": 11, "BLOCK": 1, "OFFLOADED": 0}


def refused() -> None:
    for wrong in ("full", 2, None, "AUTO"):
        with pytest.raises(ConfigurationError, match="use_checkpoint"):
            bmt.Block(nn.Linear(2, 2), use_checkpoint=wrong)  # type: ignore[arg-type]


def test_other_arguments_are_refused() -> None:
    run_ranks(refused, 1)


def lengths_that_vary() -> None:
    plain = make_layers(dropout=0.0)
    blocks = nn.ModuleList(
        [bmt.Block(copy.deepcopy(m), use_checkpoint=Level.OFFLOADED) for m in plain]
    )
    host = world.current().service(Host)
    sizes = []
    for rows in (33, 64, 34, 33, 64, 34):  # 33 and 34 rows have buffers of one size
        assert_like_plain(plain, blocks, rows, f"{rows} rows")
        sizes.append(host.num_bytes)
    assert sizes[0] == NUM_LAYERS * math.ceil(33 * ROW / 1024) * 1024
    assert sizes[0] < sizes[1] == sizes[2] == sizes[3] == sizes[4] == sizes[5]


def test_memory_of_the_host_is_used_again() -> None:
    """Also by inputs that are a little longer, and with nothing left in it from those before."""
    run_ranks(lengths_that_vary, 1)


class Watching(Layer):
    """Notes how many inputs of the layers so far are still in memory."""

    seen: ClassVar[list[weakref.ref[torch.Tensor]]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not in_backward():
            self.seen.append(weakref.ref(x))
        self.num_alive = sum(reference() is not None for reference in self.seen)
        return super().forward(x)


def alive() -> dict[str, int]:
    found = {}
    for level in (Level.BLOCK, Level.OFFLOADED):
        Watching.seen.clear()
        layers = [Watching(dropout=0.0) for _ in range(6)]
        out = bmt.TransformerBlockList(
            [bmt.Block(layer, use_checkpoint=level) for layer in layers]
        )(inputs(3) * 1.5)
        found[level.name] = layers[-1].num_alive
        del out
    return found


def test_a_list_keeps_no_inputs_that_its_blocks_do_not() -> None:
    """While the last of six blocks runs, its own input is there and the one before is on its
    way.
    """
    assert run_ranks(alive, 1) == [{"BLOCK": 6, "OFFLOADED": 2}]
