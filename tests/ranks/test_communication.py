"""Differentiable collectives, the old NCCL verbs and the small helpers, against plain torch in one
process.
"""

from __future__ import annotations

import os
import pathlib
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.ranks.runner import run_ranks

import bmtrain as bmt
from bmtrain import benchmark, distributed
from bmtrain.distributed import collectives, nccl, results
from bmtrain.errors import ConfigurationError, NotInitializedError
from bmtrain.runtime import world
from bmtrain.runtime.config import config
from bmtrain.runtime.mesh import Axis

OPS = ("sum", "avg", "max", "min", "prod")
REDUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda stacked: stacked.sum(0),
    "avg": lambda stacked: stacked.mean(0),
    "max": lambda stacked: stacked.amax(0),
    "min": lambda stacked: stacked.amin(0),
    "prod": lambda stacked: stacked.prod(0),
}


def values(world_size: int, *, zeros: bool) -> torch.Tensor:
    """Every rank's input, stacked (world_size, 12, 3); with ties, and with `zeros` none, one or two
    zeros per place.
    """
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(world_size, 12, 3, generator=generator, dtype=torch.float64)
    x[:, 0] = 1.5  # a tie over all ranks
    if zeros:
        x[0, 1:5] = 0
        x[-1, 3:8] = 0
    return x


def weights(rank: int, shape: torch.Size) -> torch.Tensor:
    """Makes each rank's loss a different one."""
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(100 + rank), dtype=torch.float64
    )


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
    torch.stack(
        [(out * weights(rank, out.shape)).sum() for rank, out in enumerate(outs)]
    ).sum().backward()
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
            torch.testing.assert_close(got_value, value, msg=f"{case[:2]} value: {{}}".format)
            torch.testing.assert_close(got_grad, grad, msg=f"{case[:2]} gradient: {{}}".format)


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
    assert (
        middle.dtype == torch.bfloat16 and torch.equal(middle, x * 6) and torch.equal(end, x * 18)
    )
    assert first is not None and second is not None and third is not None
    assert (first.unique().item(), second.unique().item(), third.unique().item()) == (
        18.0,
        9.0,
        3.0,
    )


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
        lambda: nccl.allReduce(
            torch.ones(3).untyped_storage(), torch.ones(3).untyped_storage(), "sum", config["comm"]
        ),
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
        assert (
            got["allGather of bytes"] == got["allGather of storages"] == stacked.flatten().tolist()
        )
        assert got["broadcast"] == stacked[-1].tolist()
        assert got["ring"] == stacked[rank - 1].tolist()
        assert got["send"] == (stacked[0] if rank == 1 else stacked[rank - 1]).tolist()
        assert got["counts"] == [size, rank]


def run_groups() -> dict[str, list[float]]:
    """Sends before receives, receives before sends, several to one peer, two communicators in
    orders that differ.
    """
    rank, comm, tp, pipe = bmt.rank(), config["comm"], config["tp_comm"], config["pipe_comm"]
    size = comm.size
    out: dict[str, list[float]] = {}
    for name, receives_first in (("same", True), ("mixed", rank % 2 == 0)):
        sent = [
            [torch.full((3,), 100.0 * rank + 10 * peer + n) for n in range(2)]
            for peer in range(size)
        ]
        got = [[torch.empty(3) for _ in range(2)] for _ in range(size)]
        sending = [
            lambda x=x, peer=peer: nccl.send(x, peer, comm)
            for peer in range(size)
            for x in sent[peer]
        ]
        receiving = [
            lambda x=x, peer=peer: nccl.recv(x, peer, comm)
            for peer in range(size)
            for x in got[peer]
        ]
        nccl.groupStart()
        for call in receiving + sending if receives_first else sending + receiving:
            call()
        nccl.groupEnd()
        out[name] = [x[0].item() for pair in got for x in pair]
    along_tp, along_pipe = torch.empty(1), torch.empty(1)

    def exchange_along_tp() -> None:
        nccl.send(torch.tensor([rank + 0.5]), 1 - tp.index, tp)
        nccl.recv(along_tp, 1 - tp.index, tp)

    def exchange_along_pipe() -> None:
        nccl.recv(along_pipe, 1 - pipe.index, pipe)
        nccl.send(torch.tensor([rank + 0.25]), 1 - pipe.index, pipe)

    exchanges = [exchange_along_tp, exchange_along_pipe]
    nccl.groupStart()
    # a ring of ranks that wait for one another
    for exchange in exchanges if rank in (0, 3) else exchanges[::-1]:
        exchange()
    total = torch.ones(2)
    nccl.allReduce(total, total, "sum", comm)  # not deferred: ready at once
    nccl.groupEnd()
    out["two communicators"] = [along_tp.item(), along_pipe.item(), *total.tolist()]
    return out


