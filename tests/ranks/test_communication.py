"""Differentiable collectives, the old NCCL verbs and the small helpers, against plain torch in one
process.
"""

import os
import pathlib
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.ranks.runner import on_ranks, run_ranks

import bmtrain as bmt
from bmtrain import benchmark, distributed
from bmtrain.distributed import collectives, nccl, results
from bmtrain.errors import ConfigurationError, NotInitializedError, UnknownNameError
from bmtrain.runtime import world
from bmtrain.runtime.config import config
from bmtrain.runtime.mesh import Axis

REDUCTIONS = {
    "sum": lambda stacked: stacked.sum(0),
    "avg": lambda stacked: stacked.mean(0),
    "max": lambda stacked: stacked.amax(0),
    "min": lambda stacked: stacked.amin(0),
    "prod": lambda stacked: stacked.prod(0),
}
MESH = {"tp_size": 2, "pipe_size": 2}


def values(*, zeros):
    """Inputs of all ranks, stacked (ranks, 12, 3); with ties, and with `zeros` none, one or two
    zeros per place.
    """
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(bmt.world_size(), 12, 3, generator=generator, dtype=torch.float64)
    x[:, 0] = 1.5  # a tie over all ranks
    if zeros:
        x[0, 1:5] = 0
        x[-1, 3:8] = 0
    return x


def weights(rank, shape):
    """Makes each rank's loss a different one."""
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


CASES = [("all_gather", "-"), ("broadcast", 0), ("broadcast", -1)]
CASES += [(name, op) for name in ("all_reduce", "reduce_scatter") for op in REDUCTIONS]


def run_op(name, op, x):
    if name == "all_gather":
        return distributed.all_gather(x)
    if name == "broadcast":
        return distributed.broadcast(x, op % bmt.world_size())
    if name == "all_reduce":
        return distributed.all_reduce(x, op)
    return distributed.reduce_scatter(x, op, config["comm"])


def in_one_process(name, op, x):
    size = len(x)
    if name == "all_gather":
        return [x] * size
    if name == "broadcast":
        return [x[op]] * size
    whole = REDUCTIONS[op](x)
    return [whole] * size if name == "all_reduce" else list(whole.chunk(size))


def run_cases():
    """The gradient is that of the sum of all ranks' losses."""
    rank = bmt.rank()
    for name, op in CASES:
        for zeros in (False, True):
            stacked = values(zeros=zeros).requires_grad_()
            x = stacked.detach()[rank].clone().requires_grad_()
            out = run_op(name, op, x)
            (out * weights(rank, out.shape)).sum().backward()
            outs = in_one_process(name, op, stacked)
            losses = [(each * weights(n, each.shape)).sum() for n, each in enumerate(outs)]
            torch.stack(losses).sum().backward()
            assert stacked.grad is not None
            want = [outs[rank].detach(), stacked.grad[rank]]
            torch.testing.assert_close(
                [out.detach(), x.grad], want, msg=f"{name} {op}: {{}}".format
            )


def of_one_number():
    """What is given, and its gradient, may be one number in many places."""
    rank = bmt.rank()
    for name, op in CASES:
        numbers = values(zeros=False)[:, 1, 0].requires_grad_()
        own = numbers.detach()[rank].clone().requires_grad_()
        out = run_op(name, op, own.expand(12, 3))
        (out.sum() * (rank + 1)).backward()
        outs = in_one_process(name, op, numbers[:, None, None].expand(-1, 12, 3))
        torch.stack([each.sum() * (n + 1) for n, each in enumerate(outs)]).sum().backward()
        want = [outs[rank].detach(), grad(numbers)[rank]]
        torch.testing.assert_close([out.detach(), own.grad], want, msg=f"{name} {op}: {{}}".format)


def second_gradients():
    stacked = torch.stack([torch.tensor([1.0, 2.0, 3.0]) + rank for rank in range(3)])
    found = []
    for x, total in (
        (stacked.requires_grad_(), lambda x: x.square().sum(0)),
        (stacked.detach()[bmt.rank()].requires_grad_(), lambda x: distributed.all_reduce(x**2)),
    ):
        loss = (total(x) ** 2).sum() * (3 if x is stacked else 1)
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        found += torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(found[1], found[0][bmt.rank()])


