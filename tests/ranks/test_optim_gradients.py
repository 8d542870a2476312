"""Finding gradients step after step: few tensors, the same as long as they stay, nothing kept alive
that is the program's.
"""

from __future__ import annotations

import gc
import math
import weakref
from typing import Any

import pytest
import torch
from tests.ranks import models
from tests.ranks.runner import run_ranks
from tests.tensors import grad_of, own_slice
from torch import nn

import bmtrain as bmt
from bmtrain.errors import ParameterError, RanksPartedError
from bmtrain.kernels.chunks import Batch
from bmtrain.optim import AdamOptimizer, OptimManager
from bmtrain.optim.gradients import Gradients
from bmtrain.optim.runs import contiguous_runs


def make() -> tuple[nn.Module, nn.Linear]:
    torch.manual_seed(0)
    block = bmt.Block(nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)))
    return block, nn.Linear(3, 2)


def backward(manager: OptimManager, block: nn.Module, plain: nn.Module, step: int = 0) -> None:
    manager.zero_grad()
    x = torch.randn(12, 7, generator=torch.Generator().manual_seed(step)).chunk(bmt.world_size())[
        bmt.rank()
    ]
    manager.backward(plain(block(x)).square().mean())


def looked_for() -> None:
    block, plain = make()
    manager = OptimManager()
    params = [*block.parameters(), *plain.parameters()]
    manager.add_optimizer(AdamOptimizer(params))
    gradients = Gradients(contiguous_runs(params))
    assert [len(found.parts) for found in gradients.look()] == [0, 0]
    backward(manager, block, plain)
    sharded, ordinary = gradients.look()
    assert len(sharded.parts) == 1 and len(ordinary.parts) == 2
    places = gradients.places
    for step in range(3):
        backward(manager, block, plain, step)
        gradients.look()
        assert gradients.places is places, "the same parameters have a gradient"
    own = grad_of(params[1]).clone()
    params[1].grad = own
    replaced, _ = gradients.look()
    assert gradients.places is not places
    assert (
        any(part.grad.data_ptr() == own_slice(own).data_ptr() for part in replaced.parts)
        or not own_slice(own).numel()
    )
    params[1].grad = None
    assert sum(len(part.piece.params) for part in gradients.look()[0].parts) == 3
    backward(manager, block, plain)
    assert sum(len(part.piece.params) for part in gradients.look()[0].parts) == 4


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_has_a_gradient_is_found_once(world_size: int) -> None:
    """A whole storage is one tensor; what the program replaces or clears is seen at once."""
    run_ranks(looked_for, world_size)


def freed() -> None:
    block, plain = make()
    sharded, manager = list(block.parameters()), OptimManager(loss_scale=8.0)
    optimizer = AdamOptimizer([*sharded, *plain.parameters()])
    manager.add_optimizer(optimizer)
    for step in range(3):
        backward(manager, block, plain, step)
        sharded[0].grad = grad_of(sharded[0]).clone()
        kept: list[weakref.ref[Any]] = [
            weakref.ref(grad_of(param)) for param in (sharded[0], *plain.parameters())
        ]
        kept += [weakref.ref(grad_of(param).untyped_storage()) for param in plain.parameters()]
        manager.clip_grad_norm(optimizer.param_groups, 1.0)
        manager.step()
        manager.zero_grad()
        assert not any(reference() is not None for reference in kept), (
            "somebody keeps gradients of the program"
        )
    model = weakref.ref(block)
    params = [weakref.ref(param) for param in (*sharded, *plain.parameters())]
    del block, plain, sharded, manager, optimizer
    gc.collect()
    assert model() is None and not any(reference() is not None for reference in params)


def test_nothing_is_kept_alive() -> None:
    """Neither gradients beyond `zero_grad`, nor the model beyond its optimizers."""
    run_ranks(freed, 1)


