"""What is computed again in backward, at every level, against plain PyTorch; and what is kept in
the meantime.
"""

import itertools
import math
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from tests.ranks import models
from tests.ranks.passes import blocks_of, compare, gradients
from tests.ranks.runner import on_ranks
from torch import nn
from torch.profiler import ProfilerActivity, profile

import bmtrain as bmt
from bmtrain.errors import ConfigurationError
from bmtrain.recompute.level import Level
from bmtrain.recompute.offload import Host
from bmtrain.runtime import world
from bmtrain.torch_internals import StorageWeakRef, in_backward

DIM, LENGTH, NUM_LAYERS = 16, 6, 4
ROW = LENGTH * DIM * 4  # bytes of the input of one sample
RANDOM_STATE = 5056  # bytes of that of the CPU, which every recomputation keeps


class Layer(nn.Module):
    """A transformer layer with dropout everywhere, and a change in place of what a matrix product
    returned.
    """

    def __init__(self, dropout=0.1, in_place=False):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(DIM), nn.LayerNorm(DIM)])
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)
        self.dropout, self.in_place = dropout, in_place

    def forward(self, x):
        qkv = self.qkv(self.norms[0](x)).unflatten(-1, (3, 2, DIM // 2)).unbind(-3)
        q, k, v = (part.transpose(-2, -3) for part in qkv)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)
        heads = F.dropout(self.out(heads.transpose(-2, -3).flatten(-2)), self.dropout)
        x = torch.add(x, heads, alpha=0.5)
        hidden = self.up(self.norms[1](x))
        hidden = F.relu_(hidden) if self.in_place else F.gelu(hidden)
        return x + F.dropout(self.down(hidden), self.dropout)


def make_layers(count=NUM_LAYERS, **options):
    torch.manual_seed(3)
    return nn.ModuleList([Layer(**options) for _ in range(count)])


def inputs(rows):
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, LENGTH, DIM, generator=generator).requires_grad_()


def oddly(layer, x):
    """Two calls, of an input that is not contiguous and of a part of what is in memory."""
    return layer(layer(x.transpose(0, 1))[1:])


@on_ranks(2)
def test_every_level_is_exact():
    """On ranks that differ in it, too. Dropout replays, also inside of attention, whose result is
    then not kept; what changed in place is computed again; a second backward pass and a second call
    find nothing that the first has left over.
    """
    every = list(Level)
    pairs = [*zip(every, every, strict=True), *zip(every, every[1:] + every[:1], strict=True)]
    for number, levels in enumerate(pairs):
        plain = make_layers(2, dropout=0.1 * (number % 5 > 1), in_place=number % 2 == 1)
        zero_level = 2 + number % 2
        blocks = blocks_of(plain, use_checkpoint=levels[bmt.rank()], zero_level=zero_level)
        for times in (1, 2):
            what = f"{levels}, ZeRO-{zero_level}, {times} times"
            compare(plain, blocks, what, inputs(3), times=times)
        compare(plain, blocks, f"{levels}, called twice", inputs(3), oddly)


def boom(*_):
    if in_backward():
        raise KeyError("boom")


