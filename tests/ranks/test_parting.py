"""Ranks that do different things: right where a block takes no part on some of them, else refused
on all in time.
"""

from __future__ import annotations

import math
import pathlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.ranks.runner import run_ranks
from tests.waiting import wait_for

import bmtrain
from bmtrain.distributed.agreement import largest
from bmtrain.distributed.ledger import Ledger
from bmtrain.errors import ParameterError, RanksPartedError
from bmtrain.runtime import world

SIZE = 16


class Layer(torch.nn.Module):
    """A residual layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(SIZE, SIZE), torch.nn.Linear(SIZE, SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(torch.tanh(self.a(x)))


class Skipping(Layer):
    """Gives back what it got where that is positive."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else super().forward(x)


class SkippingInDict(Layer):
    """The same, with several outputs in containers."""

    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        return {"out": x if x.sum() > 0 else y, "rest": [x * 2, 3]}


class Either(Layer):
    """Uses one half of its parameters or the other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) if x.sum() > 0 else self.b(x)


def layers(count: int, kind: type[torch.nn.Module] = Layer) -> torch.nn.Sequential:
    """The same on every rank and in every call."""
    torch.manual_seed(1)
    return torch.nn.Sequential(*[kind() for _ in range(count)])


def blocks(model: torch.nn.Sequential, **options: Any) -> torch.nn.Sequential:
    """Each layer as a block."""
    return torch.nn.Sequential(*[bmtrain.Block(layer, **options) for layer in model])


def rows(seed: int = 3) -> torch.Tensor:
    """Positive on ranks of odd number, negative on the others."""
    x = torch.randn(4, SIZE, generator=torch.Generator().manual_seed(seed))
    return x - x.mean() + (0.1 if seed % 2 else -0.1)


def through(model: torch.nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    """A loss; what comes out of a block is written in place afterwards."""
    x = x * 1
    for layer in model:
        out = layer(x)
        if isinstance(out, dict):
            x = out["out"] + out["rest"][0] / 2
            x = x - x.mean().detach() + (0.1 if out["out"].sum() > 0 else -0.1)
        else:
            x = out
            x.mul_(0.9)
    return x.square().sum()


def assert_gradients(model: torch.nn.Module, plain: torch.nn.Module, what: object) -> None:
    """Gradients are those of one process."""

    def said(message: str) -> str:
        return f"{what}: {message}"

    theirs = dict(plain.named_parameters())
    for name, param in model.named_parameters():
        storage, index = param.storage_of, param.index_in_storage  # type: ignore[attr-defined]
        expected = theirs[name].grad
        if expected is None:
            if param.grad is not None:
                raise AssertionError(f"{what}: {name} has a gradient")
            continue
        own = storage.slice_of(index, expected)
        torch.testing.assert_close(
            torch.as_tensor(storage.gradient.flat)[slice_of(storage, index)], own, msg=said
        )


def slice_of(storage: Any, index: int) -> slice:
    """Where this rank's part of a parameter lies in its shard."""
    piece = storage.piece(index)
    return slice(piece.begin, piece.end)


def train_with_blocks_unused_on_some_ranks() -> None:
    """Two passes each, accumulated."""
    rank, size = bmtrain.rank(), bmtrain.world_size()
    for kind in (Skipping, SkippingInDict, Either):
        for options in (
            {"zero_level": 3},
            {"zero_level": 2},
            {"use_checkpoint": False},
            {"use_checkpoint": "auto"},
        ):
            for needs_grad in (True, False):
                plain, model = layers(3, kind), blocks(layers(3, kind), **options)
                for _ in range(2):
                    losses = [
                        through(plain, rows(seed).requires_grad_(needs_grad))
                        for seed in range(size)
                    ]
                    torch.stack([loss for loss in losses if loss.requires_grad]).sum().backward()
                    through(model, rows(rank).requires_grad_(needs_grad)).backward()
                assert_gradients(model, plain, (kind, options, needs_grad))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_block_unused_on_some_ranks_trains_as_in_one_process(ranks: int) -> None:
    """Gradients are summed over the ranks, with zeros from those that did not use it."""
    run_ranks(train_with_blocks_unused_on_some_ranks if ranks > 1 else _unused_alone, ranks)