def partial() -> None:
    """Parameters get their gradients at different steps, in two groups; against torch."""
    block, plain = make()
    twin_block, twin_plain = (
        nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)),
        nn.Linear(3, 2),
    )
    torch.manual_seed(0)
    for module in (twin_block[0], twin_block[2], twin_plain):
        module.reset_parameters()  # type: ignore[operator]
    sides: list[list[dict[str, Any]]] = []
    for params in (
        [*block.parameters(), *plain.parameters()],
        [*twin_block.parameters(), *twin_plain.parameters()],
    ):
        sides.append(
            [{"params": params[::2], "weight_decay": 0.1}, {"params": params[1::2], "lr": 0.02}]
        )
    ours, torchs = (
        AdamOptimizer(sides[0], lr=0.01),
        torch.optim.AdamW(sides[1], lr=0.01, weight_decay=0.0),
    )
    manager = OptimManager()
    manager.add_optimizer(ours)
    for step in range(8):
        backward(manager, block, plain, step)
        torchs.zero_grad()
        x = torch.randn(12, 7, generator=torch.Generator().manual_seed(step))
        twin_plain(twin_block(x)).square().mean().backward()
        for one, other in zip(sides[0], sides[1], strict=True):
            for place, (param, twin) in enumerate(zip(one["params"], other["params"], strict=True)):
                if (place + step) % 3 == 0 and step != 3:
                    param.grad = twin.grad = None
        got = manager.clip_grad_norm(ours.param_groups, 0.1)
        want = nn.utils.clip_grad_norm_([*twin_block.parameters(), *twin_plain.parameters()], 0.1)
        models.assert_same(got, want, f"norm at step {step}")
        manager.step()
        torchs.step()
        for (name, twin), param in zip(
            (*twin_block.named_parameters(), *twin_plain.named_parameters()),
            (*block.parameters(), *plain.parameters()),
            strict=True,
        ):
            mine = (
                param.gather().detach()
                if isinstance(param, bmt.DistributedParameter)
                else param.detach()
            )
            models.assert_same(mine, twin.detach(), f"{name} after step {step}")


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_changing_gradients_and_counts(world_size: int) -> None:
    """Which parameters step together is planned once and again when it changes: bias corrections
    are right all the way.
    """
    run_ranks(partial, world_size)


def combined() -> None:
    """One norm over sharded, tensor-free and ordinary gradients of several dtypes, with what is not
    finite on one rank only.
    """
    sharded = [
        bmt.DistributedParameter(torch.ones(9, dtype=dtype))
        for dtype in (torch.float32, torch.float16, torch.float64)
    ]
    plain = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    manager = OptimManager()
    for bad in (None, math.inf, math.nan):
        for param in (*sharded, plain):
            param.grad = torch.full_like(param, 2.0)
        if bad is not None and bmt.rank() == bmt.world_size() - 1:
            grad_of(plain)[0] = bad
        norm = float(manager.clip_grad_norm([*sharded, plain], 1e9))
        if bad is None:
            assert norm == pytest.approx(2 * math.sqrt(3 * 9 + 2))
        else:
            assert not math.isfinite(norm)


@pytest.mark.parametrize("world_size", [1, 3])
def test_dtypes_and_kinds_together(world_size: int) -> None:
    run_ranks(combined, world_size)


def test_an_empty_batch_has_no_tables() -> None:
    """Of ranks that own nothing."""
    assert Batch([(torch.empty(0), torch.empty(0))]).tables(16) == []


def ordinary_parameters() -> None:
    """Beside sharded ones: summed by a manager, else refused."""
    block, plain = make()
    alone = torch.optim.SGD([*block.parameters(), *plain.parameters()], lr=0.1)
    before = plain.weight.detach().clone()
    plain(block(torch.ones(2, 7))).sum().backward()
    with pytest.raises(ParameterError, match="OptimManager"):
        alone.step()
    torch.testing.assert_close(plain.weight, before, rtol=0, atol=0)

    manager = OptimManager()
    manager.add_optimizer(alone)
    backward(manager, block, plain)
    manager.step()
    plain.weight.register_hook(lambda grad: grad * 0.5)
    with pytest.raises(ParameterError, match="has a hook"):
        backward(manager, block, plain)