def of_the_root():
    """The root decides whether a broadcast has a gradient; nobody waits for ever."""
    rank = bmt.rank()
    x = torch.full((3,), float(rank), requires_grad=rank == 0)
    out = distributed.broadcast(x, 0)
    (out.sum() * (rank + 1)).backward()
    assert out.requires_grad
    assert (x.grad is None) if rank else torch.equal(grad(x), torch.full((3,), 6.0))
    assert not distributed.broadcast(torch.ones(2, requires_grad=rank == 1), 0).requires_grad


def grad(x):
    assert x.grad is not None
    return x.grad


def activations():
    """Shape, dtype and gradient travel from rank to rank, as in a pipeline; others too."""
    rank = bmt.rank()
    start = torch.arange(6.0, dtype=torch.bfloat16).view(2, 3)
    if rank:
        x = distributed.recv_activations(rank - 1)
        x.retain_grad()
        assert x.dtype == torch.bfloat16 and torch.equal(x, start * (2 if rank == 1 else 6))
        y = x * 3
    else:
        x = start.requires_grad_()
        y = x * 2
    (y.sum() if rank == 2 else distributed.send_activations(y, rank + 1)).backward()
    assert grad(x).unique().item() == (18.0, 9.0, 3.0)[rank]
    flags, number = torch.tensor([[True, False]]), torch.tensor(7)
    if rank == 0:
        distributed.send_activations(flags, 1)
        distributed.send_activations(number, 1)
    if rank == 1:
        for sent in (flags, number):
            got = distributed.recv_activations(0)
            assert torch.equal(got, sent) and got.dtype == sent.dtype and not got.requires_grad


def benchmarks():
    """Where sizes do not divide."""
    rows = [benchmark.all_gather(4096), benchmark.reduce_scatter(2048), benchmark.send_recv(1024)]
    assert [len(each) for each in rows] == [3, 2, int(bmt.world_size() > 1)]
    assert [row.size for row in rows[0]] == [1024, 2048, 4096]
    if bmt.world_size() > 1:
        assert all(row.seconds > 0 and row.bandwidth > 0 for each in rows for row in each)
    assert all(
        one == rows for one in collectives.gather_objects(rows, world.current().mesh.world, "")
    )


@pytest.mark.parametrize(
    "program", [run_cases, of_one_number, second_gradients, of_the_root, activations]
)
def test_values_and_gradients_are_those_of_one_process(program):
    run_ranks(program, 3)


def verbs():
    rank, comm, size = bmt.rank(), config["comm"], bmt.world_size()
    mine = torch.tensor([rank + 1.0, rank + 2.0])
    stacked = torch.stack([torch.tensor([n + 1.0, n + 2.0]) for n in range(size)])
    wide = torch.stack([torch.arange(2.0 * size) + n for n in range(size)])
    last = size - 1

    def filled(verb, *args, numel=2, sent=mine):
        into = torch.full((numel,), -1.0)
        verb(sent, into, *args, comm)
        return into.tolist()

    for op, reduction in REDUCTIONS.items():
        whole = reduction(stacked).tolist()
        assert filled(nccl.allReduce, op) == whole
        assert filled(nccl.reduce, op, last) == (whole if rank == last else [-1.0, -1.0])
        part = filled(nccl.reduceScatter, op, sent=wide[rank])
        assert part == reduction(wide).chunk(size)[rank].tolist()
    in_place = mine.clone()
    nccl.allReduce(in_place, in_place, "sum", comm)
    assert in_place.tolist() == stacked.sum(0).tolist()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates typed storages, which old programs pass
        for of in (torch.Tensor.untyped_storage, torch.Tensor.storage, torch.Tensor.clone):
            gathered = torch.zeros(2 * size)
            nccl.allGather(of(mine), gathered if of is torch.Tensor.clone else of(gathered), comm)
            assert gathered.tolist() == stacked.flatten().tolist()
    assert filled(nccl.broadcast, last) == stacked[-1].tolist()
    ring = torch.zeros(2)
    nccl.groupStart()
    nccl.groupStart()
    nccl.send(mine.untyped_storage(), (rank + 1) % size, comm)
    nccl.groupEnd()
    nccl.recv(ring.untyped_storage(), (rank - 1) % size, comm)
    nccl.groupEnd()
    assert ring.tolist() == stacked[rank - 1].tolist()
    if rank == 0 and size > 1:
        nccl.send(mine, 1, comm)
    if rank == 1:
        nccl.recv(ring, 0, comm)
        assert ring.tolist() == stacked[0].tolist()
    assert [nccl.commCount(comm), nccl.commRank(comm)] == [size, rank]
    nccl.commDestroy(comm)


