"""Ranks that do different things: right where a block takes no part on some of them, else refused
on all in time.
"""

import copy
import functools
import gc
import math
import warnings
from typing import Any

import pytest
import torch
from tests.ranks import models
from tests.ranks.runner import on_ranks, run_ranks
from tests.tensors import grad_of
from tests.waiting import wait_for

import bmtrain
from bmtrain.distributed.agreement import are_near, largest, look
from bmtrain.distributed.collectives import all_reduce, gather_objects
from bmtrain.distributed.ledger import Ledger
from bmtrain.errors import ParameterError, RanksDivergedError, StaleParameterError
from bmtrain.runtime import world

SIZE = 16
rank = bmtrain.rank


class Layer(torch.nn.Module):
    """A residual layer."""

    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(SIZE, SIZE), torch.nn.Linear(SIZE, SIZE)

    def forward(self, x):
        return x + self.b(torch.tanh(self.a(x)))


class Skipping(Layer):
    """Gives back what it got where that is positive."""

    def forward(self, x):
        return x if x.sum() > 0 else super().forward(x)


class SkippingInDict(Layer):
    """The same, with several outputs in containers."""

    def forward(self, x):
        y = super().forward(x)
        return {"out": x if x.sum() > 0 else y, "rest": [x * 2, 3]}


class Either(Layer):
    """Uses one half of its parameters or the other."""

    def forward(self, x):
        return self.a(x) if x.sum() > 0 else self.b(x)


def layers(count, kind=Layer):
    """The same on every rank and in every call."""
    torch.manual_seed(1)
    return torch.nn.Sequential(*[kind() for _ in range(count)])


def blocks(model, **options):
    """Each layer as a block."""
    return torch.nn.Sequential(*[bmtrain.Block(layer, **options) for layer in model])


def rows(seed=3):
    """Positive on ranks of odd number, negative on the others."""
    x = torch.randn(4, SIZE, generator=torch.Generator().manual_seed(seed))
    return x - x.mean() + (0.1 if seed % 2 else -0.1)


def through(model, x):
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


@on_ranks(2)
def test_a_block_unused_on_some_ranks_trains_as_in_one_process():
    """Gradients are summed over the ranks, with zeros from those that did not use it. Two passes
    each, accumulated.
    """
    options: list[dict[str, Any]] = [
        {"zero_level": 2},
        {"use_checkpoint": False},
        {"use_checkpoint": "auto"},
    ]
    for index, kind in enumerate((Skipping, SkippingInDict, Either)):
        for number, each in enumerate(options):
            plain, model = layers(3, kind), blocks(layers(3, kind), **each)
            needs_grad = (index + number) % 2 == 0
            for _ in range(2):
                inputs = [rows(n).requires_grad_(needs_grad) for n in (0, 1)]
                losses = [through(plain, x) for x in inputs]
                torch.stack([loss for loss in losses if loss.requires_grad]).sum().backward()
                through(model, rows(rank()).requires_grad_(needs_grad)).backward()
            models.assert_same_gradients(model, plain, f"{kind}, {each}, {needs_grad}")


@on_ranks(1)
def test_a_block_on_one_rank_copies_nothing():
    """It returns the very tensor that it got."""
    x = rows(1)
    assert blocks(layers(1, Skipping))(x) is x


# Programs that part
# --------------------------------------------------------------------------------------------------


def loss_of(model):
    return model(rows()).sum()


def backward(model):
    """Returns the model."""
    loss_of(model).backward()
    return model


def sgd(model, rate=0.1):
    torch.optim.SGD(model.parameters(), lr=rate).step()


def adam(model, rate=0.1):
    return bmtrain.optim.AdamOptimizer(model.parameters(), lr=rate)


def managed(model, spoiled=1.0, reduce=True, **options):
    """A manager with an Adam, after a backward pass."""
    manager = bmtrain.optim.OptimManager(**options)
    manager.add_optimizer(adam(model))
    manager.backward(loss_of(model) * spoiled, reduce_gradients=reduce)
    return manager


def one_more_forward(model):
    with torch.no_grad():
        for _ in range(2 - rank()):
            model(rows())
    bmtrain.synchronize()


def another_order_of_backward(model):
    for loss in [loss_of(block) for block in model][:: 1 if rank() else -1]:
        loss.backward()


def output_unused(model):
    """Rank 0 leaves the output of a block out of its loss."""
    torch.stack([loss_of(block) for block in model][rank() == 0 :]).sum().backward()


def on_rank_0(do):
    if rank() == 0:
        do()


def no_backward(model):
    loss = loss_of(model)
    if rank():
        loss.backward()
    model(rows())