def _unused_alone() -> None:
    """On one rank nothing is copied: the block returns the very tensor that it got."""
    x = rows(1)
    if blocks(layers(1, Skipping))(x) is not x:
        raise AssertionError("a copy was returned")


def another_block(model: torch.nn.Sequential) -> None:
    """Blocks of equal size."""
    with torch.no_grad():
        model[bmtrain.rank()](rows())


def one_more_forward(model: torch.nn.Sequential) -> None:
    """Two passes on rank 0."""
    with torch.no_grad():
        for _ in range(2 - bmtrain.rank()):
            model(rows())
    bmtrain.synchronize()


def another_order_of_backward(model: torch.nn.Sequential) -> None:
    """Each rank begins at another block."""
    losses = [model[0](rows()).sum(), model[1](rows()).sum()]
    for loss in losses if bmtrain.rank() else losses[::-1]:
        loss.backward()


def output_unused(model: torch.nn.Sequential) -> None:
    """Rank 0 leaves the output of a block out of its loss."""
    outs = [model[0](rows()).sum(), model[1](rows()).sum()]
    sum(outs[bmtrain.rank() == 0 :]).backward()


def no_backward(model: torch.nn.Sequential) -> None:
    """Rank 0 goes on with the next pass."""
    loss = model(rows()).sum()
    if bmtrain.rank():
        loss.backward()
    model(rows())


def step_on_one_rank(model: torch.nn.Sequential) -> None:
    """Rank 0 alone changes parameters."""
    model(rows()).sum().backward()
    if bmtrain.rank() == 0:
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    model(rows())


def another_rate(model: torch.nn.Sequential) -> None:
    """As a scheduler sets it that looks at each rank's own loss."""
    model(rows()).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1 / (1 + bmtrain.rank())).step()


def a_gradient_less(model: torch.nn.Sequential) -> None:
    """Rank 0 drops the gradient of a parameter."""
    model(rows()).sum().backward()
    if bmtrain.rank() == 0:
        next(model.parameters()).grad = None
    bmtrain.optim.AdamOptimizer(model.parameters()).step()


def managed(model: torch.nn.Module, **options: Any) -> tuple[Any, Any]:
    """A manager with an Adam, which it drives."""
    optimizer = bmtrain.optim.AdamOptimizer(model.parameters())
    manager = bmtrain.optim.OptimManager(**options)
    manager.add_optimizer(optimizer)
    return manager, optimizer


def another_bound(model: torch.nn.Sequential) -> None:
    """As of clipping that follows each rank's own loss."""
    manager, optimizer = managed(model)
    manager.backward(model(rows()).sum())
    manager.clip_grad_norm(optimizer.param_groups, max_norm=0.1 * (1 + bmtrain.rank()))


def another_norm(model: torch.nn.Sequential) -> None:
    """Orders of norms whose collectives are alike."""
    model(rows()).sum().backward()
    bmtrain.optim.clip_grad_norm(model.parameters(), 0.1, norm_type=1 + bmtrain.rank())


def another_loss_scale(model: torch.nn.Sequential) -> None:
    manager, _ = managed(model, loss_scale=2.0 ** (4 + bmtrain.rank()))
    manager.backward(model(rows()).sum())
    manager.step()


def another_limit_of_skips(model: torch.nn.Sequential) -> None:
    """One rank would end, and the others wait for it."""
    manager, _ = managed(model, max_skipped_steps=1 + bmtrain.rank())
    for _ in range(2):
        manager.backward(model(rows()).sum() * float("nan"))
        manager.step()


def another_scale_of_a_step(model: torch.nn.Sequential) -> None:
    """The scale is an argument of `step`."""
    model(rows()).sum().backward()
    bmtrain.optim.AdamOptimizer(model.parameters()).step(scale=1.0 + bmtrain.rank())


