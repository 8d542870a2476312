"""bmtrain.cuda_graph: the same training with and without, where a recording stands for the device's
graphs.
"""

from typing import Any

import pytest
import torch
from tests.ranks import graph_programs, graphs
from tests.ranks.runner import on_ranks
from tests.tensors import grad_of
from torch import nn

import bmtrain as bmt
from bmtrain.recompute.level import Level
from bmtrain.runtime import world
from bmtrain.shard.engine import Engine

LONG = {"plainly", "alternating", "evaluating_captured", "changing_gradients"}


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(program, marks=pytest.mark.long if program.__name__ in LONG else ())
        for program in graph_programs.PROGRAMS
    ],
)
@on_ranks(2)
def test_training_is_bitwise_the_same(program):
    """Losses and weights, for every way of going from one step to the next."""
    graphs.use()
    graph_programs.compare(program)


@on_ranks(2)
def test_options_are_bitwise_the_same():
    """ZeRO-2 and ZeRO-3, recomputation, a loss scale."""
    recorded = graphs.use()
    graph_programs.compare(graph_programs.plainly, recompute="auto")
    run = graph_programs.compare(
        graph_programs.plainly, 2, True, loss_scale=4.0, loss_scale_steps=2
    )
    assert run.manager.loss_scale > 16, "the scale grew while a graph was replayed"
    assert recorded.num_captures == 2


@on_ranks(2, init={"transport": "copy_engine"})
def test_copies_between_ranks():
    """Shards in memory that the ranks share, large enough to be read and summed there."""
    graphs.use()
    graph_programs.compare(graph_programs.held_back, dim=128)


class Small:
    """A block and a function of it that may be captured."""

    def __init__(self, max_graphs=8):
        torch.manual_seed(1)
        self.block = bmt.Block(
            nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 3)), use_checkpoint=False
        )
        self.block.eval()
        self.manager = bmt.optim.OptimManager()
        self.manager.add_optimizer(torch.optim.SGD(self.block.parameters(), lr=0.1))
        self.step = bmt.cuda_graph(self.run, max_graphs=max_graphs)

    def run(self, x, power=2, inside=lambda small: None):
        loss = self.block(x["x"]).pow(power).sum()
        self.manager.backward(loss)
        inside(self)
        return loss

    def clip(self, norm=float("inf")):
        """Also reduces gradients that are kept back."""
        self.manager.clip_grad_norm(self.block.parameters(), norm)


def x(count=2):
    return {"x": torch.linspace(-1, 1, 3 * count).view(count, 3) + bmt.rank()}


def clip(small):
    small.clip(1.0)


def read(small):
    x()["x"].sum().item()


def read_on_one(small):
    if bmt.rank() == 1:
        read(small)


def read_gradient(small):
    grad_of(next(small.block.parameters())).norm()


def offload(small):
    """Inputs wait on the host from the next call on."""
    small.block.use_checkpoint = Level.OFFLOADED