def test_groups_of_sends_and_receives_in_any_order() -> None:
    for rank, got in enumerate(run_ranks(run_groups, 4, init={"tp_size": 2, "pipe_size": 2})):
        assert (
            got["same"]
            == got["mixed"]
            == [100.0 * peer + 10 * rank + n for peer in range(4) for n in range(2)]
        )
        assert got["two communicators"] == [(rank ^ 1) + 0.5, (rank ^ 2) + 0.25, 4.0, 4.0]


def run_alone() -> list[list[float]]:
    """Every verb in a world of one: itself is all there is."""
    comm, x = config["comm"], torch.tensor([3.0, 4.0])
    outs = [torch.zeros(2) for _ in range(6)]
    nccl.allReduce(x, outs[0], "avg", comm)
    nccl.allGather(x, outs[1], comm)
    nccl.reduceScatter(x, outs[2], "prod", comm)
    nccl.broadcast(x, outs[3], 0, comm)
    nccl.reduce(x, outs[4], "max", 0, comm)
    nccl.groupStart()
    nccl.recv(outs[5], 0, comm)
    nccl.send(x, 0, comm)
    nccl.groupEnd()
    return [out.tolist() for out in outs]


def test_nccl_alone() -> None:
    assert run_ranks(run_alone, 1)[0] == [[3.0, 4.0]] * 6


def run_wrong_nccl() -> list[str]:
    comm, x, y = config["comm"], torch.ones(4), torch.ones(4)
    nowhere: Any = None

    def to_itself() -> None:
        nccl.groupStart()
        nccl.send(x, comm.index, comm)
        nccl.groupEnd()

    messages = []
    calls: list[Callable[[], object]] = [
        lambda: nccl.allReduce(x, y, "sum", nowhere),
        lambda: nccl.allGather(x, y, nowhere),
        lambda: nccl.commCount(nowhere),
        lambda: nccl.commDestroy(nowhere),
        lambda: nccl.allReduce(x, y, "mean", comm),
        lambda: nccl.reduce(x, y, "mean", 0, comm),
        lambda: nccl.reduceScatter(x, torch.ones(3), "sum", comm),
        lambda: nccl.broadcast(x, y, 2, comm),
        lambda: nccl.broadcast(x, y, -1, comm),
        lambda: nccl.reduce(x, y, "sum", 2, comm),
        lambda: nccl.send(x, 2, comm),
        lambda: nccl.recv(x, -1, comm),
        lambda: nccl.send(x, comm.index, comm),
        lambda: nccl.recv(x, comm.index, comm),
        lambda: nccl.allReduce(torch.ones(2, 2).t()[:1], y, "sum", comm),
        lambda: nccl.allReduce(x, torch.empty(4, device="meta"), "sum", comm),
        lambda: nccl.allGather([1.0], y, comm),  # type: ignore[arg-type]
        to_itself,
    ]
    for call in calls:
        with pytest.raises(ConfigurationError, match="expected") as caught:
            call()
        messages.append(str(caught.value))
    nccl.allReduce(x, y, "sum", comm)  # nothing is left half done
    assert y.tolist() == [2.0] * 4
    return messages


def test_wrong_nccl_calls_are_explained_on_every_rank() -> None:
    first, second = run_ranks(run_wrong_nccl, 2)
    assert len(first) == len(second) == 18
    assert all("config['comm']" in text for text in first[:4])
    assert all("0 to 1" in text for text in first[7:12])


