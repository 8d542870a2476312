"""use_checkpoint="auto": plans follow the shapes of inputs, stay within the limit, and compute what
plain PyTorch does.
"""

import contextlib
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.ranks import models
from tests.ranks.passes import blocks_of, compare, run
from tests.ranks.runner import on_ranks
from tests.ranks.test_recompute import (
    DIM,
    LENGTH,
    NUM_LAYERS,
    RANDOM_STATE,
    ROW,
    boom,
    inputs,
    kept_bytes,
    make_layers,
)
from torch import nn

import bmtrain as bmt
from bmtrain.errors import ConfigurationError
from bmtrain.recompute.level import Level
from bmtrain.recompute.memory import Memory, memory_of
from bmtrain.recompute.planner import Planners
from bmtrain.recompute.profiles import NUM_DIMS
from bmtrain.runtime import world

ALL = (Level.NOTHING,) * NUM_LAYERS


class Told(Memory):
    """Memory that says what the test says."""

    used = retries = peak = num_tidied = 0

    def shrink(self, limit):
        """There is less from now on."""
        self._limit = limit

    def allocated(self):
        return self.used

    def take_peak(self):
        peak, self.peak = max(self.peak, self.used), 0
        return peak

    def num_retries(self):
        return self.retries

    def tidy(self):
        self.num_tidied += 1


def told(limit):
    """Memory of new planners."""
    current, memory = world.current(), Told(limit)
    current.services[memory_of] = memory
    current.service(Planners)._planners.clear()
    return memory


def levels():
    """The present plan, which is that of all ranks."""
    current = world.current()
    ranks = [()] * bmt.world_size()
    axis = current.mesh.pp_zero if current.pipe_enabled else current.mesh.world
    own = current.service(Planners).of(axis).levels
    dist.all_gather_object(ranks, own)
    assert len({*ranks}) == 1, f"ranks have different plans: {ranks}"
    return own


def make_planned(zero_level=3, dropout=0.1, count=NUM_LAYERS):
    plain = make_layers(count, dropout=dropout)
    return plain, blocks_of(plain, use_checkpoint="auto", zero_level=zero_level)


@on_ranks(2)
def test_plans_follow_the_shape():
    """All is kept as long as it fits; larger inputs are measured again, smaller ones served by what
    is known; always exact. Rank 0 says the plan in one line.
    """
    told(1000 * ROW)
    text = io.StringIO()
    for zero_level in (2, 3):
        plain, blocks = make_planned(zero_level)
        plans = []
        with contextlib.redirect_stdout(text):
            for rows in (8, 8, 8, 8, 20, 20, 20, 20, 8, 1, 120, 120, 120, 120):
                compare(plain, blocks, f"ZeRO-{zero_level}, {rows} rows", inputs(rows))
                plans.append(levels())
        assert plans[3] == plans[8] == plans[9] == ALL
        assert len(plans[7]) == NUM_LAYERS and plans[7] != ALL
        assert all(level.is_whole() for level in plans[13])
        if zero_level == 2:
            for _ in range(6):
                run(blocks, inputs(4))
                plans.append(levels())
            # what comes often gets a plan of its own
            assert plans[-6:-2] == [ALL, ALL, ALL, ()] and plans[-1] == ALL
            # the first pass recomputes everything, and so does the one that measures
            assert plans[:2] == [(), ()]
            said = text.getvalue()
    first = f"recomputation for inputs (8, {LENGTH}, {DIM}): {NUM_LAYERS} blocks nothing; 0.0 of "
    assert said.startswith(f"{first}0.0 GiB, 0.0 of them for the loss, 0.0% more") == (
        bmt.rank() == 0
    )
    assert said.count("\n") == 3 * (bmt.rank() == 0)