@pytest.mark.parametrize("ranks", [1, 3])
def test_nccl_verbs(ranks):
    run_ranks(verbs, ranks)


@on_ranks(4, init=MESH)
def test_groups_of_sends_and_receives_in_any_order():
    """Sends before receives, receives before sends, several to one peer, two communicators in
    orders that differ.
    """
    rank, comm, tp, pipe = bmt.rank(), config["comm"], config["tp_comm"], config["pipe_comm"]
    for receives_first in (True, rank % 2 == 0):
        got = [(peer, torch.empty(3)) for peer in range(4) for _ in range(2)]
        sent = [
            (peer, torch.full((3,), 100.0 * rank + 10 * peer + n))
            for peer in range(4)
            for n in (0, 1)
        ]
        todo = [(nccl.recv, got), (nccl.send, sent)]
        nccl.groupStart()
        for call, pairs in todo if receives_first else todo[::-1]:
            for peer, x in pairs:
                call(x, peer, comm)
        nccl.groupEnd()
        want = [100.0 * peer + 10 * rank + n for peer in range(4) for n in range(2)]
        assert [x[0].item() for _, x in got] == want
    along_tp, along_pipe, total = torch.empty(1), torch.empty(1), torch.ones(2)

    def exchange_along_tp():
        nccl.send(torch.tensor([rank + 0.5]), 1 - tp.index, tp)
        nccl.recv(along_tp, 1 - tp.index, tp)

    def exchange_along_pipe():
        nccl.recv(along_pipe, 1 - pipe.index, pipe)
        nccl.send(torch.tensor([rank + 0.25]), 1 - pipe.index, pipe)

    exchanges = [exchange_along_tp, exchange_along_pipe]
    nccl.groupStart()
    # a ring of ranks that wait for one another
    for exchange in exchanges if rank in (0, 3) else exchanges[::-1]:
        exchange()
    nccl.allReduce(total, total, "sum", comm)  # not deferred: ready at once
    nccl.groupEnd()
    found = [along_tp.item(), along_pipe.item(), *total.tolist()]
    assert found == [(rank ^ 1) + 0.5, (rank ^ 2) + 0.25, 4.0, 4.0]


@on_ranks(2)
def test_wrong_calls_are_explained():
    """They are explained on every rank, and leave nothing half done."""
    comm, x, y, nowhere = config["comm"], torch.ones(4), torch.ones(4), None
    sent: Any = nowhere
    storage = x.untyped_storage()

    def to_itself():
        nccl.groupStart()
        nccl.send(x, comm.index, comm)
        nccl.groupEnd()

    calls: dict[str, list[Callable[[], object]]] = {
        r"config\['comm'\].*": [
            lambda: nccl.allReduce(x, y, "sum", sent),
            lambda: nccl.allGather(x, y, sent),
            lambda: nccl.commCount(sent),
            lambda: nccl.commDestroy(sent),
        ],
        "0 to 1": [
            lambda: nccl.broadcast(x, y, 2, comm),
            lambda: nccl.broadcast(x, y, -1, comm),
            lambda: nccl.reduce(x, y, "sum", 2, comm),
            lambda: nccl.send(x, 2, comm),
            lambda: nccl.recv(x, -1, comm),
        ],
        r"rank 1: \(2, 2\)": [lambda: results.gather_result(torch.ones(2, 1 + bmt.rank()))],
        "expected|without": [
            lambda: nccl.allReduce(x, y, "mean", comm),
            lambda: nccl.reduce(x, y, "mean", 0, comm),
            lambda: nccl.reduceScatter(x, torch.ones(3), "sum", comm),
            lambda: nccl.reduceScatter(x, torch.ones(2), "mean", comm),
            lambda: nccl.send(x, comm.index, comm),
            lambda: nccl.recv(x, comm.index, comm),
            lambda: nccl.allReduce(torch.ones(2, 2).t()[:1], y, "sum", comm),
            lambda: nccl.allReduce(x, torch.empty(4, device="meta"), "sum", comm),
            lambda: nccl.allGather([1.0], y, comm),  # type: ignore[arg-type]
            lambda: nccl.allGather(x, torch.ones(5), comm),
            lambda: nccl.allReduce(x, x.double(), "sum", comm),
            lambda: nccl.allReduce(storage, storage, "sum", comm),
            to_itself,
            nccl.groupEnd,
            lambda: distributed.all_reduce(x, "mean"),
            lambda: distributed.reduce_scatter(torch.ones(3), "sum"),
            lambda: distributed.reduce_scatter(torch.ones(3), "max"),
            lambda: distributed.broadcast(x, 2),
            lambda: distributed.all_gather(x, "world"),  # type: ignore[arg-type]
            lambda: results.gather_result([1]),  # type: ignore[arg-type]
            lambda: benchmark.all_gather(3),
        ],
    }
    for match, each in calls.items():
        for call in each:
            with pytest.raises(ConfigurationError, match=match) as caught:
                call()
            assert "expected" in str(caught.value) or "without" in str(caught.value)
            total = torch.full((4,), -1.0)
            nccl.allReduce(x, total, "sum", comm)
            assert total.tolist() == [2.0] * 4


