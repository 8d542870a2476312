"""What programs do with parameters and gradients beside training them: as in one process, or
refused on all ranks.
"""

from __future__ import annotations

import collections
import copy
import functools
import io
import warnings
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from tests.ranks.runner import run_ranks
from tests.ranks.test_whole_parameters import (
    SHARDED,
    Tensors,
    batch,
    grads,
    loss_of,
    plain,
    state,
    whole,
)
from torch import distributed as dist
from torch import nn
from torch.nn.utils import prune

import bmtrain as bmt
from bmtrain.errors import ParameterError
from bmtrain.shard.slices import Slices

Idiom = Callable[[nn.Module, bool], Tensors]
IDIOMS: list[Idiom] = []
REFUSED: list[Idiom] = []


def idiom(program: Idiom) -> Idiom:
    """One process and many ranks get the same."""
    IDIOMS.append(program)
    return program


def refused(program: Idiom) -> Idiom:
    """Ranks get a ParameterError."""
    REFUSED.append(program)
    return program


def first(model: nn.Module) -> torch.Tensor:
    """A matrix."""
    return next(p for p in model.parameters() if p.dim() == 2)


def mean_of_squares(x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Compiled by `scripted`."""
    return (x.mean() * p.square() * 2.0).mean() + p.norm() + (x * (p * p).sum()).sum()


@functools.cache
def scripted() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch would have programs compile instead
        return torch.jit.script(mean_of_squares)


# Values
# --------------------------------------------------------------------------------------------------


@idiom
def one_vector(model: nn.Module, is_plain: bool) -> Tensors:
    with torch.no_grad():
        vector = nn.utils.parameters_to_vector(model.parameters())
        nn.utils.vector_to_parameters(vector * 0.5, model.parameters())
    return {**state(model), "vector": vector}


@idiom
def indexed_writes(model: nn.Module, is_plain: bool) -> Tensors:
    p = first(model)
    out = {
        "row": p[0].detach().clone(),
        "turned": p.T.detach().clone(),
        "sums": torch.stack([row.sum() for row in p]).detach(),
    }
    with torch.no_grad():
        p[1] = 0.5
        p[:, 2] += 1
        p.view(-1)[5] = 7
        p.data[3, 4] = 9
        p.T[0, 1] = 3
        p.diagonal().fill_(2.0)
        p[p > 2.5] = 0.0
        p.masked_fill_(torch.eye(*p.shape).bool(), 1.0)
        p.index_fill_(0, torch.tensor([2]), 4.0)
        p.triu_()
    return {**out, **state(model)}


@idiom
def statistics(model: nn.Module, is_plain: bool) -> Tensors:
    loss_of(model, is_plain).backward()
    out: Tensors = {}
    for name, p in model.named_parameters():
        grad = p.grad
        assert grad is not None
        figures = [
            p.abs().max(),
            p.mean(),
            p.min(),
            p.argmax().float(),
            (p > 0).float().mean(),
            p.count_nonzero().float(),
        ]
        out[name] = torch.stack(figures).detach()
        out[f"{name} histogram"] = torch.histc(grad.detach(), 5)
        out[f"{name} largest"] = p.detach().flatten().topk(1).values
    return out


@idiom
def initialisation(model: nn.Module, is_plain: bool) -> Tensors:
    torch.manual_seed(9)
    for p in model.parameters():
        if p.dim() > 1:
            nn.init.orthogonal_(p)
            nn.init.trunc_normal_(p, std=0.02)
            p.data.normal_(0, 0.02)
            nn.init.kaiming_normal_(p)
            p.data.mul_(0.5)
        else:
            p.data.uniform_(-1, 1)
    return {**state(model), "drawn next": torch.randn(2)}


@idiom
def saved_and_loaded(model: nn.Module, is_plain: bool) -> Tensors:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    model.load_state_dict(torch.load(file))
    loss_of(model, is_plain).backward()
    return {**state(model), **grads(model)}


@idiom
def new_parameter(model: nn.Module, is_plain: bool) -> Tensors:
    own = nn.Parameter(first(model).detach().clone())
    loss = own.square().sum()
    (loss if is_plain else loss / bmt.world_size()).backward()
    assert own.grad is not None
    return {"value": own.detach(), "gradient": own.grad}


# Optimizers by hand
# --------------------------------------------------------------------------------------------------


@idiom
def langevin(model: nn.Module, is_plain: bool) -> Tensors:
    torch.manual_seed(5)
    loss_of(model, is_plain).backward()
    with torch.no_grad():
        for p in model.parameters():
            assert p.grad is not None
            p.add_(torch.randn_like(p) * 0.1 - 0.1 * p.grad)
            p.grad.add_(torch.randn(p.shape) * 0.1)
    return {**state(model), **grads(model), "drawn next": torch.randn(3)}


@idiom
def sharpness_aware(model: nn.Module, is_plain: bool) -> Tensors:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(model, is_plain).backward()
        norm = torch.norm(
            torch.stack([p.grad.norm(p=2) for p in model.parameters() if p.grad is not None]), p=2
        )
        with torch.no_grad():
            for p in model.parameters():
                optimizer.state[p]["old"] = p.data.clone()
                p.add_(p.grad * (0.05 / (norm + 1e-12)))
        optimizer.zero_grad()
        loss_of(model, is_plain).backward()
        for p in model.parameters():
            p.data = optimizer.state[p]["old"]
        optimizer.step()
    return state(model)


@idiom
def trust_ratios(model: nn.Module, is_plain: bool) -> Tensors:
    for _ in range(2):
        model.zero_grad()
        loss_of(model, is_plain).backward()
        for p in model.parameters():
            assert p.grad is not None
            weight, grad = p.data.pow(2).sum().sqrt(), p.grad.data.norm()
            ratio = 1.0 if weight == 0 or grad == 0 else float(weight / grad)
            p.data.add_(p.grad.data, alpha=-0.01 * ratio)
    return state(model)


@idiom
def centralised_gradients(model: nn.Module, is_plain: bool) -> Tensors:
    loss_of(model, is_plain).backward()
    for p in model.parameters():
        if p.grad is not None and p.grad.dim() > 1:
            p.grad.add_(-p.grad.mean(dim=1, keepdim=True))
    return grads(model)


@idiom
def gradients_of_tasks(model: nn.Module, is_plain: bool) -> Tensors:
    """Kept from the first pass while the second computes its own: each is projected onto the other
    (Yu et al., 2020).
    """
    loss_of(model, is_plain).backward()
    kept = [p.grad for p in model.parameters()]
    values = [whole(grad) for grad in kept if grad is not None]
    for p in model.parameters():
        p.grad = None
    loss = model(batch()[:2]).abs().mean()
    (loss if is_plain else loss / bmt.world_size()).backward()
    out: Tensors = {}
    for number, (old, p) in enumerate(zip(kept, model.parameters(), strict=True)):
        assert old is not None and p.grad is not None
        torch.testing.assert_close(whole(old), values[number], rtol=0, atol=0)
        dot = (old * p.grad).sum()
        out[f"dot {number}"] = dot.detach()
        p.grad = old - p.grad * (dot / p.grad.norm() ** 2)
    return {**out, **grads(model)}


@idiom
def some_cleared_some_kept(model: nn.Module, is_plain: bool) -> Tensors:
    params = list(model.parameters())
    loss_of(model, is_plain).backward()
    kept, params[0].grad = params[0].grad, None
    assert kept is not None
    before = whole(kept)
    loss_of(model, is_plain).backward()
    return {"kept": whole(kept), "as it was": before, **grads(model)}


@idiom
def assigned_gradients(model: nn.Module, is_plain: bool) -> Tensors:
    loss_of(model, is_plain).backward()
    for number, p in enumerate(model.parameters()):
        assert p.grad is not None
        p.grad = p.grad / 2
        p.grad.data.clamp_(-1e-3, 1e-3)
        if number == 1:
            p.grad = torch.ones(p.shape)
        if number == 2:
            p.grad.data = torch.zeros(p.shape)
        if number == 3:
            p.grad = None
    return grads(model)


@idiom
def averages_by_hand(model: nn.Module, is_plain: bool) -> Tensors:
    average = {name: p.data.clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(model, is_plain).backward()
        optimizer.step()
        for name, p in model.named_parameters():
            average[name] = 0.9 * average[name] + 0.1 * p.data
    backup = {name: p.data for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        p.data = average[name]
    averaged = state(model)
    for name, p in model.named_parameters():
        p.data = backup[name]
    return {**state(model), **{f"average {name}": value for name, value in averaged.items()}}


@idiom
def states_written(model: nn.Module, is_plain: bool) -> Tensors:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loss_of(model, is_plain).backward()
    optimizer.step()
    for p in model.parameters():
        optimizer.state[p]["exp_avg"].mul_(0.5)
        optimizer.state[p]["exp_avg_sq"] = torch.zeros_like(p) + 1e-3
    saved = copy.deepcopy(optimizer.state_dict())
    another = torch.optim.Adam(model.parameters(), lr=0.5)
    another.load_state_dict(saved)
    another.zero_grad()
    loss_of(model, is_plain).backward()
    another.step()
    return state(model)


@idiom
def lists(model: nn.Module, is_plain: bool) -> Tensors:
    loss_of(model, is_plain).backward()
    params: list[torch.Tensor] = list(model.parameters())
    found = [p.grad for p in params if p.grad is not None]
    norms = {
        "norm": torch.stack(torch._foreach_norm(found)).norm(),
        "total": nn.utils.get_total_norm(found),
    }
    with torch.no_grad():
        torch._foreach_mul_(found, 0.5)
        torch._foreach_add_(params, found, alpha=-0.1)
        torch._foreach_lerp_(params, torch._foreach_mul(params, 2.0), 0.1)
    return {**norms, **state(model), **grads(model)}


@idiom
def the_librarys_adam(model: nn.Module, is_plain: bool) -> Tensors:
    kinds = (bmt.optim.AdamOptimizer, bmt.optim.AdamOffloadOptimizer)
    out: Tensors = {}
    for number, kind in enumerate(kinds):
        make = torch.optim.AdamW if is_plain else kind
        optimizer = make(model.parameters(), lr=1e-2, weight_decay=0.1)
        for order in (1.0, 2.0, float("inf")):
            optimizer.zero_grad()
            loss_of(model, is_plain).backward()
            if is_plain:
                norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01, order)
            else:
                norm = bmt.optim.clip_grad_norm(optimizer.param_groups, 0.01, norm_type=order)
            out[f"norm {order} {number}"] = norm.detach()
            optimizer.step()
    return {**out, **state(model)}


# Losses
# --------------------------------------------------------------------------------------------------


@idiom
def losses_of_views(model: nn.Module, is_plain: bool) -> Tensors:
    p, loss = first(model), model(batch()).square().mean()
    loss = (
        loss
        + p[0].square().sum()
        + p.T[1].abs().sum()
        + p.view(-1).std()
        + torch.linalg.svdvals(p).sum()
    )
    loss = loss + torch.cat([q.view(-1) for q in model.parameters()]).norm() * 0.1
    loss = loss + torch.linalg.matrix_norm(p, ord=2) + torch.linalg.norm(p.t() @ p)
    (loss if is_plain else loss / bmt.world_size()).backward()
    return grads(model)


@idiom
def fisher(model: nn.Module, is_plain: bool) -> Tensors:
    loss_of(model, is_plain).backward()
    named = list(model.named_parameters())
    weights = {name: p.grad.detach().clone().pow(2) for name, p in named if p.grad is not None}
    old = {name: p.detach().clone() for name, p in named}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(batch()).square().mean() + sum(
            (weights[name] * (p - old[name]) ** 2).sum() for name, p in named
        )
        (loss if is_plain else loss / bmt.world_size()).backward()
        optimizer.step()
    return state(model)


@idiom
def pruned(model: nn.Module, is_plain: bool) -> Tensors:
    for module in list(model.modules()):
        if isinstance(module, nn.Linear):
            prune.l1_unstructured(module, "weight", amount=0.3)
    loss_of(model, is_plain).backward()
    return grads(model)


@idiom
def torchscript(model: nn.Module, is_plain: bool) -> Tensors:
    for p in model.parameters():
        loss = scripted()(batch()[:, :1], p) + model(batch()).square().mean()
        (loss if is_plain else loss / bmt.world_size()).backward()
    return grads(model)


@idiom
def numpy(model: nn.Module, is_plain: bool) -> Tensors:
    array = first(model).detach().cpu().numpy()
    if not is_plain and bmt.device().type == "cpu":  # from a GPU it is a copy in one process too
        with pytest.raises(ValueError, match="read-only"):
            array *= 2
    return {"copy": torch.from_numpy(array.copy()), "sum": torch.tensor(array.sum())}


@idiom
def two_passes(model: nn.Module, is_plain: bool) -> Tensors:
    out = model(batch())
    share = 1 if is_plain else bmt.world_size()
    (out.square().mean() / share).backward(retain_graph=True)
    (out.abs().mean() / share).backward()
    params = list(model.parameters())
    (model(batch()).square().mean() / share).backward(inputs=[params[0], params[-1]])
    return grads(model)


@refused
def gradients_of_gradients_of_parameters(model: nn.Module, is_plain: bool) -> Tensors:
    loss = model(batch()).square().mean()
    found = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    sum((grad.square().sum() for grad in found), torch.zeros(())).backward()
    return grads(model)


def adam(groups: Any, is_plain: bool) -> torch.optim.Optimizer:
    """The library's, whose state is laid out in flat tensors."""
    return (
        torch.optim.AdamW(groups, lr=0.1, weight_decay=0.0)
        if is_plain
        else bmt.optim.AdamOptimizer(groups, lr=0.1)
    )


def steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, is_plain: bool, number: int = 1
) -> Tensors:
    for _ in range(number):
        optimizer.zero_grad()
        loss_of(model, is_plain).backward()
        optimizer.step()
    return state(model)