def test_ordinary_parameters_are_summed_or_refused() -> None:
    run_ranks(ordinary_parameters, 2)


def ordinary_alone(rows_of: str) -> None:
    """A head with an optimizer of its own, beside a sharded block in another."""
    block, head = make()
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (block, head)]
    x = torch.randn(12, 7, generator=torch.Generator().manual_seed(0))
    own = x if rows_of == "all" else x.chunk(bmt.world_size())[bmt.rank()]
    for _ in range(2):
        head(block(own).detach() if rows_of == "beside" else block(own)).square().mean().backward()
        for param in head.parameters() if rows_of == "summed" else ():
            param.grad = bmt.sum_loss(grad_of(param))
        for optimizer in optimizers:
            optimizer.step()


def ordinary_alone_refused() -> None:
    for rows_of in ("all", "summed"):
        ordinary_alone(rows_of)
    for rows_of in ("rank", "beside"):
        with pytest.raises(ParameterError, match="gradient differs between ranks"):
            ordinary_alone(rows_of)


def ordinary_written(managed: bool) -> None:
    """After the third step each rank writes something else into the head: the fourth finds it."""
    block, head = make()
    optimizer = torch.optim.SGD([*head.parameters(), *(block.parameters() if managed else ())], 0.1)
    manager = bmt.optim.OptimManager()
    if managed:
        manager.add_optimizer(optimizer)
    x = torch.randn(12, 7, generator=torch.Generator().manual_seed(0))
    for step in range(1, 5):
        if step == 4:
            with torch.no_grad():
                next(head.parameters()).add_(1e-2 * bmt.rank())
            with pytest.raises(ParameterError, match="values differ between ranks"):
                optimizer.step()
            return
        manager.zero_grad()
        manager.backward(head(block(x)).square().mean())
        optimizer.step()


@pytest.mark.parametrize("managed", [False, True])
def test_ordinary_parameters_that_ranks_write_differently(managed: bool) -> None:
    run_ranks(ordinary_written, 2, managed)


def told_nothing_at_first(what: str) -> None:
    """An adapter in front of a block whose last layer begins with zeros; one that sees the same
    rows first; settings.
    """
    block, _ = make()
    adapter = torch.nn.Linear(7, 7)
    with torch.no_grad():
        for name, param in block.named_parameters():
            param.mul_(0.0 if what == "zeros" and name.startswith("2.") else 1.0)
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (block, adapter)]
    x = torch.randn(12, 7, generator=torch.Generator().manual_seed(0))
    for step in range(5):
        for optimizer in optimizers:
            optimizer.zero_grad()
        own = (
            x
            if what == "settings" or (what == "rows" and step < 2)
            else x.chunk(bmt.world_size())[bmt.rank()]
        )
        (block(adapter(own)) - 1).square().mean().backward()
        if what == "settings" and step == 2:
            optimizers[1].param_groups[0]["lr"] = 0.1 / (1 + bmt.rank())
        for optimizer in optimizers[::-1]:
            optimizer.step()


def told_later() -> None:
    for what in ("zeros", "rows"):
        with pytest.raises(ParameterError, match="gradient differs between ranks"):
            told_nothing_at_first(what)
    with pytest.raises(RanksPartedError, match="a step of SGD"):
        told_nothing_at_first("settings")


def test_first_gradients_that_tell_nothing() -> None:
    """Zeros, and rows that are the same everywhere: they are compared again."""
    run_ranks(told_later, 2)


