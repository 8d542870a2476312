"""bmtrain.cuda_graph: the same training with and without, where a recording stands for the device's
graphs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.ranks import graph_programs, graphs
from tests.ranks.runner import run_ranks
from tests.tensors import grad_of
from torch import nn

import bmtrain as bmt
from bmtrain.recompute.level import Level

NUM_PARTS = 4


def compare_programs(part: int) -> None:
    graphs.use()
    for program in graph_programs.PROGRAMS[part::NUM_PARTS]:
        graph_programs.compare(program)


def compare_options() -> None:
    recorded = graphs.use()
    for level, recompute in itertools.product((2, 3), (False, True)):
        graph_programs.compare(graph_programs.plainly, level, recompute)
    graph_programs.compare(graph_programs.plainly, recompute="auto")
    graph_programs.compare(graph_programs.in_parts, recompute="auto")
    run = graph_programs.compare(graph_programs.plainly, loss_scale=4.0, loss_scale_steps=2)
    assert run.manager.loss_scale > 16, "the scale grew while a graph was replayed"
    assert recorded.num_captures == 7


def compare_by_copies() -> None:
    graphs.use()
    for program in (graph_programs.plainly, graph_programs.in_parts, graph_programs.held_back):
        graph_programs.compare(program, dim=128)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_training_is_bitwise_the_same(part: int, world_size: int) -> None:
    """Losses and weights, for every way of going from one step to the next."""
    run_ranks(compare_programs, world_size, part)


@pytest.mark.parametrize("world_size", [1, 2])
def test_options_are_bitwise_the_same(world_size: int) -> None:
    """ZeRO-2 and ZeRO-3, recomputation, a loss scale."""
    run_ranks(compare_options, world_size)


def test_copies_between_ranks() -> None:
    """Shards in memory that the ranks share, large enough to be read and summed there."""
    run_ranks(compare_by_copies, 2, init={"transport": "copy_engine"})


class Small:
    """A block and a function of it that may be captured."""

    def __init__(self, max_graphs: int = 8) -> None:
        torch.manual_seed(1)
        self.block = bmt.Block(
            nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 3)), use_checkpoint=False
        )
        self.block.eval()
        self.manager = bmt.optim.OptimManager()
        self.manager.add_optimizer(torch.optim.SGD(self.block.parameters(), lr=0.1))
        self.step = bmt.cuda_graph(self.run, max_graphs=max_graphs)

    def run(
        self, x: Any, power: int = 2, inside: Callable[[Small], object] = lambda small: None
    ) -> torch.Tensor:
        loss = self.block(x["x"]).pow(power).sum()
        self.manager.backward(loss)
        inside(self)
        return loss

    def flush(self) -> None:
        """Reduce gradients that are kept back."""
        self.manager.clip_grad_norm(self.block.parameters(), float("inf"))


def x(count: int = 2) -> dict[str, torch.Tensor]:
    return {"x": torch.linspace(-1, 1, 3 * count).view(count, 3) + bmt.rank()}


def clip(small: Small) -> None:
    small.manager.clip_grad_norm(small.block.parameters(), 1.0)


def read(small: Small) -> None:
    x()["x"].sum().item()


def read_gradient(small: Small) -> None:
    grad = next(small.block.parameters()).grad
    assert grad is not None
    grad.norm()


def behind(small: Small, inside: Callable[[Small], object]) -> tuple[list[str], list[torch.Tensor]]:
    """Warnings and losses of five calls."""
    losses: list[torch.Tensor] = []
    messages = [
        graph_programs.warned(lambda: losses.append(small.step(x(), inside=inside)))
        for _ in range(5)
    ]
    return [text for found in messages for text in found], losses


def offload(small: Small) -> None:
    """Inputs wait on the host from the next call on."""
    small.block.use_checkpoint = Level.OFFLOADED


def fall_back() -> None:
    recorded = graphs.use()
    for inside, reason in (
        (clip, "clip_grad_norm"),
        (read, "not permitted"),
        (read_gradient, "gradients are read inside"),
        (offload, "Level.OFFLOADED"),
    ):
        small, plain = Small(), Small()
        messages, losses = behind(small, inside)
        assert len(messages) == 1, messages
        assert reason in messages[0], messages
        small.flush()
        for loss in losses:
            assert torch.equal(loss, plain.run(x(), inside=inside))
        plain.flush()
        for mine, theirs in zip(small.block.parameters(), plain.block.parameters(), strict=True):
            assert torch.equal(grad_of(mine), grad_of(theirs)), (
                f"{inside.__name__}: gradients of five passes"
            )
    assert recorded.num_replays == 0


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_cannot_be_captured_runs_as_it_is(world_size: int) -> None:
    """One warning with the reason, and the gradients of every call, that of the failed capture
    too.
    """
    run_ranks(fall_back, world_size)


def refuse_inside() -> None:
    recorded = graphs.use()
    graph_programs.refuse_together()
    assert recorded.num_replays == 0


def test_what_ranks_do_together_is_never_captured() -> None:
    """Collectives inside, writes that a gather would have to see, gradients that are read: one
    warning on each rank, and what the function computes without a graph.
    """
    run_ranks(refuse_inside, 2)


def fail_on_one_rank() -> None:
    recorded = graphs.use()
    small, plain = Small(), Small()
    inside = read if bmt.rank() == 1 else look
    messages, losses = behind(small, inside)
    assert len(messages) == 1, messages
    assert ("not permitted" if bmt.rank() == 1 else "another rank") in messages[0]
    for loss in losses:
        assert torch.equal(loss, plain.run(x()))
    assert recorded.num_replays == 0


def look(small: Small) -> object:
    return small.block


def test_ranks_give_up_together() -> None:
    """What only one rank cannot capture is captured on none."""
    run_ranks(fail_on_one_rank, 2)


def different_shapes_on_ranks() -> None:
    recorded = graphs.use()
    small, plain = Small(), Small()
    for step in range(9):
        count = 2 + (step + bmt.rank()) % 2
        got, want = small.step(x(count)), plain.run(x(count))
        assert torch.equal(got, want), f"step {step}"
        small.manager.zero_grad()
        plain.manager.zero_grad()
    assert recorded.num_captures == 2
    assert recorded.num_replays == 9 - 4


def test_ranks_may_have_different_shapes() -> None:
    """They rehearse, capture and replay together all the same."""
    run_ranks(different_shapes_on_ranks, 2)


def kinds() -> None:
    recorded = graphs.use()
    small = Small(max_graphs=4)
    plain = Small()
    calls: list[dict[str, Any]] = [{"power": 2}, {"power": 4}, {"power": 2}, {"power": 4}] * 3
    for number, options in enumerate(calls):
        assert torch.equal(small.step(x(), **options), plain.run(x(), **options)), number
        for each in (small, plain):
            each.manager.zero_grad()
    assert recorded.num_captures == 2
    small.block.train()
    torch.manual_seed(1)
    losses = {small.step(x()).item() for _ in range(2)}
    small.manager.zero_grad()
    assert recorded.num_captures == 2, "training mode is another kind"
    assert len(losses) == 2, "dropout draws"
    assert any(
        "more than 4" in text
        for count in range(3, 7)
        for text in graph_programs.warned(lambda: small.step(x(count)))  # noqa: B023
    )
    with pytest.raises(ValueError, match="max_graphs"):
        bmt.cuda_graph(small.run, max_graphs=0)
    with pytest.raises(ValueError, match="max_graphs"):
        bmt.cuda_graph(max_graphs="2")  # type: ignore[call-overload]
    assert bmt.cuda_graph(max_graphs=2)(len)("abc") == 3
    with pytest.raises(ValueError, match="expected a function"):
        bmt.cuda_graph(3)  # type: ignore[call-overload]


def test_calls_of_several_kinds() -> None:
    """Constants and training mode have graphs of their own, up to a number."""
    run_ranks(kinds, 1)


def notice_nan() -> None:
    graphs.use()
    small = Small()
    for _ in range(4):
        small.step(x())
    for factor, taken in ((float("nan"), False), (1.0, True)):
        before = [param.detach() + 0 for param in small.block.parameters()]
        small.manager.zero_grad()
        small.step({"x": x()["x"] * factor})
        small.manager.step()
        assert small.manager.skipped_steps == 1
        for param, want in zip(small.block.parameters(), before, strict=True):
            assert torch.equal(param.detach() + 0, want) != taken


def test_a_loss_that_is_nan_is_noticed_in_replays() -> None:
    """The manager looks at the loss of every replay, and skips the step."""
    run_ranks(notice_nan, 1)


def refuse_strangers() -> None:
    graphs.use()
    block, stranger = bmt.Block(nn.Linear(3, 3)), nn.Parameter(torch.ones(3))

    @bmt.cuda_graph
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = (block(x) * stranger).sum()
        loss.backward()
        return loss

    messages = [text for _ in range(4) for text in graph_programs.warned(lambda: step(x()["x"]))]
    assert len(messages) == 1, messages
    assert "neither sharded nor in an optimizer" in messages[0]
    assert torch.allclose(grad_of(stranger), 4 * block(x()["x"]).detach().sum(0))


def test_parameters_that_nobody_knows_are_named() -> None:
    """Their gradients could not be shown after a replay."""
    run_ranks(refuse_strangers, 1)


def on_the_cpu() -> None:
    small = Small()
    small.step(x()).item()


def test_on_the_cpu_the_function_is_called() -> None:
    """Without a recording in the place of graphs."""
    run_ranks(on_the_cpu, 1)