def run_results() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    rank = bmt.rank()
    results.synchronize()
    loss = torch.tensor(float(rank), requires_grad=True)
    losses = [
        results.sum_loss(loss * 2).detach(),
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
        assert [x.dtype for x in losses] == [
            torch.float32,
            torch.float32,
            torch.float16,
            torch.float32,
        ]
        assert [x.dim() for x in losses] == [0, 0, 1, 0]
        assert rows[0].tolist() == [n for rank in range(world_size) for n in range(rank + 1)]
        assert rows[1].shape == (2 * (world_size > 1), 3) and rows[1].dtype == torch.bfloat16
        assert rows[2].tolist() == [rank == 1 for rank in range(world_size)]
        assert rows[3].shape == (0, 2)
        parts = [
            torch.randn(4, 3, generator=torch.Generator().manual_seed(rank)).t()
            for rank in range(world_size)
        ]
        assert torch.equal(rows[4], torch.cat(parts))


def run_old_use_of_config() -> dict[str, Any]:
    """What programs of 0.1.x and 1.0.1 do with it."""
    comm, topology = bmt.config["comm"], bmt.config["topology"]
    gathered = distributed.all_gather(torch.tensor([bmt.rank()]), bmt.config["zero_comm"])
    total = torch.ones(1)
    nccl.allReduce(total, total, "sum", bmt.config["tp_zero_comm"])
    groups = {
        name: (topology.get_group_id(name), topology.get_group_rank(name))
        for name in ("pipe", "zero", "tp_zero", "tp")
    }
    with pytest.raises(ConfigurationError, match="unknown group 'dp'"):
        topology.get_group_id("dp")
    seen = dict(bmt.config)
    world.shutdown()
    after = dict(bmt.config)
    return {
        "gathered": gathered.flatten().tolist(),
        "total": total.item(),
        "groups": groups,
        "stages": (topology.stage_id, topology.stages, topology.pipe_idx),
        "sizes": {name: comm.size for name, comm in seen.items() if isinstance(comm, Axis)},
        "names": sorted(seen) == sorted(after) == sorted(CONFIG_NAMES),
        "after": {name: value for name, value in after.items() if name != "topology"},
        "comm": comm is seen["comm"],
    }


CONFIG_NAMES = [
    "rank",
    "local_rank",
    "world_size",
    "local_size",
    "initialized",
    "pipe_size",
    "pipe_enabled",
    "tp_size",
    "tp_rank",
    "tp_zero_rank",
    "tp_zero_size",
    "zero_rank",
    "zero_size",
    "micros",
    "topology",
    "comm",
    "zero_comm",
    "tp_comm",
    "tp_zero_comm",
    "pipe_comm",
    "pp_zero_comm",
    "pp_tp_zero_comm",
    "load_stream",
    "calc_stream",
    "tp_comm_stream",
    "pp_comm_stream",
    "barrier_stream",
    "load_event",
    "zero_level",
    "num_micro_batches",
    "save_param_to_cpu",
    "loss_scale_factor",
    "loss_scale_steps",
]


def test_what_old_programs_do_with_config() -> None:
    before = {name: value for name, value in config.items() if name != "topology"}
    assert sorted(config) == sorted(CONFIG_NAMES)
    for rank, got in enumerate(
        run_ranks(run_old_use_of_config, 4, init={"tp_size": 2, "pipe_size": 2})
    ):
        assert (
            got["gathered"] == [0, 1, 2, 3] and got["total"] == 2.0 and got["names"] and got["comm"]
        )
        assert got["groups"] == {
            "pipe": (rank % 2, rank // 2),
            "zero": (0, rank),
            "tp_zero": (rank % 2, rank // 2),
            "tp": (rank // 2, rank % 2),
        }
        assert got["stages"] == (rank // 2, 2, rank % 2)
        assert got["sizes"] == {
            "comm": 4,
            "zero_comm": 4,
            "tp_comm": 2,
            "tp_zero_comm": 2,
            "pipe_comm": 2,
            "pp_zero_comm": 2,
            "pp_tp_zero_comm": 1,
        }
        assert got["after"] == before  # the run is over: one process again


def run_config() -> tuple[dict[str, object], int]:
    seen = {key: value for key, value in config.items() if isinstance(value, int | bool)}
    topology, comm = config["topology"], config["tp_comm"]
    assert config["load_stream"] is None and config["calc_stream"] is None
    return {**seen, "pipe_idx": topology.get_group_id("pipe")}, comm.size


def test_config_shows_the_run() -> None:
    for rank, (seen, tp_size) in enumerate(
        run_ranks(run_config, 4, init={"tp_size": 2, "pipe_size": 2})
    ):
        assert tp_size == 2
        assert seen == {
            "rank": rank,
            "local_rank": rank,
            "world_size": 4,
            "local_size": 4,
            "initialized": True,
            "pipe_size": 2,
            "pipe_enabled": True,
            "tp_size": 2,
            "tp_rank": rank % 2,
            "tp_zero_rank": rank // 2,
            "tp_zero_size": 2,
            "zero_rank": rank,
            "zero_size": 4,
            "micros": 2,
            "num_micro_batches": 2,
            "zero_level": 3,
            "save_param_to_cpu": True,
            "loss_scale_factor": 2,
            "loss_scale_steps": 1024,
            "pipe_idx": rank % 2,
        }


def test_config_before_the_run() -> None:
    assert (config["initialized"], config["rank"], config["world_size"], config["comm"]) == (
        False,
        0,
        1,
        None,
    )
    assert len(config) == len(list(config)) and "rank" in config and "spam" not in config
    with pytest.raises(KeyError, match="nearest name is 'world_size'"):
        config["word_size"]
    with pytest.raises(ConfigurationError, match="init_distributed"):
        config["rank"] = 3
    assert (
        config.get("spam", 5) == 5
        and config.get("tp_size") == 1
        and {**config} == dict(config.items())
    )
    assert config["topology"].get_group_id("tp") == 0 and "'world_size': 1" in repr(config)


@pytest.mark.parametrize(
    "call",
    [
        results.synchronize,
        lambda: results.sum_loss(1.0),
        lambda: distributed.all_gather(torch.ones(1)),
        nccl.groupStart,
    ],
)
def test_before_the_run_is_an_error(call: Callable[[], object]) -> None:
    with pytest.raises(NotInitializedError, match="init_distributed"):
        call()


def run_benchmarks() -> list[list[benchmark.Row]]:
    return [benchmark.all_gather(4096), benchmark.reduce_scatter(2048), benchmark.send_recv(1024)]


def test_benchmarks(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = run_ranks(run_benchmarks, 2)
    assert [[row.size for row in rows] for rows in first] == [
        [1024, 2048, 4096],
        [1024, 2048],
        [1024],
    ]
    assert first == second
    assert all(row.seconds > 0 and row.bandwidth > 0 for rows in first for row in rows)
    printed = capsys.readouterr().out
    assert "all_gather, 2 ranks" in printed and "4 KiB" in printed and "GB/s" in printed


@pytest.mark.parametrize("world_size", [1, 3])
def test_benchmarks_alone_and_where_sizes_do_not_divide(
    world_size: int, capsys: pytest.CaptureFixture[str]
) -> None:
    for gather, reduce, ring in run_ranks(run_benchmarks, world_size):
        assert (len(gather), len(reduce), len(ring)) == (3, 2, int(world_size > 1))
    printed = capsys.readouterr().out
    for name in ("all_gather", "reduce_scatter", "send_recv"):
        assert printed.count(f"{name}, {world_size} ranks") == 1  # on rank 0


def run_printing() -> None:
    bmt.print_rank("first", "second", sep="+")
    bmt.print_rank("from one", rank=1)
    bmt.print_block(f"title of {bmt.rank()}", "content")
    bmt.print_dict(f"numbers of {bmt.rank()}", {"lr": 0.5})
    bmt.see_memory(f"memory of {bmt.rank()}", detail=True)
    bmt.synchronize()


def test_printing_on_one_rank(capsys: pytest.CaptureFixture[str]) -> None:
    run_ranks(run_printing, 2)
    zero, one = capsys.readouterr().out.split("-- rank 1 printed:")
    assert one.split() == ["from", "one"]
    for text in (
        "first+second",
        "title of 0",
        "content",
        "numbers of 0",
        "lr",
        "memory of 0: peak resident memory",
    ):
        assert zero.count(text) == 1
    assert "of 1" not in zero


def run_meeting(folder: str) -> list[str]:
    """The last rank comes late: nobody leaves the barrier before it has arrived."""
    last = bmt.world_size() - 1
    if bmt.rank() == last:
        time.sleep(0.5)
        pathlib.Path(folder, "arrived").touch()
    bmt.synchronize()
    return os.listdir(folder)


def test_synchronize_waits_for_the_last(tmp_path: pathlib.Path) -> None:
    assert run_ranks(run_meeting, 3, str(tmp_path)) == [["arrived"]] * 3


def run_to_the_end() -> tuple[bool, bool, bool]:
    """Whether gloo's threads are there while the run lasts, are gone after it though a model keeps
    the axes, and what is said.
    """
    block = bmt.Block(torch.nn.Linear(3, 3))
    block(torch.ones(2, 3, requires_grad=True)).sum().backward()
    axis = world.current().mesh.world
    during = _num_gloo_threads()
    world.shutdown()
    with pytest.raises(RuntimeError, match="the run has ended"):
        collectives.all_gather(torch.ones(2), axis)
    return during > 0, _num_gloo_threads() == 0, isinstance(block, bmt.Block)


def _num_gloo_threads() -> int:
    names = [
        task.joinpath("comm").read_text() for task in pathlib.Path("/proc/self/task").iterdir()
    ]
    return sum(name.startswith("pt_gloo_runloop") for name in names)


@pytest.mark.skipif(
    not pathlib.Path("/proc/self/task").exists(),
    reason="reads the names of threads from Linux's /proc",
)
def test_no_thread_of_gloo_outlives_the_run() -> None:
    """One that gives back a tensor when the interpreter ends would abort the process."""
    assert run_ranks(run_to_the_end, 2) == [(True, True, True)] * 2