@on_ranks(2)
def test_what_cannot_be_captured_runs_as_it_is():
    """One warning with the reason, and the gradients of every call, that of the failed capture too.
    What only one rank cannot capture is captured on none. So it is with what ranks do together,
    writes that a gather would have to see, and parameters whose gradients could not be shown.
    """
    recorded = graphs.use()
    for inside, reason in (
        (clip, "clip_grad_norm"),
        (read, "not permitted"),
        (read_gradient, "gradients are read inside"),
        (offload, "Level.OFFLOADED"),
        (read_on_one, ("another rank", "not permitted")[bmt.rank()]),
    ):
        small, plain = Small(), Small()
        messages = []
        for _ in range(5):
            losses = [plain.run(x(), inside=inside)]
            messages += graph_programs.warned(lambda: losses.append(small.step(x(), inside=inside)))  # noqa: B023
            assert torch.equal(*losses)
        assert len(messages) == 1 and reason in messages[0], messages
        for each in (small, plain):
            each.clip()
        for mine, theirs in zip(small.block.parameters(), plain.block.parameters(), strict=True):
            assert torch.equal(grad_of(mine), grad_of(theirs)), f"{inside.__name__}: gradients"
    graph_programs.refuse_together()
    block, stranger = bmt.Block(nn.Linear(3, 3)), nn.Parameter(torch.ones(3))

    @bmt.cuda_graph
    def step(x):
        loss = (block(x) * stranger).sum()
        loss.backward()
        return loss

    messages = [text for _ in range(4) for text in graph_programs.warned(lambda: step(x()["x"]))]
    assert len(messages) == 1 and "neither sharded nor in an optimizer" in messages[0], messages
    assert torch.allclose(grad_of(stranger), 4 * block(x()["x"]).detach().sum(0))
    givens = [
        (torch.ones(2, requires_grad=True), "requires grad"),
        (torch.ones(2, device="meta"), "is on meta, not on cpu"),
        ({1}, "cannot be compared"),
    ]
    for given, words in givens:
        look = bmt.cuda_graph(lambda given: torch.ones(2))
        messages = [t for _ in range(2) for t in graph_programs.warned(lambda: look(given))]  # noqa: B023
        assert len(messages) == 1 and words in messages[0], messages
    assert recorded.num_replays == 0


@on_ranks(2)
def test_calls_of_several_kinds():
    """Constants, shapes, which may differ between ranks, and training mode have graphs of their
    own, up to a number; ranks rehearse, capture and replay together all the same. The manager looks
    at the loss of every replay, and skips the step where it is NaN.
    """
    recorded = graphs.use()
    small, plain = Small(max_graphs=5), Small()
    for step in range(18):
        power, count = 2 + step % 2 * 2, 2 + (step // 2 + bmt.rank()) % 2 * (step > 5)
        got, want = small.step(x(count), power=power), plain.run(x(count), power=power)
        assert torch.equal(got, want), step
        for each in (small, plain):
            each.manager.zero_grad()
    assert (recorded.num_captures, recorded.num_replays) == (4, 6)
    for factor, taken in ((float("nan"), False), (1.0, True)):
        before = [param.detach() + 0 for param in small.block.parameters()]
        small.manager.zero_grad()
        small.step({"x": x()["x"] * factor}, power=2)
        small.manager.step()
        assert small.manager.skipped_steps == 1
        for param, value in zip(small.block.parameters(), before, strict=True):
            assert torch.equal(param.detach() + 0, value) != taken
    assert recorded.num_replays == 8
    small.block.train()
    torch.manual_seed(1)
    assert len({small.step(x()).item() for _ in range(2)}) == 2, "dropout draws"
    small.manager.zero_grad()
    assert recorded.num_captures == 4, "training mode is another kind"
    messages = [
        text
        for count in range(3, 7)
        for text in graph_programs.warned(lambda: small.step(x(count)))  # noqa: B023
    ]
    assert len(messages) == 1 and "more than 5" in messages[0], messages
    cuda_graph: Any = bmt.cuda_graph
    for wrong in (0, "2"):
        with pytest.raises(ValueError, match="max_graphs"):
            cuda_graph(max_graphs=wrong)
    assert cuda_graph(max_graphs=2)(len)("abc") == 3
    with pytest.raises(ValueError, match="expected a function"):
        cuda_graph(3)


@on_ranks(1)
def test_on_the_cpu_the_function_is_called():
    """Without a recording in the place of graphs."""
    Small().step(x()).item()


@on_ranks(2)
def test_known_parameters_need_no_agreement():
    """Blocks and managers name theirs at every call, of which a capture may be made."""
    param, engine = nn.Parameter(torch.ones(3)), world.current().service(Engine)
    engine.replicate([param])

    def refuse(what):
        raise AssertionError(what)

    with engine.transport.ledger.sealed(refuse):
        engine.replicate([param])
        with pytest.raises(AssertionError, match="agreement"):
            engine.replicate([nn.Parameter(torch.ones(2))])