def cleared_on_one_rank(model):
    """Rank 0 counts its micro-batches otherwise."""
    backward(model)
    on_rank_0(model.zero_grad)
    backward(model)


def held_back_and_cleared_on_one_rank(model):
    manager = managed(model, reduce=False)
    on_rank_0(manager.zero_grad)
    manager.backward(loss_of(model))


def frozen_on_one_rank(model):
    on_rank_0(lambda: next(model.parameters()).requires_grad_(False))
    sgd(backward(model))


def a_gradient_less(model):
    backward(model)
    on_rank_0(lambda: setattr(next(model.parameters()), "grad", None))
    adam(model).step()


def another_limit_of_skips(model):
    """One rank would end, and the others wait for it."""
    manager = managed(model, math.nan, max_skipped_steps=1 + rank())
    manager.step()
    manager.backward(loss_of(model) * math.nan)
    manager.step()


def gathers_a_result(model):
    """Both ranks exchange objects at that place, one of them for something else."""
    _ = bmtrain.Block(Layer()) if rank() else bmtrain.gather_result(torch.ones(2))


def axis():
    return world.current().mesh.world


def sizes_in_another_order(_):
    """Gloo would end the process that gets more than it expects."""
    small, large = (bmtrain.Block(torch.nn.Linear(SIZE, n)) for n in (SIZE, 64 * SIZE))
    for block in (small, large) if rank() else (large, small):
        block(rows())


def skips_a_block(model):
    """Rank 0 computes, passes backward and steps without the last."""
    loss_of(model[: 1 + (rank() > 0)]).backward()
    sgd(model)


PROGRAMS = {
    "another block": lambda model: model[rank()](rows()),
    "sizes in another order": sizes_in_another_order,
    "skips a block": skips_a_block,
    "a sum and a gather": lambda model: (
        bmtrain.sum_loss(torch.ones(())) if rank() else model(rows())
    ),
    "sums of other sizes": lambda _: all_reduce(torch.ones(2 + 2000 * rank()), "sum", axis()),
    "one more forward": one_more_forward,
    "another order of backward": another_order_of_backward,
    "output unused": output_unused,
    "no backward": no_backward,
    "step on one rank": lambda model: on_rank_0(functools.partial(sgd, backward(model))),
    "another rate": lambda model: sgd(backward(model), 0.1 / (1 + rank())),
    "a gradient less": a_gradient_less,
    "another bound": lambda model: managed(model).clip_grad_norm(model.parameters(), 1 + rank()),
    "another norm": lambda model: bmtrain.optim.clip_grad_norm(
        backward(model).parameters(), 0.1, norm_type=1 + rank()
    ),
    "another loss scale": lambda model: managed(model, loss_scale=2.0 ** (4 + rank())).step(),
    "another limit of skips": another_limit_of_skips,
    "another scale of a step": lambda model: adam(backward(model)).step(scale=1.0 + rank()),
    "another rate in a tensor": lambda model: adam(
        backward(model), torch.tensor(0.1 * (1 + rank()))
    ).step(),
    "cleared on one rank": cleared_on_one_rank,
    "held back and cleared on one rank": held_back_and_cleared_on_one_rank,
    "checkpoints on one rank": lambda model: on_rank_0(lambda: bmtrain.CheckpointManager("none")),
    "checkpoints in other folders": lambda model: bmtrain.CheckpointManager(f"at-12:0{rank()}"),
    "frozen on one rank": frozen_on_one_rank,
    "state on one rank": lambda model: on_rank_0(model.state_dict),
    "load on one rank": lambda model: on_rank_0(
        functools.partial(model.load_state_dict, model.state_dict())
    ),
    "block on one rank": lambda model: on_rank_0(lambda: bmtrain.Block(Layer())),
    "gathers a result": gathers_a_result,
    "objects of another place": lambda model: gather_objects(1, axis(), f"rank {rank()}"),
    "figures of another place": lambda model: largest([1.0], axis(), f"rank {rank()}"),
}


def told(do):
    """What the error says, of which nothing stays alive."""
    try:
        do()
    except RanksDivergedError as error:
        return str(error)
    raise AssertionError("not refused")


def refused(name):
    """The error, which comes again, word for word, whatever is tried: nothing goes on or changes."""
    model = blocks(layers(2))
    shards = [storage.shard for block in model for storage in block.storages]
    before = [shard.clone() for shard in shards]
    for param in model.parameters():
        param.grad = torch.ones(param.shape)
    # Afterwards what the others do, where one has done more.
    message = told(lambda: [PROGRAMS[name](model), model(rows())])
    again = [
        lambda: model(rows()),
        lambda: sgd(model),
        bmtrain.synchronize,
        lambda: bmtrain.sum_loss(torch.ones(())),
    ]
    assert [told(attempt) for attempt in again] == [message] * len(again)
    torch.testing.assert_close(shards, before, rtol=0, atol=0)
    return message


