"""Ordinary parameters beside sharded ones: trained as in one process, or refused before a step
changes them; and nothing of the program's is kept alive.
"""

import gc
import weakref
from typing import Any

import pytest
import torch
from tests.ranks import models
from tests.ranks.pairs import Net, Pair, rows, sharded
from tests.ranks.runner import on_ranks
from tests.tensors import grad_of
from torch import nn

import bmtrain as bmt
from bmtrain.errors import ConfigurationError, ParameterError, RanksDivergedError
from bmtrain.optim import OptimManager


def mine(step):
    return models.own(rows(step))


@on_ranks(2)
def test_nothing_is_kept_alive():
    """Neither gradients beyond `zero_grad`, nor the model beyond its optimizers."""
    pair = Pair(scale=8.0)
    params = list(pair.model.parameters())
    for step in range(3):
        pair.zero_grad()
        pair.backward(step)
        params[0].grad = grad_of(params[0]).clone()
        kept = [weakref.ref(grad_of(param)) for param in (params[0], *params[-2:])]
        kept += [weakref.ref(grad_of(param).untyped_storage()) for param in params[-2:]]
        pair.clip()
        pair.step()
        pair.zero_grad()
        assert not any(reference() is not None for reference in kept), "gradients are kept"
    alive = [weakref.ref(x) for x in (pair.model, *params)]
    del pair, params
    gc.collect()
    assert not any(reference() is not None for reference in alive)


@on_ranks(3)
def test_beside_sharded_ones():
    """Summed by a manager, else refused."""
    pair = Pair("sgd", api="old")  # in no manager yet
    pair.model(rows(0)).backward()
    with pytest.raises(ParameterError, match="OptimManager"):
        pair.optimizer.step()
    with pytest.raises(ConfigurationError, match=r"optim_step got SGD .* \(3, 1\) that is not sh"):
        bmt.optim_step(pair.optimizer)
    pair.optimizer.zero_grad()
    pair.manager.add_optimizer(pair.optimizer)
    pair.api = "nnn"
    pair.train(3)
    optimizer: Any
    for optimizer, words in ((pair.optimizer, "has already"), ("adam", "got str")):
        with pytest.raises(ConfigurationError, match=words):
            pair.manager.add_optimizer(optimizer)
    pair.train(range(3, 5))
    hook = pair.model.plain.weight.register_hook(lambda grad: grad * 0.5)
    with pytest.raises(ParameterError, match="has a hook"):
        pair.manager.backward(pair.model(rows(0)))
    hook.remove()
    pair.train(range(5, 7))


def alone(rows_of):
    """In an optimizer of their own, without a manager."""
    net, twin, count = sharded(), Net(), bmt.world_size()
    net.body.requires_grad_(rows_of != "beside")
    pairs = [
        [torch.optim.SGD(part.parameters(), lr=0.01) for part in (one.body, one.plain)]
        for one in (net, twin)
    ]
    for step in range(2):
        net(rows(step) if rows_of == "all" else mine(step)).backward()
        twin(rows(step)).backward()
        if rows_of == "summed":
            for param in net.plain.parameters():
                param.grad = bmt.sum_loss(grad_of(param))
        # raw gradients of sharded parameters are sums over ranks
        for part, factor in ((twin.body, count * (rows_of == "all") or 1), (twin.plain, 1)):
            for param in part.parameters():
                grad_of(param).mul_(factor)
        for param in twin.plain.parameters() if rows_of == "summed" else ():
            grad_of(param).div_(count)
        for optimizers in pairs:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        models.assert_same_state(net, twin, rows_of)


@on_ranks(2)
def test_in_an_optimizer_of_their_own():
    """Trained where their gradients are alike on all ranks, refused where not."""
    for rows_of in ("all", "summed"):
        alone(rows_of)
    for rows_of in ("rank", "beside"):
        with pytest.raises(ParameterError, match="gradient differs between ranks"):
            alone(rows_of)


