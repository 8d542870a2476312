"""Differentiable collectives, the old NCCL verbs and the small helpers, against plain torch in one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from tests.ranks.runner import run_ranks

import bmtrain as bmt
from bmtrain import benchmark, distributed
from bmtrain.distributed import nccl, results
from bmtrain.errors import ConfigurationError, NotInitializedError
from bmtrain.runtime.config import config

OPS = ("sum", "avg", "max", "min", "prod")
REDUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda stacked: stacked.sum(0),
    "avg": lambda stacked: stacked.mean(0),
    "max": lambda stacked: stacked.amax(0),
    "min": lambda stacked: stacked.amin(0),
    "prod": lambda stacked: stacked.prod(0),
}


def values(world_size: int, *, zeros: bool) -> torch.Tensor:
    """Every rank's input, stacked (world_size, 12, 3); with ties, and with `zeros` none, one or two zeros per place."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(world_size, 12, 3, generator=generator, dtype=torch.float64)
    x[:, 0] = 1.5  # a tie over all ranks
    if zeros:
        x[0, 1:5] = 0
        x[-1, 3:8] = 0
    return x


def weights(rank: int, shape: torch.Size) -> torch.Tensor:
    """Makes each rank's loss a different one."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 + rank), dtype=torch.float64)


Result = tuple[torch.Tensor, torch.Tensor]


def run_op(name: str, op: str, stacked: torch.Tensor) -> Result:
    """(value, gradient) of one collective on this rank."""
    rank = bmt.rank()
    x = stacked[rank].clone().requires_grad_()
    if name == "all_gather":
        out = distributed.all_gather(x)
    elif name == "broadcast":
        out = distributed.broadcast(x, int(op))
    elif name == "all_reduce":
        out = distributed.all_reduce(x, op)
    else:
        out = distributed.reduce_scatter(x, op, config["comm"])
    (out * weights(rank, out.shape)).sum().backward()
    assert x.grad is not None
    return out.detach(), x.grad


def expected(name: str, op: str, stacked: torch.Tensor) -> list[Result]:
    """The same in one process: the gradient is that of the sum of all ranks' losses."""
    size = len(stacked)
    x = stacked.clone().requires_grad_()
    if name == "all_gather":
        outs = [x] * size
    elif name == "broadcast":
        outs = [x[int(op)]] * size
    elif name == "all_reduce":
        outs = [REDUCTIONS[op](x)] * size
    else:
        outs = list(REDUCTIONS[op](x).chunk(size))
    torch.stack([(out * weights(rank, out.shape)).sum() for rank, out in enumerate(outs)]).sum().backward()
    assert x.grad is not None
    return [(out.detach(), grad) for out, grad in zip(outs, x.grad, strict=True)]


CASES = [("all_gather", "-"), ("broadcast", "0"), ("broadcast", "last")]
CASES += [(name, op) for name in ("all_reduce", "reduce_scatter") for op in OPS]


def all_cases(world_size: int) -> list[tuple[str, str, torch.Tensor]]:
    return [
        (name, op.replace("last", str(world_size - 1)), values(world_size, zeros=zeros))
        for name, op in CASES
        for zeros in (False, True)
    ]


def run_cases(world_size: int) -> list[Result]:
    return [run_op(*case) for case in all_cases(world_size)]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_values_and_gradients_are_those_of_one_process(world_size: int) -> None:
    results_by_rank = run_ranks(run_cases, world_size, world_size)
    for number, case in enumerate(all_cases(world_size)):
        for rank, (value, grad) in enumerate(expected(*case)):
            got_value, got_grad = results_by_rank[rank][number]
            torch.testing.assert_close(got_value, value, msg=lambda text, case=case: f"{case[:2]} value: {text}")
            torch.testing.assert_close(got_grad, grad, msg=lambda text, case=case: f"{case[:2]} gradient: {text}")


