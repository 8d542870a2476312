"""use_checkpoint="auto": plans follow the shapes of inputs, stay within the limit, and compute what
plain PyTorch does.
"""

from __future__ import annotations

import contextlib
import copy
import io

import pytest
import torch
import torch.nn.functional as F
from tests.ranks import models
from tests.ranks.runner import run_ranks
from tests.ranks.test_recompute import (
    DIM,
    LENGTH,
    NUM_LAYERS,
    RANDOM_STATE,
    ROW,
    Layer,
    assert_like_plain,
    inputs,
    kept_bytes,
    make_layers,
    run,
)
from tests.tensors import own_slice
from torch import nn

import bmtrain as bmt
from bmtrain.errors import ConfigurationError
from bmtrain.recompute.level import Level
from bmtrain.recompute.planner import Planner, Planners
from bmtrain.runtime import world


def passed_on() -> None:
    lists = [bmt.TransformerBlockList([nn.Linear(2, 2)], use_checkpoint="auto")]
    lists.append(bmt.BMTrainModelWrapper(nn.ModuleList([nn.Linear(2, 2)]), use_checkpoint="auto"))  # type: ignore[arg-type]
    assert [blocks[0].use_checkpoint for blocks in lists] == ["auto", "auto"]
    with pytest.raises(ConfigurationError, match="use_checkpoint"):
        bmt.BMTrainModelWrapper(nn.Sequential(), use_checkpoint="always")


def test_lists_and_the_wrapper_pass_it_on() -> None:
    run_ranks(passed_on, 1)


def planner() -> Planner:
    current = world.current()
    return current.service(Planners).of(current.mesh.world)


def make_planned(zero_level: int = 3, dropout: float = 0.1) -> tuple[nn.ModuleList, nn.ModuleList]:
    plain = make_layers(dropout=dropout)
    return plain, nn.ModuleList(
        [bmt.Block(copy.deepcopy(m), use_checkpoint="auto", zero_level=zero_level) for m in plain]
    )


def growing() -> list[tuple[Level, ...]]:
    """Steps with inputs that grow and shrink. Returns the plan of every step."""
    plans = []
    for zero_level in (2, 3):
        plain, blocks = make_planned(zero_level)
        for step, rows in enumerate((8, 8, 8, 8, 20, 20, 20, 20, 8, 1, 120, 120, 120, 120)):
            assert_like_plain(
                plain, blocks, rows, f"step {step}: {rows} rows, {bmt.world_size()} ranks"
            )
            plans.append(planner().levels)
    return plans


@pytest.mark.parametrize("world_size", [1, 2])
def test_plans_follow_the_shape(world_size: int) -> None:
    """All is kept as long as it fits; larger inputs are measured again, smaller ones served by what
    is known; always exact.
    """
    plans = run_ranks(growing, world_size, init={"memory_limit": 1000 * ROW})
    assert all(other == plans[0] for other in plans), "ranks have different plans"
    for first in (0, 14):
        none, some, *_ = (plans[0][first + 3], plans[0][first + 7])
        assert none == (Level.NOTHING,) * NUM_LAYERS
        assert len(some) == NUM_LAYERS and some != none
        assert plans[0][first + 8] == none and plans[0][first + 9] == none
        assert all(level.is_whole() for level in plans[0][first + 13])
    assert plans[0][:2] == [(), ()], (
        "the first pass recomputes everything, and so does the one that measures"
    )


def bounded(limit: int) -> tuple[int, int]:
    _, blocks = make_planned(dropout=0.0)
    sizes = [kept_bytes(blocks, 40) for _ in range(5)]
    return max(sizes[2:]), sizes[-1]


@pytest.mark.parametrize("inputs_of_a_block", [5, 20, 60, 1000])
def test_what_is_kept_stays_below_the_limit(inputs_of_a_block: int) -> None:
    """As measured by the allocator, from the tightest limit that recomputation of everything meets,
    to no need for any.
    """
    one = 40 * ROW
    limit = inputs_of_a_block * one
    most, last = run_ranks(bounded, 1, limit, init={"memory_limit": limit})[0]
    assert most <= limit + NUM_LAYERS * RANDOM_STATE
    assert last >= min(limit, 16 * NUM_LAYERS * one) * 0.6, "much more would have fit"


def unbounded() -> tuple[Level, ...]:
    plain, blocks = make_planned()
    assert_like_plain(plain, blocks, 3, "no limit")
    assert kept_bytes(blocks, 40) > 15 * NUM_LAYERS * 40 * ROW
    return planner().levels