def written():
    """After some steps each rank writes something else: the next one finds it."""
    pair = Pair("sgd").train(3)
    weight = pair.model.plain.weight
    with torch.no_grad():
        weight.add_(bmt.rank())
    before = models.cloned_state(pair.model)
    with pytest.raises(ParameterError, match="values differ between ranks"):
        pair.manager.step()
    models.assert_same_dicts(models.cloned_state(pair.model), before, "refused", 0.0)
    with torch.no_grad():
        weight.copy_(pair.twin.plain.weight)
    pair.train(range(4, 6))


def nothing_at_first(what):
    """An ordinary layer in front, in an optimizer of its own: its gradients begin with zeros, for
    two steps of three if "late", or with rows that are the same on all ranks, on which its settings
    or values then differ.
    """
    body, first = sharded().body, nn.Linear(7, 7)
    with torch.no_grad():
        list(body.parameters())[-2].mul_(what != "zeros")
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (body, first)]
    for step in range(3 if what == "late" else 5):
        is_same = what in ("settings", "values") or (what == "rows" and step < 2)
        x = rows(0) if is_same else mine(0)
        for optimizer in optimizers:
            optimizer.zero_grad()
        h = first(x[:, :7]) * (what != "late" or step == 2)
        (body(h) - 1).square().mean().backward()
        if what == "settings" and step == 2:
            optimizers[1].param_groups[0]["lr"] = 0.1 / (1 + bmt.rank())
        if what == "values" and step == 3:
            with torch.no_grad():
                first.weight.add_(bmt.rank())
        for optimizer in optimizers[::-1]:
            optimizer.step()


@on_ranks(2)
def test_what_the_first_steps_do_not_tell():
    """Values, gradients and settings are compared again."""
    written()
    differs = [(what, "gradient differs") for what in ("zeros", "late", "rows")]
    for what, words in (*differs, ("values", "values differ")):
        with pytest.raises(ParameterError, match=f"{words} between ranks"):
            nothing_at_first(what)
    with pytest.raises(RanksDivergedError, match="a step of SGD"):
        nothing_at_first("settings")


@on_ranks(2)
def test_cleared_on_some_ranks_is_refused():
    """The sharded ones are cleared on all ranks, the ordinary ones on rank 0."""
    pair = Pair("adam")
    for number in range(2):
        pair.backward(number)
    pair.check("accumulated")
    pair.model.body.zero_grad()
    if bmt.rank() == 0:
        pair.model.plain.zero_grad()
    with pytest.raises(RanksDivergedError, match="clear gradients on all ranks"):
        pair.manager.backward(pair.model(rows(2)))
    pair.train(2)


@on_ranks(3)
def test_parameters_that_join_late():
    """They start from rank 0's values, and their gradients are averaged. A layer of other values
    on each rank, one of its parameters frozen at first; another that joins the optimizer, and a
    third that takes its place.
    """
    found = []
    for is_plain in (False, True):
        net = Net() if is_plain else sharded()
        heads = []
        for number in range(3):
            torch.manual_seed(number if is_plain or number else bmt.rank())
            heads.append(nn.Linear(13, 3))
        heads[0].bias.requires_grad_(False)
        params = [{"params": list(part.parameters())} for part in (net, heads[0])]
        optimizer = torch.optim.SGD(params, lr=0.02)
        manager = OptimManager()
        for one in [] if is_plain else [optimizer]:
            manager.add_optimizer(one)
        for step in range(7):
            if step == 1:
                heads[0].bias.requires_grad_(True)
            if step == 2:
                optimizer.add_param_group({"params": list(heads[1].parameters())})
            if step == 4:
                optimizer.param_groups[2]["params"][:] = list(heads[2].parameters())
            x = rows(step) if is_plain else mine(step)
            used = heads[:1] if step < 2 else [heads[0], heads[1 + (step >= 4)]]
            loss = net(x) + sum(head(x).square().sum() for head in used)
            optimizer.zero_grad()
            loss = loss / len(x)
            loss.backward() if is_plain else manager.backward(loss)
            optimizer.step() if is_plain else manager.step()
        state = models.cloned_state(net)
        for number, head in enumerate(heads):
            state |= {f"{number} {name}": x.clone() for name, x in head.state_dict().items()}
        found.append(state)
    models.assert_same_dicts(found[0], found[1], "joined")