@idiom
def adam_starts_anew(model: nn.Module, is_plain: bool) -> Tensors:
    optimizer = adam(model.parameters(), is_plain)
    steps(model, optimizer, is_plain, 2)
    optimizer.state = collections.defaultdict(dict)
    steps(model, optimizer, is_plain, 2)
    optimizer.state.clear()
    steps(model, optimizer, is_plain)
    optimizer.state.pop(first(model))
    return steps(model, optimizer, is_plain, 2)


@idiom
def adam_gets_other_parameters(model: nn.Module, is_plain: bool) -> Tensors:
    params = list(model.parameters())
    optimizer = adam([{"params": params[:3]}, {"params": params[3:5], "lr": 0.03}], is_plain)
    steps(model, optimizer, is_plain, 2)
    optimizer.param_groups[0]["params"] += params[5:]
    steps(model, optimizer, is_plain, 2)
    optimizer.param_groups.reverse()
    steps(model, optimizer, is_plain)
    optimizer.param_groups[0]["params"].append(optimizer.param_groups[1]["params"].pop(0))
    steps(model, optimizer, is_plain)
    del optimizer.param_groups[0]
    return steps(model, optimizer, is_plain, 2)


@idiom
def adam_gets_other_states(model: nn.Module, is_plain: bool) -> Tensors:
    optimizer = adam(model.parameters(), is_plain)
    steps(model, optimizer, is_plain)
    optimizer.state[first(model)]["exp_avg"] = torch.zeros_like(first(model))
    steps(model, optimizer, is_plain)
    optimizer.state[first(model)]["exp_avg_sq"] = torch.ones(first(model).shape)
    return steps(model, optimizer, is_plain)