# What a broken-off backward pass leaves behind goes with its process.
FRESH = {"no backward": pytest.param("no backward", marks=pytest.mark.fresh)}


@pytest.mark.parametrize("name", [FRESH.get(name, name) for name in PROGRAMS])
def test_ranks_that_part_are_refused_on_all(name):
    """All ranks get the same message, which says what each did."""
    messages = run_ranks(refused, 3 if name == "output unused" else 2, name)
    assert len(set(messages)) == 1
    assert "of this run diverged" in messages[0]
    assert "rank 0 did" in messages[0] or "ranks 0" in messages[0]
    assert "rank 1 did" in messages[0] or "ranks 1, 2 did" in messages[0]


class Early(Layer):
    """Gathers nothing where its input is positive."""

    def forward(self, x):
        return x if float(x.sum()) > 0 else super().forward(x)


# Parameters outside of blocks are gathered where they are read.
OUTSIDE = {
    "another module": lambda model: model[rank()](-rows().abs()),
    "norms": lambda model: [*model.parameters()][rank()].norm(),
    "sums": lambda model: [*model.parameters()][rank()].sum(),
    "nothing on one rank": lambda model: [
        model(rows().abs() * (1 if rank() else -1)) for _ in range(2)
    ],
}


def refused_outside_of_blocks(name):
    model = bmtrain.BMTrainModelWrapper(layers(2, Early))
    return told(lambda: OUTSIDE[name](model))


@pytest.mark.parametrize("name", OUTSIDE)
def test_ranks_that_part_outside_of_blocks(name):
    messages = run_ranks(refused_outside_of_blocks, 2, name)
    assert len(set(messages)) == 1 and "of this run diverged" in messages[0]


def leaves_early(heard):
    """The last rank leaves, or sleeps until the others have heard that it does not come."""
    model = blocks(layers(2))
    backward(model)
    if rank() == bmtrain.world_size() - 1:
        if heard is not None:
            wait_for(lambda: len(list(heard.iterdir())) == 2, "the other ranks")
        return "left"
    message = told(lambda: backward(model))
    if heard is not None:
        (heard / str(rank())).touch()
    return message