def joined_late(is_plain: bool) -> list[torch.Tensor]:
    """An ordinary layer joins the optimizer after some steps, and another takes its place."""
    torch.manual_seed(0)
    inner: nn.Module = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))
    heads = [nn.Linear(3, 2), nn.Linear(3, 2)]
    model = inner if is_plain else bmt.Block(inner)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = OptimManager()
    if not is_plain:
        manager.add_optimizer(optimizer)
    x = torch.randn(12, 7, generator=torch.Generator().manual_seed(0))
    for step in range(6):
        head = heads[step // 3]
        if step == 1:
            optimizer.add_param_group({"params": list(head.parameters())})
        if step == 3:
            optimizer.param_groups[1]["params"][:] = list(head.parameters())
        own = x if is_plain else x.chunk(bmt.world_size())[bmt.rank()]
        loss = head(model(own)).square().mean()
        if is_plain:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        else:
            manager.zero_grad()
            manager.backward(loss)
            manager.step()
    params = [param for part in (model, *heads) for param in part.parameters()]
    return [
        param.gather().detach() if isinstance(param, bmt.DistributedParameter) else param.detach()
        for param in params
    ]


def late_parameters() -> None:
    for found, expected in zip(joined_late(False), joined_late(True), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def cleared_on_one_rank() -> None:
    """The sharded ones are cleared on all ranks, the ordinary one on rank 0."""
    torch.manual_seed(0)
    first = torch.nn.Linear(4, 4)
    model = torch.nn.Sequential(first, bmt.BMTrainModelWrapper(torch.nn.Linear(4, 4)))
    optimizer = bmt.optim.AdamOptimizer(model.parameters())
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(optimizer)
    x = torch.randn(3, 4)
    manager.backward(model(x).sum())
    once = first.weight.grad
    assert once is not None
    once = once.clone()
    manager.backward(model(x).sum())
    torch.testing.assert_close(first.weight.grad, 2 * once)  # accumulated
    model[1].zero_grad()
    if bmt.rank() == 0:
        first.zero_grad()
    before = first.weight.detach().clone()
    with pytest.raises(RanksPartedError, match="clear gradients on all ranks"):
        manager.backward(model(x).sum())
    torch.testing.assert_close(first.weight.detach(), before, rtol=0, atol=0)
    manager.zero_grad()
    manager.backward(model(x).sum())
    torch.testing.assert_close(first.weight.grad, once)


def test_ordinary_parameters_cleared_on_some_ranks_are_refused() -> None:
    run_ranks(cleared_on_one_rank, 2)


def test_parameters_that_join_an_optimizer_late() -> None:
    run_ranks(late_parameters, 2)


def test_ordinary_parameters_in_an_optimizer_of_their_own() -> None:
    """They are trained where their gradients are alike on all ranks, and refused before a step
    changes them where not.
    """
    run_ranks(ordinary_alone_refused, 2)
    run_ranks(ordinary_alone, 1, "rank")


class Words(nn.Module):
    """Sparse gradients of an embedding outside of blocks, as in one process."""

    body: nn.Module

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.body = nn.Embedding(9, 7, sparse=True), nn.Linear(7, 5)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(self.words(rows)).square().mean()
        return out


def sparse_gradients() -> None:
    own, twin = Words(), Words()
    own.body = bmt.Block(own.body)
    rows = torch.tensor([[1, 4], [4, 4], [7, 1], [2, 4], [1, 1], [1, 8]])
    manager = OptimManager()
    adam = torch.optim.SparseAdam(own.words.parameters(), lr=0.1)
    manager.add_optimizer(adam)
    twin_adam = torch.optim.SparseAdam(twin.words.parameters(), lr=0.1)
    for step in range(3):
        manager.zero_grad()
        twin_adam.zero_grad()
        manager.backward(own(rows.roll(step, 0).chunk(bmt.world_size())[bmt.rank()]))
        twin(rows.roll(step, 0)).backward()
        grad, want = own.words.weight.grad, twin.words.weight.grad
        assert grad is not None and want is not None and grad.is_sparse
        torch.testing.assert_close(grad.coalesce().indices(), want.coalesce().indices())
        torch.testing.assert_close(grad.to_dense(), want.to_dense())
        manager.step()
        twin_adam.step()
    torch.testing.assert_close(own.words.weight, twin.words.weight)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_sparse_gradients_stay_sparse(world_size: int) -> None:
    run_ranks(sparse_gradients, world_size)