def test_nothing_is_recomputed_where_memory_is_not_counted() -> None:
    assert run_ranks(unbounded, 1) == [()]


def uneven() -> tuple[tuple[Level, ...], ...]:
    """Ranks have rows of different numbers, in turn."""
    _, blocks = make_planned()
    plans = []
    for step in range(7):
        run(blocks, inputs(20 if step % 2 == bmt.rank() else 2))
        plans.append(planner().levels)
    return tuple(plans)


def test_ranks_with_different_rows_have_one_plan() -> None:
    first, second = run_ranks(uneven, 2, init={"memory_limit": 500 * ROW})
    assert first == second
    assert first[-1] and first[-1] == first[-3]


def other_passes() -> list[tuple[Level, ...]]:
    """Evaluation, forward passes that nothing comes back through, and gradients of several
    batches.
    """
    plain, blocks = make_planned()
    plans = []
    for step in range(8):
        with torch.no_grad():
            for block in blocks:
                block(inputs(30))
        if step % 2:
            y = inputs(8)
            for block in blocks:
                y = block(y)
        assert_like_plain(plain, blocks, 8, f"step {step}")
        run(blocks, inputs(8))
        plans.append(planner().levels)
    return plans


def test_other_passes_do_no_harm() -> None:
    plans = run_ranks(other_passes, 2, init={"memory_limit": 10000 * ROW})[0]
    assert plans[-1] == (Level.NOTHING,) * NUM_LAYERS


def two_models() -> list[tuple[Level, ...]]:
    """In turn, with inputs of one shape, like a generator and its critic."""
    plans = []
    pairs = [make_planned(), make_planned()]
    pairs = [(pairs[0]), (nn.ModuleList(pairs[1][0][:2]), nn.ModuleList(pairs[1][1][:2]))]
    for step in range(10):
        plain, blocks = pairs[step % 2]
        for layers in (plain, blocks):
            layers.train(step % 2 == 0)
        assert_like_plain(plain, blocks, 8, f"step {step}")
        plans.append(planner().levels)
    return plans


def test_models_in_turn_have_plans_of_their_own() -> None:
    plans = run_ranks(two_models, 1, init={"memory_limit": 10000 * ROW})[0]
    assert [len(plan) for plan in plans[-4:]] == [4, 2, 4, 2]


def pipelined() -> tuple[Level, ...]:
    plain = make_layers(dropout=0.0)
    blocks = bmt.PipelineTransformerBlockList(
        [bmt.Block(copy.deepcopy(m), use_checkpoint="auto") for m in plain]
    )
    for step in range(5):
        plain.zero_grad()
        blocks.zero_grad()
        want, x = inputs(8), inputs(8)
        run(plain, want)
        (blocks(x * 1.5).square().sum() / bmt.world_size()).backward()
        assert want.grad is not None and x.grad is not None
        models.assert_same(x.grad * bmt.world_size(), want.grad, f"step {step}")
    current = world.current()
    return current.service(Planners).of(current.mesh.pp_zero).levels


def test_every_stage_plans_for_its_micro_batches() -> None:
    """Two stages of two layers, two micro-batches: four calls a pass."""
    plans = run_ranks(pipelined, 2, init={"memory_limit": 10000 * ROW, "pipe_size": 2})
    assert plans == [(Level.NOTHING,) * 4] * 2


class SplitLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up, self.down = (
            bmt.nn.ColumnParallelLinear(DIM, 4 * DIM),
            bmt.nn.RowParallelLinear(4 * DIM, DIM),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def tensor_parallel() -> list[tuple[Level, ...]]:
    results, plans = [], []
    for use_checkpoint in (*Level, "auto"):
        blocks = nn.ModuleList(
            [bmt.Block(SplitLayer(), use_checkpoint=use_checkpoint) for _ in range(2)]
        )
        bmt.init_parameters(blocks)
        with torch.no_grad():
            for number, param in enumerate(blocks.parameters()):
                param.copy_(
                    torch.linspace(-0.2, 0.3, param.numel()).view(param.shape) * (number + 1)
                )
        for _ in range(5):
            blocks.zero_grad()
            x = inputs(8)
            out = run(blocks, x)
            plans.append(planner().levels)
        assert x.grad is not None
        results.append(
            [
                out,
                x.grad,
                *(
                    own_slice(param.grad).clone()
                    for param in blocks.parameters()
                    if param.grad is not None
                ),
            ]
        )
    for level, result in zip((*Level, "auto"), results, strict=True):
        for got, want in zip(result, results[0], strict=True):
            models.assert_same(got, want, str(level), 0.0)
    return plans


def test_collectives_of_tensor_parallel_blocks() -> None:
    """Recomputation and measuring take part in them on all ranks of a group alike; bitwise the same
    at every level.
    """
    plans = run_ranks(tensor_parallel, 2, init={"tp_size": 2, "memory_limit": 150 * ROW})
    assert plans[0] == plans[1]
    assert len(plans[0][-1]) == 2
    assert any(not level.is_whole() for level in plans[0][-1])


class Remembering(Layer):
    """Adds to what it is given, as a cache of keys and values, and reads all that is there."""

    def forward(self, x: torch.Tensor, *, seen: list[torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
        seen.append(self.up(x)[..., :DIM])
        return super().forward(x + torch.stack(seen).sum(0))


def remembering() -> None:
    plain = Remembering(dropout=0.0)
    for use_checkpoint in (*Level, "auto"):
        block = bmt.Block(copy.deepcopy(plain), use_checkpoint=use_checkpoint)
        for step in range(5):
            answers = []
            for module in (plain, block):
                module.zero_grad()
                x, seen = inputs(8), [torch.ones(8, LENGTH, DIM)]
                module(x * 1.5, seen=seen).square().sum().backward()
                answers.append([x.grad, len(seen), *(param.grad for param in module.parameters())])
            assert answers[0][1] == answers[1][1] == 2
            for got, want in zip(answers[1], answers[0], strict=True):
                if isinstance(got, torch.Tensor) and isinstance(want, torch.Tensor):
                    models.assert_same(
                        got.view(-1), want.view(-1), f"step {step}, {use_checkpoint}"
                    )


@pytest.mark.parametrize("limit", [60, 10000])
def test_arguments_that_a_block_changes(limit: int) -> None:
    """Measuring and recomputing leave them alone."""
    run_ranks(remembering, 1, init={"memory_limit": limit * ROW})


def nested() -> None:
    plain = make_layers()
    for use_checkpoint in (True, False, "auto"):
        inner = [bmt.Block(copy.deepcopy(m), use_checkpoint="auto") for m in plain]
        blocks = nn.ModuleList([bmt.Block(nn.Sequential(*inner), use_checkpoint=use_checkpoint)])
        for step in range(5):
            plain.zero_grad()
            blocks.zero_grad()
            want, got = inputs(8), inputs(8)
            models.assert_same(
                run(blocks, got, 1 / bmt.world_size()),
                run(plain, want),
                f"step {step}, {use_checkpoint}",
            )
            assert want.grad is not None and got.grad is not None
            models.assert_same(
                got.grad * bmt.world_size(), want.grad, f"step {step}, {use_checkpoint}: gradient"
            )


def test_blocks_in_blocks() -> None:
    run_ranks(nested, 2, init={"memory_limit": 150 * ROW})


def watched_by_one() -> tuple[Level, ...]:
    plain, blocks = make_planned()
    for step in range(8):
        looks = bmt.rank() == 0 and step in (0, 1, 3, 6)
        with bmt.inspect.inspect_tensor() if looks else contextlib.nullcontext():
            assert_like_plain(plain, blocks, 8, f"step {step}")
    return planner().levels


def test_one_rank_may_look_at_tensors() -> None:
    """It measures nothing meanwhile, and takes its part in what all ranks agree on; the plan comes
    a little later.
    """
    plans = run_ranks(watched_by_one, 2, init={"memory_limit": 10000 * ROW})
    assert plans[0] == plans[1]
    assert any(not level.is_whole() for level in plans[0])


def reported() -> str:
    _, blocks = make_planned()
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        for _ in range(4):
            run(blocks, inputs(8))
    return text.getvalue()


def test_the_plan_is_one_line_on_rank_0() -> None:
    first, second = run_ranks(reported, 2, init={"memory_limit": 10000 * ROW})
    assert first.startswith(
        f"recomputation for inputs (8, {LENGTH}, {DIM}): {NUM_LAYERS} blocks nothing; "
        "0.0 of 0.0 GiB, 0.0 of them for the loss, 0.0% more"
    )
    assert first.count("\n") == 1 and not second