def losses_and_rows():
    rank, size = bmt.rank(), bmt.world_size()
    results.synchronize()
    loss = torch.tensor(float(rank), requires_grad=True)
    losses = [
        results.sum_loss(loss * 2).detach() / 2,
        results.sum_loss(rank),
        results.sum_loss(torch.tensor(rank)),
        results.sum_loss(torch.tensor([rank, 1.0], dtype=torch.float16)),
    ]
    assert [float(x.flatten()[0]) for x in losses] == [(size - 1) / 2] * 4
    assert [x.dtype for x in losses] == [torch.float32] * 3 + [torch.float16]
    assert [x.dim() for x in losses] == [0, 0, 0, 1]

    def turned(rank):
        return torch.randn(4, 3, generator=torch.Generator().manual_seed(rank)).t()

    some = results.gather_result(torch.full((2 * (rank == 1), 3), 5.0, dtype=torch.bfloat16))
    assert some.shape == (2 * (size > 1), 3) and some.dtype == torch.bfloat16
    rows = results.gather_result(torch.arange(rank + 1).int())
    assert rows.tolist() == [n for other in range(size) for n in range(other + 1)]
    flags = results.gather_result(torch.tensor(rank == 1))
    assert flags.tolist() == [other == 1 for other in range(size)]
    assert results.gather_result(torch.zeros(0, 2)).shape == (0, 2)
    parts = torch.cat([turned(other) for other in range(size)])
    assert torch.equal(results.gather_result(turned(rank)), parts)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("program", [losses_and_rows, benchmarks])
def test_results(program, ranks, capsys):
    run_ranks(program, ranks)
    if program is benchmarks:
        printed = capsys.readouterr().out
        for name in ("all_gather", "reduce_scatter", "send_recv"):
            assert printed.count(f"{name}, {ranks} ranks") == 1  # on rank 0
        assert "4 KiB" in printed and "GB/s" in printed


CONFIG = {  # of a run of four ranks, as all of them see it
    "world_size": 4,
    "local_size": 4,
    "initialized": True,
    "pipe_size": 2,
    "pipe_enabled": True,
    "tp_size": 2,
    "tp_zero_size": 2,
    "zero_size": 4,
    "micros": 2,
    "num_micro_batches": 2,
    "zero_level": 3,
    "save_param_to_cpu": True,
    "loss_scale_factor": 2,
    "loss_scale_steps": 1024,
}
SIZES = {
    "comm": 4,
    "zero_comm": 4,
    "tp_comm": 2,
    "tp_zero_comm": 2,
    "pipe_comm": 2,
    "pp_zero_comm": 2,
    "pp_tp_zero_comm": 1,
}