class Sines(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return torch.sin(torch.sin(x * self.weight))


@on_ranks(1)
def test_a_plan_knows_the_last_dim():
    """Inputs that are larger in the last dim that is looked at are not served by the plan."""
    told(1000 * ROW)
    plain = nn.ModuleList([Sines(), Sines()])
    blocks = blocks_of(plain, use_checkpoint="auto")
    plans = []
    for length in (8, 8, 8, 400 * ROW):
        x = torch.randn(*[1] * (NUM_DIMS - 1), length)
        compare(plain, blocks, f"length {length}", x, tolerance=1e-4)
        plans.append(levels())
    assert plans[-2:] == [ALL[:2], ()]


@on_ranks(1)
def test_what_is_kept_stays_below_the_limit():
    """As measured by the allocator, from the tightest limit that recomputation of everything meets,
    to no need for any.
    """
    one = 40 * ROW
    for limit in (5 * one, 20 * one, 60 * one, 1000 * one):
        told(limit)
        _, blocks = make_planned(dropout=0.0)
        sizes = [kept_bytes(blocks, 40) for _ in range(5)]
        assert max(sizes[2:]) <= limit + NUM_LAYERS * RANDOM_STATE
        assert sizes[-1] >= min(limit, 16 * NUM_LAYERS * one) * 0.6, "much more would have fit"


@on_ranks(1)
def test_nothing_is_recomputed_where_memory_is_not_counted():
    """Lists and the wrapper pass the wish on."""
    plain, blocks = make_planned()
    compare(plain, blocks, "no limit", inputs(3))
    assert kept_bytes(blocks, 40) > 15 * NUM_LAYERS * 40 * ROW
    assert levels() == ()
    lists: list[Any] = [bmt.TransformerBlockList([nn.Linear(2, 2)], use_checkpoint="auto")]
    net = nn.ModuleList([nn.Linear(2, 2)])
    lists.append(bmt.BMTrainModelWrapper(net, use_checkpoint="auto"))
    assert [found[0].use_checkpoint for found in lists] == ["auto", "auto"]
    with pytest.raises(ConfigurationError, match="use_checkpoint"):
        bmt.BMTrainModelWrapper(nn.Sequential(), use_checkpoint="always")


@on_ranks(2)
def test_ranks_with_different_rows_have_one_plan():
    told(500 * ROW)
    _, blocks = make_planned()
    plans = []
    for step in range(7):
        run(blocks, inputs(20 if step % 2 == bmt.rank() else 2))
        plans.append(levels())
    assert plans[-1] and plans[-1] == plans[-3]


@on_ranks(2)
def test_other_passes_do_no_harm():
    """Evaluation, forward passes that nothing comes back through or that raise, gradients of
    several batches, and another model in turn, with inputs of one shape.
    """
    told(10000 * ROW)
    (plain, blocks), (others, other_blocks) = make_planned(), make_planned(count=2)
    for layers in (others, other_blocks):
        layers.eval()
    for step in range(10):
        with torch.no_grad():
            for block in blocks:
                block(inputs(30))
        if step % 2:
            y = inputs(8)
            for block in blocks:
                y = block(y)
        elif step < 7:
            handle = blocks[1].register_forward_pre_hook(lambda *_: dict[str, Any]()["boom"])
            with pytest.raises(KeyError, match="boom"):
                run(blocks, inputs(8))
            handle.remove()
        for _ in range(2):
            compare(plain, blocks, f"step {step}", inputs(8))
        plan = levels()
        if step % 4 == 1:
            y.sum().backward()  # long after other passes
        compare(others, other_blocks, f"step {step}, the other model", inputs(8))
    assert plan == ALL
    assert levels() == ALL[:2]


@on_ranks(2)
def test_one_rank_may_look_at_tensors():
    """It measures nothing meanwhile, and takes its part in what all ranks agree on; the plan comes
    a little later. So it does after errors in backward.
    """
    told(10000 * ROW)
    plain, blocks = make_planned()
    for step in range(8):
        if step in (1, 2):
            handle = blocks[1].norms[0].register_forward_pre_hook(boom)
            with pytest.raises(KeyError, match="boom"):
                run(blocks, inputs(8))
            handle.remove()
        looks = bmt.rank() == 0 and step in (0, 1, 3, 6)
        with bmt.inspect.inspect_tensor() if looks else contextlib.nullcontext():
            compare(plain, blocks, f"step {step}", inputs(8))
    assert any(not level.is_whole() for level in levels())


@on_ranks(2, init={"pipe_size": 2})
def test_every_stage_plans_for_its_micro_batches():
    """Two stages of two layers, two micro-batches: four calls a pass."""
    told(10000 * ROW)
    plain = make_layers(dropout=0.0)
    blocks = bmt.PipelineTransformerBlockList(blocks_of(plain, use_checkpoint="auto"))
    for step in range(5):
        (_, want), _ = run(plain, inputs(8))
        (_, got), _ = run(nn.ModuleList([blocks]), inputs(8), share=2)
        models.assert_same(got, want, f"step {step}")
    assert levels() == ALL


class SplitLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = bmt.nn.ColumnParallelLinear(DIM, 4 * DIM)
        self.down = bmt.nn.RowParallelLinear(4 * DIM, DIM)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


@on_ranks(2, init={"tp_size": 2})
def test_collectives_of_tensor_parallel_blocks():
    """Recomputation and measuring take part in them on all ranks of a group alike; bitwise the same
    at every level.
    """
    told(150 * ROW)
    layers = nn.ModuleList([SplitLayer(), SplitLayer()])
    bmt.init_parameters(layers)
    state = layers.state_dict()
    results = []
    for use_checkpoint in (*Level, "auto"):
        blocks = nn.ModuleList(
            [bmt.Block(SplitLayer(), use_checkpoint=use_checkpoint) for _ in range(2)]
        )
        blocks.load_state_dict(state)
        for _ in range(5):
            found, _ = run(blocks, inputs(8))
        grads = models.plain_gradients(blocks).values()
        results.append([*found, *(grad for grad in grads if grad is not None)])
        models.assert_equal(results[-1], results[0], use_checkpoint)
    assert len(results[0]) == 2 + 12
    assert len(levels()) == 2 and any(not level.is_whole() for level in levels())


@on_ranks(2)
def test_blocks_in_blocks():
    told(150 * ROW)
    layers = make_layers()
    plain = nn.ModuleList([nn.Sequential(*layers)])
    for use_checkpoint in (True, False, "auto"):
        inner = blocks_of(layers, use_checkpoint="auto")
        blocks = nn.ModuleList([bmt.Block(nn.Sequential(*inner), use_checkpoint=use_checkpoint)])
        for step in range(5):
            compare(plain, blocks, f"step {step}, {use_checkpoint}", inputs(8))