@idiom
def adam_after_writes_and_another_group(model: nn.Module, is_plain: bool) -> Tensors:
    params = list(model.parameters())
    optimizer = adam(params[:4], is_plain)
    steps(model, optimizer, is_plain)
    with torch.no_grad():
        params[0].mul_(0.5)
    optimizer.add_param_group({"params": params[4:]})
    return steps(model, optimizer, is_plain, 2)


@idiom
def frozen_between_passes(model: nn.Module, is_plain: bool) -> Tensors:
    loss_of(model, is_plain).backward()
    loss = loss_of(model, is_plain)
    first(model).requires_grad_(False)
    loss.backward()
    return grads(model)


@idiom
def averaged_by_hand(model: nn.Module, is_plain: bool) -> Tensors:
    """The function of torch's tutorials, which leaves gradients as they are that ranks have summed
    already; and its neighbours.
    """
    ranks = 1 if is_plain else bmt.world_size()
    loss_of(model, is_plain).backward()
    group = dist.new_group([dist.get_rank()]) if is_plain else None
    for number, p in enumerate(model.parameters()):
        assert p.grad is not None
        if number % 4 == 0:
            dist.all_reduce(p.grad.data, group=group)
        elif number % 4 == 1:
            work = dist.all_reduce(p.grad, group=group, async_op=True)
            assert work is not None
            work.wait()
        elif number % 4 == 2:
            dist.all_reduce(p.grad.view(-1), group=group)
        else:
            dist.all_reduce(p.data, group=group)
            p.data /= ranks
            p.grad *= ranks
        p.grad.data /= ranks
        dist.broadcast(p.data, dist.get_rank() if is_plain else 0, group=group)
    return {**state(model), **grads(model)}