def old_use_of_config():
    """What programs of 0.1.x and 1.0.1 do with it."""
    rank, comm, topology = bmt.rank(), bmt.config["comm"], bmt.config["topology"]
    gathered = distributed.all_gather(torch.tensor([rank]), bmt.config["zero_comm"])
    assert gathered.flatten().tolist() == [0, 1, 2, 3]
    total = torch.ones(1)
    nccl.allReduce(total, total, "sum", bmt.config["tp_zero_comm"])
    assert total.item() == 2.0
    names = ("pipe", "zero", "tp_zero", "tp")
    found = [(topology.get_group_id(name), topology.get_group_rank(name)) for name in names]
    row, column = rank // 2, rank % 2
    assert found == [(column, row), (0, rank), (column, row), (row, column)]
    with pytest.raises(ConfigurationError, match="unknown group 'dp'"):
        topology.get_group_id("dp")
    assert (topology.stage_id, topology.stages, topology.pipe_idx) == (row, 2, column)
    seen = dict(bmt.config)
    numbers = {name: value for name, value in seen.items() if isinstance(value, int)}
    own = {"rank": rank, "local_rank": rank, "zero_rank": rank, "tp_rank": column}
    assert numbers == {**CONFIG, **own, "tp_zero_rank": row}
    assert {name: x.size for name, x in seen.items() if isinstance(x, Axis)} == SIZES
    assert seen["load_stream"] is None and seen["calc_stream"] is None and comm is seen["comm"]
    world.shutdown()
    return sorted(seen), {name: x for name, x in bmt.config.items() if name != "topology"}


def test_what_old_programs_do_with_config():
    before = {name: value for name, value in config.items() if name != "topology"}
    for names, after in run_ranks(old_use_of_config, 4, init=MESH):
        assert names == sorted(config) and len(names) == 33
        assert after == before  # the run is over: one process again


def test_config_before_the_run():
    found = [config[name] for name in ("initialized", "rank", "world_size", "comm")]
    assert found == [False, 0, 1, None]
    assert len(config) == len(list(config)) and "rank" in config and "spam" not in config
    with pytest.raises(
        UnknownNameError, match=r"config does not know .* \(nearest: 'world_size'\)"
    ):
        config["word_size"]
    for name, error in (("rank", ConfigurationError), ("save_param_to_cpu", NotInitializedError)):
        with pytest.raises(error, match="init_distributed"):
            config[name] = False
    assert config.get("spam", 5) == 5 and config.get("tp_size") == 1
    assert {**config} == dict(config.items()) and "'world_size': 1" in repr(config)
    assert config["topology"].get_group_id("tp") == 0
    calls = [
        results.synchronize,
        lambda: results.sum_loss(1.0),
        lambda: distributed.all_gather(torch.ones(1)),
        nccl.groupStart,
    ]
    for call in calls:
        with pytest.raises(NotInitializedError, match="init_distributed"):
            call()


def printing(folder):
    """The last rank comes late: nobody leaves the barrier before it has arrived."""
    bmt.print_rank("first", "second", sep="+")
    bmt.print_rank("from one", rank=1)
    bmt.print_block(f"title of {bmt.rank()}", "content")
    bmt.print_dict(f"numbers of {bmt.rank()}", {"lr": 0.5})
    bmt.see_memory(f"memory of {bmt.rank()}", detail=True)
    if bmt.rank() == 1:
        time.sleep(0.3)
        (folder / "arrived").touch()
    bmt.synchronize()
    assert os.listdir(folder) == ["arrived"]


PRINTED = (
    "first+second",
    "title of 0",
    "content",
    "numbers of 0",
    "lr",
    "memory of 0: peak resident",
)


def test_printing_on_one_rank(tmp_path, capsys):
    run_ranks(printing, 2, tmp_path)
    zero, one = capsys.readouterr().out.split("-- rank 1 printed:")
    assert one.split() == ["from", "one"] and "of 1" not in zero
    assert [zero.count(text) for text in PRINTED] == [1] * len(PRINTED)


def num_gloo_threads():
    tasks = pathlib.Path("/proc/self/task").iterdir()
    names = [task.joinpath("comm").read_text() for task in tasks]
    return sum(name.startswith("pt_gloo_runloop") for name in names)


@pytest.mark.skipif(
    not pathlib.Path("/proc/self/task").exists(),
    reason="reads the names of threads from Linux's /proc",
)
@on_ranks(2)
def test_no_thread_of_gloo_outlives_the_run():
    """One that gives back a tensor when the interpreter ends would abort the process. Gloo's
    threads are there while the run lasts, and gone after it though a model keeps the axes.
    """
    block = bmt.Block(torch.nn.Linear(3, 3))
    block(torch.ones(2, 3, requires_grad=True)).sum().backward()
    assert num_gloo_threads() > 0
    world.shutdown()
    with pytest.raises(NotInitializedError, match="the run has ended"):
        block(torch.ones(2, 3))
    assert num_gloo_threads() == 0