def another_rate_in_a_tensor(model: torch.nn.Sequential) -> None:
    model(rows()).sum().backward()
    rate: Any = torch.tensor(0.1 * (1 + bmtrain.rank()))
    bmtrain.optim.AdamOptimizer(model.parameters(), lr=rate).step()


def cleared_on_one_rank(model: torch.nn.Sequential) -> None:
    """Rank 0 counts its micro-batches otherwise."""
    for _ in range(2):
        if bmtrain.rank() == 0:
            model.zero_grad()
        model(rows()).sum().backward()


def held_back_and_cleared_on_one_rank(model: torch.nn.Sequential) -> None:
    manager, _ = managed(model)
    manager.backward(model(rows()).sum(), reduce_gradients=False)
    if bmtrain.rank() == 0:
        manager.zero_grad()
    manager.backward(model(rows()).sum())


def checkpoints_on_one_rank(model: torch.nn.Sequential) -> None:
    """Rank 0 would wait for the others, which train on."""
    if bmtrain.rank() == 0:
        bmtrain.CheckpointManager("nowhere")
    model(rows())


def checkpoints_in_other_folders(model: torch.nn.Sequential) -> None:
    """Named by the time of day, for example."""
    bmtrain.CheckpointManager(f"at-12:00:0{bmtrain.rank()}")


def frozen_on_one_rank(model: torch.nn.Sequential) -> None:
    """Rank 0 freezes a parameter."""
    if bmtrain.rank() == 0:
        next(model.parameters()).requires_grad_(False)
    model(rows()).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def state_on_one_rank(model: torch.nn.Sequential) -> None:
    """Reading the state is collective."""
    if bmtrain.rank() == 0:
        model.state_dict()
    model(rows())


def load_on_one_rank(model: torch.nn.Sequential) -> None:
    """So is loading it."""
    state = model.state_dict()
    if bmtrain.rank() == 0:
        model.load_state_dict(state)
    model(rows())


def block_on_one_rank(model: torch.nn.Sequential) -> None:
    """And making a block."""
    if bmtrain.rank() == 0:
        bmtrain.Block(Layer())
    model(rows())


def gathers_a_result(model: torch.nn.Sequential) -> None:
    """Both ranks exchange objects at that place, one of them for something else."""
    if bmtrain.rank() == 0:
        bmtrain.gather_result(torch.ones(2))
    else:
        bmtrain.Block(Layer())


def objects_of_another_place(model: torch.nn.Sequential) -> None:
    """Objects are exchanged for two purposes."""
    world = bmtrain.runtime.world.current().mesh.world
    bmtrain.distributed.collectives.gather_objects(1, world, f"rank {bmtrain.rank()}")


def figures_of_another_place(model: torch.nn.Sequential) -> None:
    """The same with numbers, each of which would pass for the other."""
    world = bmtrain.runtime.world.current().mesh.world
    largest([1.0], world, "rows" if bmtrain.rank() else "free memory")


PROGRAMS = (
    gathers_a_result,
    objects_of_another_place,
    figures_of_another_place,
    another_block,
    one_more_forward,
    another_order_of_backward,
    output_unused,
    no_backward,
    step_on_one_rank,
    another_rate,
    a_gradient_less,
    another_bound,
    another_norm,
    another_loss_scale,
    another_limit_of_skips,
    another_scale_of_a_step,
    another_rate_in_a_tensor,
    cleared_on_one_rank,
    held_back_and_cleared_on_one_rank,
    checkpoints_on_one_rank,
    checkpoints_in_other_folders,
    frozen_on_one_rank,
    state_on_one_rank,
    load_on_one_rank,
    block_on_one_rank,
)


def shards(model: Any) -> list[torch.Tensor]:
    """This rank's part of every storage."""
    return [storage.shard for block in model for storage in block.storages]