@idiom
def written_without_versions(model: nn.Module, is_plain: bool) -> Tensors:
    """In inference mode nothing counts writes."""
    with torch.inference_mode():
        p, values = first(model), model.state_dict()
        p.mul_(2)
        p.data[1].zero_()
        p[0] = 3
        values[next(name for name, value in values.items() if value.dim() == 1)].fill_(2)
        torch.mul(p, 2, out=p)
        last = [*values.values()][-1]
        torch.add(last, 1, out=last)
        p.add_(p.mean(0))
        nn.init.constant_(next(p for p in model.parameters() if p.dim() == 1 and len(p) > 3), 0.25)
    return state(model)


@refused
def a_graph_of_gradients(model: nn.Module, is_plain: bool) -> Tensors:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch would have programs call torch.autograd.grad
        loss_of(model, is_plain).backward(create_graph=True)
    penalty = sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None)
    model.zero_grad()
    penalty.backward()  # type: ignore[union-attr]
    return grads(model)


@refused
def hooks_of_nodes(model: nn.Module, is_plain: bool) -> Tensors:
    seen: list[int] = []
    torch.autograd.graph.register_multi_grad_hook(
        list(model.parameters()), lambda grads: seen.append(len(grads))
    )
    loss_of(model, is_plain).backward()
    return {"calls": torch.tensor(seen)}