def run_second_gradient() -> torch.Tensor:
    x = torch.tensor([1.0, 2.0, 3.0]) + bmt.rank()
    x.requires_grad_()
    total = distributed.all_reduce(x**2)
    (first,) = torch.autograd.grad((total**2).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    return second


def test_sums_can_be_differentiated_twice() -> None:
    x = torch.stack([torch.tensor([1.0, 2.0, 3.0]) + rank for rank in range(2)]).requires_grad_()
    first = torch.autograd.grad(2 * (x.square().sum(0) ** 2).sum(), x, create_graph=True)[0]
    second = torch.autograd.grad(first.sum(), x)[0]
    for rank, got in enumerate(run_ranks(run_second_gradient, 2)):
        torch.testing.assert_close(got, second[rank])


def run_broadcast_to_plain() -> tuple[bool, torch.Tensor | None, bool]:
    """The root decides whether there is a gradient; nobody waits for ever."""
    x = torch.full((3,), float(bmt.rank()), requires_grad=bmt.rank() == 0)
    out = distributed.broadcast(x, 0)
    (out.sum() * (bmt.rank() + 1)).backward()
    plain = distributed.broadcast(torch.ones(2, requires_grad=bmt.rank() == 1), 0)
    return out.requires_grad, x.grad, plain.requires_grad


def test_the_root_decides_about_the_gradient_of_a_broadcast() -> None:
    (first, grad, plain), (other, none, plain_too) = run_ranks(run_broadcast_to_plain, 2)
    assert first and other and none is None and not plain and not plain_too
    assert grad is not None and grad.tolist() == [3.0, 3.0, 3.0]


def run_activations() -> tuple[torch.Tensor, torch.Tensor | None]:
    """x on rank 0, through rank 1 and 2, as a pipeline does it."""
    rank, last = bmt.rank(), bmt.world_size() - 1
    if rank == 0:
        x = torch.arange(6.0, dtype=torch.bfloat16).view(2, 3).requires_grad_()
        distributed.send_activations(x * 2, 1).backward()
        return x.detach(), x.grad
    x = distributed.recv_activations(rank - 1)
    x.retain_grad()
    y = x * 3
    if rank == last:
        y.sum().backward()
    else:
        distributed.send_activations(y, rank + 1).backward()
    return y.detach(), x.grad


def test_activations_travel_with_shape_dtype_and_gradient() -> None:
    (_, first), (middle, second), (end, third) = run_ranks(run_activations, 3)
    x = torch.arange(6.0, dtype=torch.bfloat16).view(2, 3)
    assert middle.dtype == torch.bfloat16 and torch.equal(middle, x * 6) and torch.equal(end, x * 18)
    assert first is not None and second is not None and third is not None
    assert (first.unique().item(), second.unique().item(), third.unique().item()) == (18.0, 9.0, 3.0)


def run_plain_activations() -> tuple[torch.Tensor, bool]:
    sent = torch.tensor([[True, False]]) if bmt.rank() == 0 else None
    if sent is not None:
        distributed.send_activations(sent, 1)
        distributed.send_activations(torch.tensor(7), 1)
        return sent, False
    got, scalar = distributed.recv_activations(0), distributed.recv_activations(0)
    return got, scalar.requires_grad or scalar.item() != 7


def test_activations_without_gradient() -> None:
    (sent, _), (got, wrong) = run_ranks(run_plain_activations, 2)
    assert torch.equal(sent, got) and got.dtype == torch.bool and not wrong


def run_wrong_calls() -> list[str]:
    messages = []
    for call in (
        lambda: distributed.all_reduce(torch.ones(2), "mean"),
        lambda: distributed.reduce_scatter(torch.ones(3), "sum"),
        lambda: distributed.reduce_scatter(torch.ones(3), "max"),
        lambda: distributed.broadcast(torch.ones(3), 2),
        lambda: distributed.all_gather(torch.ones(3), "world"),  # type: ignore[arg-type]
        lambda: nccl.allGather(torch.ones(3), torch.ones(5), config["comm"]),
        lambda: nccl.allReduce(torch.ones(3), torch.ones(3).double(), "sum", config["comm"]),
        lambda: nccl.allReduce(torch.ones(3).untyped_storage(), torch.ones(3).untyped_storage(), "sum", config["comm"]),
        nccl.groupEnd,
        lambda: results.gather_result([1]),  # type: ignore[arg-type]
        lambda: results.gather_result(torch.ones(2, 1 + bmt.rank())),
        lambda: benchmark.all_gather(3),
    ):
        with pytest.raises(ConfigurationError) as caught:
            call()
        messages.append(str(caught.value))
    return messages


def test_wrong_calls_are_explained() -> None:
    messages = run_ranks(run_wrong_calls, 2)
    assert all("expected" in text or "without" in text for text in messages[0])
    assert "rank 1: (2, 2)" in messages[0][-2]


def run_nccl(world_size: int) -> dict[str, list[float]]:
    rank, comm = bmt.rank(), config["comm"]
    out: dict[str, list[float]] = {}
    mine = torch.tensor([rank + 1.0, rank + 2.0])

    def note(name: str, value: torch.Tensor) -> None:
        out[name] = value.tolist()

    for op in OPS:
        into = torch.empty(2)
        nccl.allReduce(mine, into, op, comm)
        note(f"allReduce {op}", into)
        target = torch.full((2,), -1.0)
        nccl.reduce(mine, target, op, world_size - 1, comm)
        note(f"reduce {op}", target)
        full = torch.arange(2.0 * world_size) + rank
        part = torch.empty(2)
        nccl.reduceScatter(full, part, op, comm)
        note(f"reduceScatter {op}", part)
    in_place = mine.clone()
    nccl.allReduce(in_place, in_place, "sum", comm)
    note("in place", in_place)
    gathered = torch.empty(2 * world_size)
    nccl.allGather(mine.untyped_storage(), gathered.untyped_storage(), comm)
    note("allGather of bytes", gathered)
    gathered.zero_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates typed storages, which old programs pass
        nccl.allGather(mine.storage(), gathered.storage(), comm)
    note("allGather of storages", gathered)
    got = torch.zeros(2)
    nccl.broadcast(mine, got, world_size - 1, comm)
    note("broadcast", got)
    ring = torch.zeros(2)
    nccl.groupStart()
    nccl.groupStart()
    nccl.send(mine, (rank + 1) % world_size, comm)
    nccl.groupEnd()
    nccl.recv(ring, (rank - 1) % world_size, comm)
    nccl.groupEnd()
    note("ring", ring)
    if rank == 0:
        nccl.send(mine, 1, comm)
    if rank == 1:
        nccl.recv(ring, 0, comm)
    note("send", ring)
    out["counts"] = [nccl.commCount(comm), nccl.commRank(comm)]
    nccl.commDestroy(comm)
    return out


def test_nccl_verbs() -> None:
    size = 3
    stacked = torch.stack([torch.tensor([rank + 1.0, rank + 2.0]) for rank in range(size)])
    wide = torch.stack([torch.arange(2.0 * size) + rank for rank in range(size)])
    for rank, got in enumerate(run_ranks(run_nccl, size, size)):
        for op in OPS:
            whole = REDUCTIONS[op](stacked).tolist()
            assert got[f"allReduce {op}"] == whole
            assert got[f"reduce {op}"] == (whole if rank == size - 1 else [-1.0, -1.0])
            assert got[f"reduceScatter {op}"] == REDUCTIONS[op](wide).chunk(size)[rank].tolist()
        assert got["in place"] == stacked.sum(0).tolist()
        assert got["allGather of bytes"] == got["allGather of storages"] == stacked.flatten().tolist()
        assert got["broadcast"] == stacked[-1].tolist()
        assert got["ring"] == stacked[rank - 1].tolist()
        assert got["send"] == (stacked[0] if rank == 1 else stacked[rank - 1]).tolist()
        assert got["counts"] == [size, rank]


def run_results() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    rank = bmt.rank()
    results.synchronize()
    loss = torch.tensor(float(rank), requires_grad=True)
    losses = [
        results.sum_loss(loss * 2),
        results.sum_loss(rank),
        results.sum_loss(torch.tensor([rank, 1.0], dtype=torch.float16)),
        results.sum_loss(torch.tensor(rank)),
    ]
    rows = [
        results.gather_result(torch.arange(rank + 1).int()),
        results.gather_result(torch.full((2 * (rank == 1), 3), 5.0, dtype=torch.bfloat16)),
        results.gather_result(torch.tensor(rank == 1)),
        results.gather_result(torch.zeros(0, 2)),
        results.gather_result(torch.randn(4, 3, generator=torch.Generator().manual_seed(rank)).t()),
    ]
    return losses, rows


@pytest.mark.parametrize("world_size", [1, 3])
def test_sum_loss_and_gather_result(world_size: int) -> None:
    for losses, rows in run_ranks(run_results, world_size):
        mean = (world_size - 1) / 2
        assert [float(x.flatten()[0]) for x in losses] == [2 * mean, mean, mean, mean]
        assert [x.dtype for x in losses] == [torch.float32, torch.float32, torch.float16, torch.float32]
        assert [x.dim() for x in losses] == [0, 0, 1, 0] and not losses[0].requires_grad
        assert rows[0].tolist() == [n for rank in range(world_size) for n in range(rank + 1)]
        assert rows[1].shape == (2 * (world_size > 1), 3) and rows[1].dtype == torch.bfloat16
        assert rows[2].tolist() == [rank == 1 for rank in range(world_size)]
        assert rows[3].shape == (0, 2)
        parts = [torch.randn(4, 3, generator=torch.Generator().manual_seed(rank)).t() for rank in range(world_size)]
        assert torch.equal(rows[4], torch.cat(parts))


def run_config() -> tuple[dict[str, object], int]:
    seen = {key: value for key, value in config.items() if isinstance(value, int | bool)}
    topology, comm = config["topology"], config["tp_comm"]
    assert config["load_stream"] is None and config["calc_stream"] is None
    return {**seen, "pipe_idx": topology.get_group_id("pipe")}, comm.size


def test_config_shows_the_run() -> None:
    for rank, (seen, tp_size) in enumerate(run_ranks(run_config, 4, init={"tp_size": 2, "pipe_size": 2})):
        assert tp_size == 2
        assert seen == {
            "rank": rank, "local_rank": rank, "world_size": 4, "local_size": 4, "initialized": True, "pipe_size": 2,
            "pipe_enabled": True, "tp_size": 2, "tp_rank": rank % 2, "tp_zero_rank": rank // 2, "tp_zero_size": 2,
            "zero_rank": rank, "zero_size": 4, "micros": 2, "pipe_idx": rank % 2,
        }  # fmt: skip


def test_config_before_the_run() -> None:
    assert (config["initialized"], config["rank"], config["world_size"], config["comm"]) == (False, 0, 1, None)
    assert len(config) == len(list(config)) and "rank" in config and "spam" not in config
    with pytest.raises(KeyError, match="nearest name is 'world_size'"):
        config["word_size"]
    with pytest.raises(TypeError, match="init_distributed"):
        config["rank"] = 3


@pytest.mark.parametrize(
    "call", [results.synchronize, lambda: results.sum_loss(1.0), lambda: distributed.all_gather(torch.ones(1)), nccl.groupStart]
)
def test_before_the_run_is_an_error(call: Callable[[], object]) -> None:
    with pytest.raises(NotInitializedError, match="init_distributed"):
        call()


def run_benchmarks() -> list[list[benchmark.Row]]:
    return [benchmark.all_gather(4096), benchmark.reduce_scatter(2048), benchmark.send_recv(1024)]


def test_benchmarks(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = run_ranks(run_benchmarks, 2)
    assert [[row.size for row in rows] for rows in first] == [[1024, 2048, 4096], [1024, 2048], [1024]]
    assert first == second
    assert all(row.seconds > 0 and row.bandwidth > 0 for rows in first for row in rows)
    printed = capsys.readouterr().out
    assert "all_gather, 2 ranks" in printed and "4 KiB" in printed and "GB/s" in printed


def test_benchmarks_alone() -> None:
    ((gather, reduce, ring),) = run_ranks(run_benchmarks, 1)
    assert len(gather) == 3 and len(reduce) == 2 and not ring