def refused(program: Callable[[torch.nn.Sequential], None]) -> str:
    """The error; the next pass must be refused too."""
    model = blocks(layers(2))
    before = [shard.clone() for shard in shards(model)]
    try:
        program(model)
    except RanksPartedError as error:
        message = str(error)
    else:
        return "not refused"
    torch.testing.assert_close(shards(model), before, rtol=0, atol=0)
    with pytest.raises(RanksPartedError):
        model(rows())
    return message


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_ranks_that_part_are_refused_on_all(program: Callable[[torch.nn.Sequential], None]) -> None:
    """All ranks get the same message, which says what each did."""
    messages = run_ranks(refused, 3 if program is output_unused else 2, program)
    assert len(set(messages)) == 1
    assert "did different things" in messages[0]
    assert "rank 0 did" in messages[0] or "ranks 0" in messages[0]
    assert "rank 1 did" in messages[0] or "ranks 1, 2 did" in messages[0]


class Early(Layer):
    """Gathers nothing where its input is positive."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if float(x.sum()) > 0 else super().forward(x)


def another_module(model: torch.nn.Module) -> None:
    model[bmtrain.rank()](-rows().abs())  # type: ignore[index]


def norms_of_others(model: torch.nn.Module) -> None:
    list(model.parameters())[bmtrain.rank()].norm()


def sums_of_others(model: torch.nn.Module) -> None:
    list(model.parameters())[bmtrain.rank()].sum()


def nothing_on_one_rank(model: torch.nn.Module) -> None:
    for _ in range(2):
        model(rows().abs() * (1 if bmtrain.rank() else -1))


def refused_outside_of_blocks(program: Callable[[torch.nn.Module], None]) -> str:
    """Parameters are gathered where they are read."""
    model = bmtrain.BMTrainModelWrapper(layers(2, Early))
    with pytest.raises(RanksPartedError) as caught:
        program(model)
    return str(caught.value)


@pytest.mark.parametrize(
    "program", [another_module, norms_of_others, sums_of_others, nothing_on_one_rank]
)
def test_ranks_that_part_outside_of_blocks(program: Callable[[torch.nn.Module], None]) -> None:
    messages = run_ranks(refused_outside_of_blocks, 2, program)
    assert len(set(messages)) == 1 and "did different things" in messages[0]


def leaves_early(heard: pathlib.Path | None) -> str:
    """The last rank leaves, or sleeps until the others have heard that it does not come."""
    model = blocks(layers(2))
    model(rows()).sum().backward()
    if bmtrain.rank() == bmtrain.world_size() - 1:
        if heard is not None:
            wait_for(lambda: len(list(heard.iterdir())) == 2, "the other ranks")
        return "left"
    try:
        model(rows()).sum().backward()
    except RanksPartedError as error:
        if heard is not None:
            (heard / str(bmtrain.rank())).touch()
        return str(error)
    return "not refused"


@pytest.mark.parametrize("sleeps", [False, True], ids=["ends", "sleeps"])
def test_a_rank_that_does_not_come_is_named(sleeps: bool, tmp_path: pathlib.Path) -> None:
    """The others hear of it when it has gone, at the latest after the time limit of collectives."""
    first, second, last = run_ranks(
        leaves_early, 3, tmp_path if sleeps else None, init={"timeout": 20.0 if sleeps else 60.0}
    )
    assert last == "left"
    assert "rank 2 did not come" in first and "rank 2 did not come" in second


def parts_where_the_host_does_not_wait() -> str:
    """As on a GPU: ranks compare at the end of a backward pass at the latest."""
    model = blocks(layers(2))
    world.current().service(Ledger).is_immediate = False
    try:
        model[bmtrain.rank()](rows()).sum().backward()
    except RanksPartedError as error:
        return str(error)
    return "not refused"


def test_ranks_that_part_are_found_where_the_host_does_not_wait() -> None:
    """Before an optimizer changes anything."""
    messages = run_ranks(parts_where_the_host_does_not_wait, 2)
    assert len(set(messages)) == 1
    assert "rank 0 did number 5: gather of storage 0" in messages[0]
    assert "rank 1 did number 5: gather of storage 1" in messages[0]


def bring_different_models() -> None:
    """Refused one after the other; an equal one trains afterwards."""
    rank = bmtrain.rank()
    frozen = layers(1)
    frozen.requires_grad_(rank == 0)
    torch.manual_seed(rank)
    other_seed = torch.nn.Sequential(Layer())
    first, second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    for model in (
        other_seed,
        torch.nn.Linear(4, 4 + rank),
        layers(1 + rank),
        torch.nn.ModuleDict({"a": first, "b": second} if rank else {"b": second, "a": first}),
        layers(1).to(torch.float64 if rank else torch.float32),
        frozen,
    ):
        before = [param.clone() for param in model.parameters()]
        with pytest.raises(RanksPartedError, match="The first difference is number"):
            bmtrain.BMTrainModelWrapper(model)
        torch.testing.assert_close(list(model.parameters()), before, rtol=0, atol=0)
    with pytest.raises(RanksPartedError, match=r"a\.weight: shape \(16, 16\)"):
        bmtrain.Block(other_seed[0])
    model = bmtrain.BMTrainModelWrapper(layers(2))
    state = model.state_dict()
    with pytest.raises(RanksPartedError, match="load_state_dict"):
        model.load_state_dict({name: value + rank for name, value in state.items()})
    with pytest.raises(RanksPartedError, match="load_state_dict"):
        model.load_state_dict({} if rank else state, strict=False)
    model.load_state_dict(state)
    torch.testing.assert_close(model.state_dict(), layers(2).state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("ranks", [2, 3])
def test_models_and_states_that_differ_are_refused(ranks: int) -> None:
    """On all ranks, before anything is changed; the run goes on."""
    run_ranks(bring_different_models, ranks)


def give_other_values() -> None:
    """Each rank would keep its slice of its own values."""
    model = bmtrain.BMTrainModelWrapper(layers(1))
    words = bmtrain.BMTrainModelWrapper(torch.nn.Embedding(6, 4, max_norm=0.1))
    param = next(model.parameters())
    own = torch.ones(param.shape) * (1 + bmtrain.rank())
    same = torch.ones(param.shape) * 0.5

    def data() -> None:
        param.data = own

    def grad() -> None:
        param.grad = own

    def view() -> None:
        param.data[1:].mul_(own[1:])

    def copy() -> None:
        param.data.copy_(own)

    def renormalized() -> None:
        words(torch.tensor([bmtrain.rank()]))

    before = {
        name: value.clone()
        for module in (model, words)
        for name, value in module.state_dict().items()
    }

    def copy_of_nan() -> None:
        zeros = torch.zeros_like(same)
        zeros[-1, -1] = math.nan if bmtrain.rank() else 0.0
        param.data.copy_(zeros)

    for write in (data, grad, view, copy, copy_of_nan, renormalized):
        with pytest.raises(ParameterError, match="differ between ranks"):
            write()
    after = {
        name: value for module in (model, words) for name, value in module.state_dict().items()
    }
    assert all(torch.equal(after[name], value) for name, value in before.items())
    param.data = same
    param.grad = same
    words(torch.tensor([1, 2]))
    torch.testing.assert_close(bmtrain.gather_result(param.detach()), same)


def test_values_that_differ_between_ranks_are_refused() -> None:
    run_ranks(give_other_values, 2)


def give_to_strangers() -> None:
    """Refused when tried; the model trains on as if nothing had been."""
    # of torch, about itself, when its compiler is imported
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    plain = layers(2)
    for model in (blocks(layers(2)), bmtrain.BMTrainModelWrapper(layers(2))):
        for take in (
            torch.nn.parallel.DistributedDataParallel,
            torch.nn.DataParallel,
            torch.compile,
        ):
            with pytest.raises(ParameterError, match="cannot hold a sharded model"):
                take(model)
        plain.zero_grad()
        plain(rows()).sum().backward()
        (model(rows()).sum() / bmtrain.world_size()).backward()
        assert_gradients(model, plain, type(model))
    with pytest.raises(ParameterError, match="not compiled as a whole"):
        model.compile()
    torch.nn.parallel.DistributedDataParallel(layers(1))  # what is not sharded is nobody's business


def test_what_takes_over_parameters_is_refused_when_tried() -> None:
    """DDP, DataParallel, torch.compile of a whole model."""
    run_ranks(give_to_strangers, 2)