@refused
def one_rank_writes_by_message(model: nn.Module, is_plain: bool) -> Tensors:
    if not is_plain:
        try:
            dist.send(first(model).data, (bmt.rank() + 1) % bmt.world_size())
        except ValueError as error:  # torch 2.8 first asks whether a rank sends to itself
            raise ParameterError(str(error)) from error
    return state(model)


@refused
def rows_by_vmap(model: nn.Module, is_plain: bool) -> Tensors:
    return {"out": torch.func.vmap(model)(batch()).detach()}


@refused
def other_values_for_one_call(model: nn.Module, is_plain: bool) -> Tensors:
    values = {
        name: (p if is_plain else bmt.gather_result(p)).detach() * 0.5
        for name, p in model.named_parameters()
    }
    return {"out": torch.func.functional_call(model, values, (batch(),)).detach()}


@refused
def gradients_by_func(model: nn.Module, is_plain: bool) -> Tensors:
    values = {name: p.detach() for name, p in model.named_parameters()}
    return torch.func.grad(
        lambda values: torch.func.functional_call(model, values, (batch(),)).square().mean()
    )(values)


def compare(program: Idiom, ways: Sequence[Callable[[], nn.Module]], *, may_refuse: bool) -> int:
    """With one process; how many of these ways to shard have refused it."""
    expected, num_refused = program(plain(), True), 0
    assert expected
    for make in ways:
        try:
            found = program(make(), False)
        except ParameterError:
            if not may_refuse:
                raise
            num_refused += 1
            continue
        assert found.keys() == expected.keys(), (program, make)
        for name, value in expected.items():
            largest = max(1e-3, float(value.double().abs().max()))
            got: Any = found[name]
            want = value
            if isinstance(got, Slices):  # this rank's part, which may be empty
                assert got.shape == value.shape, (program.__name__, make.__name__, name)
                got, want = got.local, got.cut.own(value.detach())
            off = got.cpu().double() - want.cpu().double()
            error = float(off.abs().max()) / largest if off.numel() else 0.0
            assert error <= 1e-9, (program.__name__, make.__name__, name, error)
    return num_refused


def all_idioms() -> None:
    torch.set_default_dtype(torch.float64)
    for number, program in enumerate(IDIOMS):
        # On three ranks, which cost most, one way to shard each, in turn.
        ways = SHARDED if bmt.world_size() < 3 else [SHARDED[number % len(SHARDED)]]
        if program is torchscript and bmt.device().type == "cuda":
            refused_script()
        else:
            compare(program, ways, may_refuse=False)
    # On a GPU torch.func comes to the place that refuses TorchScript, which warns as well.
    warnings.filterwarnings("ignore", message=".*outside of blocks by TorchScript or C")
    for program in REFUSED:
        assert compare(program, SHARDED, may_refuse=True) > 0


def refused_script() -> None:
    """On a GPU it is fused, and the kernels read memory.

    TorchScript makes an error of its own of ours.
    """
    for make in SHARDED:
        with warnings.catch_warnings(record=True) as warned, pytest.raises(RuntimeError):
            warnings.simplefilter("always")
            torchscript(make(), False)
        assert any("outside of blocks by TorchScript" in str(entry.message) for entry in warned)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_idioms_give_what_one_process_gets(world_size: int) -> None:
    run_ranks(all_idioms, world_size, timeout=200)


def as_on_a_gpu() -> None:
    with mock.patch.object(Slices, "is_cuda", new=True):
        refused_script()


def test_scripts_outside_of_blocks_are_refused_where_they_are_fused() -> None:
    run_ranks(as_on_a_gpu, 2)