@on_ranks(2)
def test_an_error_leaves_nothing_behind():
    """An input that is overwritten, wherever it is kept, and whether the next to ask for it is a
    forward or a backward pass; and a module that raises while it is computed again.
    """
    for level, zero_level, num_more in itertools.product(Level, (2, 3), (0, 1)):
        plain = make_layers(2 + num_more)
        blocks = blocks_of(plain, use_checkpoint=level, zero_level=zero_level)
        x = inputs(2) * 1.5
        y = blocks[0](x)
        x.add_(1)
        what = f"{level}, ZeRO-{zero_level}, {num_more} more"
        if level is not Level.NOTHING or zero_level == 2:
            with pytest.raises(RuntimeError, match=r"in ?place"):
                for block in blocks[1 : 1 + num_more]:
                    y = block(y)
                y.sum().backward()
            compare(plain, blocks, f"{what}: after an overwritten input", inputs(2))
        if level is Level.NOTHING:
            continue
        if level is Level.OFFLOADED and num_more:
            grads = []
            for change in (0, 1):  # once the copy on the host is complete
                blocks.zero_grad()
                torch.manual_seed(5)
                x = inputs(2) * 1.5
                y = blocks[1](blocks[0](x))
                x.add_(change)
                y.sum().backward()
                grads.append(gradients(blocks))
            models.assert_same_dicts(grads[1], grads[0], f"{what}: overwritten later")
            x = inputs(2) * 1.5
            blocks[0](x)  # whose graph is gone
            x.add_(1)
        handle = blocks[1].norms[num_more].register_forward_pre_hook(boom)
        y = blocks[1](blocks[0](inputs(2)))
        for block in blocks[2:]:
            y = block(y)
        state = torch.get_rng_state()
        with pytest.raises(KeyError, match="boom"):
            y.sum().backward()
        assert torch.equal(torch.get_rng_state(), state)
        assert all(isinstance(param, bmt.DistributedParameter) for param in blocks.parameters())
        assert blocks[1]._inner.__dict__["dropout"] == 0.1 and not in_backward()
        handle.remove()
        compare(plain, blocks, f"{what}: after a recomputation that raised", inputs(2))


def kept_bytes(blocks, rows):
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


class Watching(Layer):
    """Notes how many inputs of the layers so far are still in memory."""

    seen: ClassVar[list[StorageWeakRef]] = []

    def forward(self, x):
        if not in_backward():
            self.seen.append(StorageWeakRef(x.untyped_storage()))
        self.num_alive = sum(not memory.expired() for memory in self.seen)
        return super().forward(x)


@on_ranks(1)
def test_every_level_keeps_what_it_says():
    """In tensors as large as the input of a block; random states and sums over rows are smaller
    than one. While the last of six blocks of a list runs, its own input is there and the one before
    is on its way.
    """
    sizes, alive = {}, {}
    for level in Level:
        plain = make_layers(dropout=0.0)
        for layer in plain:
            layer.register_buffer("table", torch.zeros(40 * LENGTH, DIM))  # of which no copy stays
        blocks = blocks_of(plain, use_checkpoint=level)
        # pinned buffers are there after the first time
        size = [kept_bytes(blocks, 40) for _ in range(2)][-1]
        sizes[level.name] = round((size / NUM_LAYERS - RANDOM_STATE) / (40 * ROW))
        Watching.seen.clear()
        layers = [Watching(dropout=0.0) for _ in range(6)]
        out = bmt.TransformerBlockList([bmt.Block(m, use_checkpoint=level) for m in layers])(
            inputs(3) * 1.5
        )
        alive[level.name] = layers[-1].num_alive
        del out
    # CHEAP: products (3 + 1 + 4 + 1), attention, the input. NOTHING: norms, GELU (4) and a sum as
    # well, but not what is only added.
    assert sizes == {"NOTHING": 16, "CHEAP": 11, "BLOCK": 1, "OFFLOADED": 0}
    assert alive == {"NOTHING": 6, "CHEAP": 6, "BLOCK": 6, "OFFLOADED": 2}
    for wrong in ("full", 2, None, "AUTO"):
        with pytest.raises(ConfigurationError, match="use_checkpoint"):
            bmt.Block(nn.Linear(2, 2), use_checkpoint=wrong)  # type: ignore[arg-type]


@on_ranks(1)
def test_memory_of_the_host_is_used_again():
    """Also by inputs that are a little longer, and with nothing left in it from those before."""
    plain = make_layers(dropout=0.0)
    blocks = blocks_of(plain, use_checkpoint=Level.OFFLOADED)
    host = world.current().service(Host)
    sizes = []
    for rows in (33, 64, 34, 33, 64, 34):  # 33 and 34 rows have buffers of one size
        compare(plain, blocks, f"{rows} rows", inputs(rows))
        sizes.append(host.num_bytes)
    assert sizes[0] == NUM_LAYERS * math.ceil(33 * ROW / 1024) * 1024
    assert sizes[0] < sizes[1] and len({*sizes[1:]}) == 1