@pytest.mark.parametrize("sleeps", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_rank_that_does_not_come_is_named(sleeps, tmp_path):
    """The others hear of it when it has gone, at the latest after the time limit of collectives."""
    first, second, last = run_ranks(
        leaves_early, 3, tmp_path if sleeps else None, init={"timeout": 20.0 if sleeps else 60.0}
    )
    assert last == "left"
    assert "rank 2 did not reach" in first and "rank 2 did not reach" in second


def parts_where_the_host_does_not_wait():
    """As on a GPU: ranks compare at the end of a backward pass at the latest."""
    model = blocks(layers(2))
    world.current().service(Ledger).is_immediate = False
    message = told(lambda: backward(model[rank()]))
    assert [told(lambda block=block: block(rows())) for block in model] == [message] * 2
    return message


@pytest.mark.fresh
def test_ranks_that_part_are_found_where_the_host_does_not_wait():
    """Before an optimizer changes anything."""
    messages = run_ranks(parts_where_the_host_does_not_wait, 2)
    assert len(set(messages)) == 1
    assert "rank 0 did number 5: gather of storage 0" in messages[0]
    assert "rank 1 did number 5: gather of storage 1" in messages[0]


@on_ranks(3)
def test_models_and_states_that_differ_are_refused():
    """On all ranks, before anything is changed; the run goes on. Refused one after the other; an
    equal one trains afterwards.
    """
    own = rank()
    frozen = layers(1)
    frozen.requires_grad_(own == 0)
    torch.manual_seed(own)
    other_seed = torch.nn.Sequential(Layer())
    first, second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    for model in (
        other_seed,
        torch.nn.Linear(4, 4 + own),
        layers(1 + own),
        torch.nn.ModuleDict({"a": first, "b": second} if own else {"b": second, "a": first}),
        layers(1).to(torch.float64 if own else torch.float32),
        frozen,
    ):
        before = [param.clone() for param in model.parameters()]
        with pytest.raises(RanksDivergedError, match="The first difference is number"):
            bmtrain.BMTrainModelWrapper(model)
        torch.testing.assert_close(list(model.parameters()), before, rtol=0, atol=0)
    with pytest.raises(RanksDivergedError, match=r"a\.weight: shape \(16, 16\)"):
        bmtrain.Block(other_seed[0])
    model = bmtrain.BMTrainModelWrapper(layers(2))
    state = model.state_dict()
    with pytest.raises(RanksDivergedError, match="load_state_dict"):
        model.load_state_dict({name: value + own for name, value in state.items()})
    with pytest.raises(RanksDivergedError, match="load_state_dict"):
        model.load_state_dict({} if own else state, strict=False)
    model.load_state_dict(state)
    torch.testing.assert_close(model.state_dict(), layers(2).state_dict(), rtol=0, atol=0)


@on_ranks(2)
def test_values_that_differ_between_ranks_are_refused():
    """Each rank would keep its slice of its own values."""
    model = bmtrain.BMTrainModelWrapper(layers(1))
    param = next(model.parameters())
    own = torch.ones(param.shape) * (1 + rank())
    same = torch.ones(param.shape) * 0.5
    one_nan = torch.zeros_like(same)
    one_nan[-1, -1] = math.nan if rank() else 0.0
    writes = [
        lambda: setattr(param, "data", own),
        lambda: setattr(param, "grad", own),
        lambda: param.data[1:].mul_(own[1:]),
        lambda: param.data.copy_(own),
        lambda: param.data.copy_(one_nan),
    ]
    before = models.cloned_state(model)
    for write in writes:
        with pytest.raises(ParameterError, match="differ between ranks"):
            write()
    models.assert_same_dicts(models.cloned_state(model), before, "as it was", 0.0)
    param.data = param.grad = same
    for found in (param.detach(), param.grad):
        torch.testing.assert_close(bmtrain.gather_result(found), same)


@on_ranks(2)
def test_embeddings_shorten_the_rows_that_any_rank_looks_up():
    """As one process does with all ranks' rows. Two look-ups before backward are refused."""
    plain = torch.nn.Embedding(6, 4, max_norm=0.1)
    words = bmtrain.BMTrainModelWrapper(copy.deepcopy(plain))
    ids = torch.tensor([[0, 3], [1, 3]])
    with pytest.raises(StaleParameterError, match="look all rows up at once"):
        torch.stack([words(ids), words(ids + 1)]).sum().backward()
    plain(torch.cat([ids, ids + 1]))
    for _ in range(2):
        for model, own in ((plain, ids), (words, ids[rank() :][:1])):
            model(own).square().sum().backward()
        models.assert_same_gradients(words, plain, "max_norm")
        for model in (plain, words):
            torch.optim.SGD(model.parameters(), lr=3.0).step()
        models.assert_same_state(words, plain, "max_norm")


@on_ranks(2)
def test_when_a_rank_collects_a_dropped_model_changes_nothing():
    """A sharded model is dropped; rank 1's collector has taken it when a plain one is trained."""
    kept = bmtrain.BMTrainModelWrapper(layers(1)) if rank() == 0 else None
    if kept is None:
        bmtrain.BMTrainModelWrapper(layers(1))
        gc.collect()
    plain, found = layers(1), layers(1)
    for model in (plain, found):
        model(rows()).sum().backward()
    steps = torch.optim.SGD(found.parameters(), lr=0.1)
    steps.step()
    with torch.no_grad():
        for param in plain.parameters():
            param.sub_(grad_of(param), alpha=0.1)
    models.assert_same_state(found, plain, "trained", 1e-7)
    assert largest([float(rank())], world.current().mesh.world, "ranks") == [1.0]
    del kept


@on_ranks(2)
def test_what_takes_over_parameters_is_refused_when_tried():
    """Refused when tried; the model trains on as if nothing had been, also by torch.compile."""
    # of torch, about itself, when its compiler is imported
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    plain = layers(2)
    for model in (blocks(layers(2)), bmtrain.BMTrainModelWrapper(layers(2))):
        for take in (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel):
            with pytest.raises(ParameterError, match="cannot hold a sharded model"):
                take(model)
        models.check_pass(model, plain, rows(), "goes on")
        compiled, expected = (torch.compile(each, backend="eager") for each in (model, plain))
        for number in range(2):
            models.check_pass(compiled, expected, rows(), f"compiled, pass {number}")
    model.compile()
    models.check_pass(model, plain, rows(), "compiled in place")
    torch.nn.parallel.DistributedDataParallel(layers(1))  # what is not sharded is nobody's business


def test_rounding_is_relative():
    x = torch.arange(1.0, 9.0)
    for scale in (1e-6, 1e6):
        is_near = [
            are_near(look(x * scale), look(x * scale * y), x.dtype) for y in (1 + 1e-6, 1.01)
        ]
        assert is_near == [True, False]
