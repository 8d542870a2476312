"""Tensor-parallel layers against the whole computation of all tensor ranks in one process: values,
gradients, refusals.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.ranks import models
from tests.ranks.runner import run_ranks
from torch import nn

import bmtrain as bmt
from bmtrain.distributed import overlap, tensor_parallel
from bmtrain.errors import ConfigurationError
from bmtrain.nn import (
    ColumnParallelLinear,
    Linear,
    OpLinear,
    OpParallelLinear,
    ReduceType,
    RowParallelLinear,
    VPEmbedding,
)
from bmtrain.recompute.level import Level
from bmtrain.runtime import world

MESHES = [(2, 2), (4, 4), (4, 2)]  # world size, tp_size
IN, OUT, VOCAB = 8, 12, 16

Tensors = list[torch.Tensor]
Call = Callable[[torch.Tensor], torch.Tensor]
Parameters = dict[str, torch.Tensor]
#: what the ranks of one tensor-parallel group make of what each passes and of the whole parameters
Answer = Callable[[Tensors, Parameters], Tensors]


def column(gather_input: bool, gather_output: bool) -> Answer:
    def answer(inputs: Tensors, params: Parameters) -> Tensors:
        size = len(inputs)
        weights = params["weight"].chunk(size)
        biases = params["bias"].chunk(size) if "bias" in params else [None] * size
        rows = torch.cat(inputs)
        parts = [
            F.linear(rows if gather_input else x, w, b)
            for x, w, b in zip(inputs, weights, biases, strict=True)
        ]
        return [torch.cat(parts, -1)] * size if gather_output else parts

    return answer


def row(split_input: bool, all_reduce: bool) -> Answer:
    def answer(inputs: Tensors, params: Parameters) -> Tensors:
        size = len(inputs)
        own = [x.chunk(size, -1)[rank] if split_input else x for rank, x in enumerate(inputs)]
        total = sum(
            F.linear(x, w) for x, w in zip(own, params["weight"].chunk(size, 1), strict=True)
        )
        assert isinstance(total, torch.Tensor)
        bias = params.get("bias", torch.zeros(()))
        return [total + bias] * size if all_reduce else [part + bias for part in total.chunk(size)]

    return answer


def lookup(inputs: Tensors, params: Parameters) -> Tensors:
    return [F.embedding(ids, params["weight"]) for ids in inputs]


def tp_size() -> int:
    return int(bmt.config["tp_size"])


def group_of(rank: int) -> range:
    """The ranks of the tensor-parallel group of `rank`."""
    return range(rank // tp_size() * tp_size(), (rank // tp_size() + 1) * tp_size())


def seeded(*key: int) -> torch.Generator:
    return torch.Generator().manual_seed(hash(key) % 2**31)


def factor(out: torch.Tensor, rank: int) -> torch.Tensor:
    """What multiplies a rank's output in its loss: other numbers on every rank."""
    return torch.randn(out.shape, generator=seeded(7, rank), dtype=out.dtype).to(out.device)


def whole_gradients(module: nn.Module) -> Parameters:
    """Every parameter's whole gradient, put together by the module's own state dict.

    The module's values are lost.
    """
    with torch.no_grad():
        for param in module.parameters():
            assert param.grad is not None
            param.copy_(param.grad)
    return {name: value.clone() for name, value in module.state_dict().items()}


def check(
    module: nn.Module,
    inputs: Sequence[torch.Tensor],
    answer: Answer,
    what: str,
    call: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> None:
    """`module` on this rank's of all ranks' `inputs` gives what `answer` says, and the gradients of
    the sum of all losses.
    """
    what = f"{what}, tp_size {tp_size()} of {bmt.world_size()} ranks"
    rank = bmt.rank()
    # on the CPU, as the answer
    params = {name: value.clone().requires_grad_() for name, value in module.state_dict().items()}
    plain = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
    outs: Tensors = []
    for first in range(0, bmt.world_size(), tp_size()):
        outs += answer(plain[first : first + tp_size()], params)
    losses = [(out * factor(out, r)).sum() for r, out in enumerate(outs)]
    torch.stack(losses).sum().backward()
    own = inputs[rank].to(bmt.device(), copy=True).requires_grad_(plain[rank].requires_grad)
    out = (call or module)(own)
    (out * factor(out, rank)).sum().backward()
    models.assert_same(out.detach().cpu(), outs[rank].detach(), what)
    if own.requires_grad:
        assert own.grad is not None and plain[rank].grad is not None
        models.assert_same(own.grad.cpu(), plain[rank].grad, f"{what}: gradient of the input")
    expected = {name: value.grad for name, value in params.items()}
    models.assert_same_dicts(whole_gradients(module), expected, f"{what}: gradients")


def rows_of_all(*shape: int, alike: bool = False) -> Tensors:
    """What every rank passes; `alike` within each tensor-parallel group."""
    return [
        torch.randn(shape, generator=seeded(3, group_of(r)[0] if alike else r))
        for r in range(bmt.world_size())
    ]


def started(module: nn.Module) -> nn.Module:
    """With its first values, and biases that are not zero."""
    bmt.init_parameters(module)
    values = {
        name: value if value.any() else torch.linspace(-1, 1, len(value))
        for name, value in module.state_dict().items()
    }
    module.load_state_dict(values)
    return module


def made(kind: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
    return started(kind(*args, **kwargs))


def columns() -> None:
    for gather_input, gather_output, bias in itertools.product((False, True), repeat=3):
        for chunks, shape in (
            (1, (6, IN)),
            (2, (6, IN)),
            (4, (6, IN)),
            (3, (2, 3, IN)),
            (2, (3, 1, 5, IN)),
            (2, (5, IN)),
            (2, (0, IN)),
        ):
            module = made(
                ColumnParallelLinear, IN, OUT, bias, None, gather_output, gather_input, chunks
            )
            inputs = rows_of_all(*shape, alike=not gather_input)
            check(
                module,
                inputs,
                column(gather_input, gather_output),
                f"{module} {shape} chunks {chunks}",
            )


def rows() -> None:
    size = tp_size()
    for split_input, all_reduce, bias in itertools.product((False, True), repeat=3):
        for chunks, shape in (
            (1, (2,)),
            (2, (2,)),
            (4, (6,)),
            (3, (1, 3)),
            (2, (3, 1, 5)),
            (2, (5,)),
            (2, (0,)),
        ):
            module = made(RowParallelLinear, IN, OUT, bias, None, split_input, all_reduce, chunks)
            features = IN if split_input else IN // size
            inputs = rows_of_all(size * shape[0], *shape[1:], features)
            check(module, inputs, row(split_input, all_reduce), f"{module} {shape} chunks {chunks}")


def embeddings() -> None:
    for shape in ((6,), (2, 3), (), (0,), (2, 1, 3)):
        ids = [
            torch.randint(0, VOCAB, shape, generator=seeded(5, r)) for r in range(bmt.world_size())
        ]
        check(made(VPEmbedding, VOCAB, IN), ids, lookup, f"lookup {shape}")
        check(
            made(VPEmbedding, VOCAB, IN), [x.int() for x in ids], lookup, f"lookup of int32 {shape}"
        )
    for shape in ((6, IN), (2, 3, IN)):
        head = made(VPEmbedding, VOCAB, IN)
        check(
            head,
            rows_of_all(*shape),
            column(True, False),
            f"projection {shape}",
            functools.partial(head, projection=True),
        )


def unsplit() -> None:
    for bias in (False, True):
        check(
            made(Linear, IN, OUT, bias),
            rows_of_all(2, 3, IN),
            lambda xs, p: [F.linear(x, **p) for x in xs],
            "Linear",
        )


@pytest.mark.parametrize(("world_size", "tp_size"), [(1, 1), *MESHES])
@pytest.mark.parametrize("program", [columns, rows, embeddings, unsplit])
def test_layers(program: Callable[[], None], world_size: int, tp_size: int) -> None:
    """All flags, row shapes and chunk counts; one rank too."""
    run_ranks(program, world_size, init={"tp_size": tp_size})


class Layer(nn.Module):
    """Column, then row: the shape of a feed-forward layer; and an ordinary norm before it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(IN)
        self.up, self.down = ColumnParallelLinear(IN, OUT), RowParallelLinear(OUT, IN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def layer(inputs: Tensors, p: Parameters) -> Tensors:
    outs = []
    for x in inputs:
        h = torch.tanh(
            F.linear(
                F.layer_norm(x, (IN,), p["norm.weight"], p["norm.bias"]),
                p["up.weight"],
                p["up.bias"],
            )
        )
        outs.append(x + F.linear(h, p["down.weight"], p["down.bias"]))
    return outs


def blocks() -> None:
    for level, recompute in itertools.product((2, 3), (False, True)):
        block = bmt.Block(Layer(), use_checkpoint=recompute, zero_level=level)
        started(block)
        check(block, rows_of_all(4, 3, IN), layer, f"ZeRO-{level}, recompute={recompute}")


@pytest.mark.parametrize(("world_size", "tp_size"), MESHES)
def test_blocks(world_size: int, tp_size: int) -> None:
    """Inside a Block: with ZeRO-3 the saved weights are found again in a buffer gathered anew."""
    run_ranks(blocks, world_size, init={"tp_size": tp_size})


def compiled(backend: str, level: int, recompute: bool) -> None:
    block = bmt.Block(Layer(), use_checkpoint=recompute, zero_level=level)
    started(block)
    block.compile(backend=backend, fullgraph=True)
    for _ in range(2):  # a second call of compiled code
        block.zero_grad()
        values = {name: value.clone() for name, value in block.state_dict().items()}
        check(
            block, rows_of_all(4, 3, IN), layer, f"{backend}, ZeRO-{level}, recompute={recompute}"
        )
        block.load_state_dict(values)
    assert block._runner.is_compiled and block._runner.recomputing(Level.BLOCK) is not None


@pytest.mark.parametrize(("level", "recompute"), [(2, False), (3, False), (3, True)])
def test_compiles_as_one_graph(level: int, recompute: bool) -> None:
    """No break at the operations, recomputation inside the graph, and the same numbers."""
    run_ranks(compiled, 2, "aot_eager", level, recompute, init={"tp_size": 2})


class Unwanted:
    """Raises when it is called."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a collective on one tensor-parallel rank")


def alone() -> None:
    """Without tensor parallelism the layers are the plain ones to the last bit, and the tensor axis
    is not used.
    """
    for name in (
        "gather_rows",
        "scatter_rows",
        "all_reduce",
        "gather_linear",
        "linear_scatter",
        "linear_reduce",
        "check_alike",
    ):
        setattr(tensor_parallel, name, Unwanted())
    x = rows_of_all(4, 3, IN)[bmt.rank()]
    for module in (
        made(ColumnParallelLinear, IN, OUT),
        made(RowParallelLinear, IN, OUT, split_input=True),
        made(Linear, IN, OUT),
    ):
        assert torch.equal(module(x), F.linear(x, **module.state_dict()))
    table = made(VPEmbedding, VOCAB, IN)
    assert torch.equal(table(torch.arange(VOCAB)), table.state_dict()["weight"])
    assert torch.equal(table(x, projection=True), F.linear(x, table.state_dict()["weight"]))


@pytest.mark.parametrize("world_size", [1, 2])
def test_one_tensor_rank_is_plain(world_size: int) -> None:
    run_ranks(alone, world_size)


def first_values() -> list[Parameters]:
    torch.manual_seed(4)
    out = []
    for kind in (ColumnParallelLinear, RowParallelLinear, Linear, VPEmbedding):
        module = kind(16, OUT)
        bmt.init_parameters(module)
        out.append({name: value.clone() for name, value in module.state_dict().items()})
    module = Linear(16, OUT, init_method=bmt.ParameterInitializer(nn.init.constant_, 3.0))
    bmt.init_parameters(module)
    return [*out, dict(module.state_dict())]


def test_first_values_do_not_depend_on_the_split() -> None:
    """The same whole weights for any tp_size, in the range that torch's layers take."""
    plain = run_ranks(first_values, 1)[0]
    for world_size, tp_size in MESHES:
        for values in run_ranks(first_values, world_size, init={"tp_size": tp_size}):
            for got, want in zip(values, plain, strict=True):
                models.assert_same_dicts(got, want, f"tp_size {tp_size}", tolerance=0.0)
    for linear in plain[:3]:
        assert set(linear) == {"weight", "bias"}
        assert 0.8 * 16**-0.5 < linear["weight"].abs().max() <= 16**-0.5
        assert not linear["bias"].any()
    assert plain[3]["weight"].std().sub(1).abs() < 0.2
    assert (plain[4]["weight"] == 3.0).all()


def operations() -> None:
    """The operations by themselves, on plain tensors, as BMTrain programs call them."""
    rank, size = bmt.rank(), tp_size()
    weight, bias = torch.randn(OUT, IN, generator=seeded(1)), torch.randn(OUT, generator=seeded(2))
    inputs = rows_of_all(4, IN)
    assert torch.equal(OpLinear.apply(inputs[0], weight, bias), F.linear(inputs[0], weight, bias))
    own_rows = OpParallelLinear.apply(
        inputs[rank], weight.chunk(size)[rank], bias.chunk(size)[rank], True, False, False, None, 2
    )
    whole = F.linear(torch.cat(inputs), weight, bias)
    models.assert_same(own_rows, whole.chunk(size, 1)[rank], "gathered input")
    for kind, want in (
        (ReduceType.ALL_REDUCE, whole),
        (ReduceType.REDUCE_SCATTER, whole.chunk(size)[rank]),
    ):
        got = OpParallelLinear.apply(
            torch.cat(inputs), weight.chunk(size, 1)[rank], bias, False, False, True, kind, 2
        )
        models.assert_same(got, want, str(kind))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = OpParallelLinear.apply(
            inputs[rank], weight.chunk(size)[rank], bias.chunk(size)[rank], True
        )
    models.assert_same(low, whole.chunk(size, 1)[rank].bfloat16(), "autocast", tolerance=2**-6)
    x, w = inputs[rank].clone().requires_grad_(), weight.chunk(size)[rank].clone()
    OpParallelLinear.apply(x, w, None, True).sum().backward()  # a frozen weight
    models.assert_same(x.grad, weight.sum(0).expand(4, IN), "gradient of the input alone")
    w.requires_grad_()
    # an input without gradient
    OpParallelLinear.apply(inputs[rank], w, None, True).sum().backward()
    models.assert_same(
        w.grad, torch.cat(inputs).sum(0).expand(w.shape), "gradient of the weight alone"
    )


def test_operations() -> None:
    """Direct calls; autocast; frozen weights and inputs without gradient."""
    run_ranks(operations, 2, init={"tp_size": 2})


def traffic() -> None:
    """What is under way while what is multiplied, told by the order in which work is issued and
    awaited.
    """
    log: list[str] = []
    current = world.current().service(overlap.Overlap)

    def noting(module: Any, name: str, word: str) -> None:
        original = getattr(module, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            log.append(word)
            return original(*args, **kwargs)

        setattr(module, name, noted)

    noting(overlap, "_multiply", "multiply")
    noting(overlap, "gather_shards", "gather")
    noting(overlap, "reduce_shards", "reduce")
    noting(current._streams, "compute_waits", "wait")
    x, weight = torch.randn(4, IN, requires_grad=True), torch.randn(OUT, IN, requires_grad=True)
    out = tensor_parallel.gather_linear(x, weight, None, 2)
    assert log == ["gather", "gather", "multiply", "wait", "multiply", "wait", "multiply"], log
    log.clear()
    out.sum().backward()
    # The gather of x comes first and is awaited by the gradient of the weight; the reduction of the
    # gradient of x last.
    assert log == [
        "gather",
        *["multiply"] * 2,
        "reduce",
        *["multiply"] * 2,
        "reduce",
        "wait",
        "wait",
    ], log
    log.clear()
    out = tensor_parallel.linear_scatter(x, weight, False, 2)
    assert log == [*["multiply"] * 2, "reduce", *["multiply"] * 2, "reduce", "wait"], log
    log.clear()
    out.sum().backward()
    assert log == [
        "gather",
        "gather",
        "multiply",
        "wait",
        "multiply",
        "wait",
        "multiply",
        "wait",
    ], log


def test_rows_travel_beside_multiplication() -> None:
    """Own rows are multiplied before the first are awaited; a chunk is summed while the next is
    multiplied.
    """
    run_ranks(traffic, 2, init={"tp_size": 2})


def churning(num_rounds: int, rows: int, width: int) -> None:
    """Nothing is read before it is there or overwritten while it travels: memory that is given back
    is spoiled at once.
    """

    def spoil() -> None:
        for numel in (rows * width, tp_size() * rows * width, rows * width // 2):
            torch.full((numel,), torch.nan, device=bmt.device())

    draw = torch.Generator(bmt.device()).manual_seed(bmt.rank())
    axis = tensor_parallel.axis()
    for number in range(num_rounds):
        x, up, down = (
            torch.randn(shape, generator=draw, device=bmt.device(), requires_grad=True)
            for shape in ((rows, width), (2 * width, width), (width, 2 * width))
        )
        answers = []
        for overlapped in (True, False):
            x.grad = up.grad = down.grad = None
            spoil()
            if overlapped:
                h = tensor_parallel.gather_linear(x * 1, up, None, 4)
                spoil()
                out = tensor_parallel.linear_scatter(torch.tanh(h / width), down, False, 4)
            else:
                h = F.linear(bmt.distributed.all_gather(x * 1, axis).flatten(0, 1), up)
                out = bmt.distributed.reduce_scatter(
                    F.linear(torch.tanh(h / width), down), "sum", axis
                )
            spoil()
            (out * torch.linspace(-1, 1, width, device=out.device)).sum().backward()
            spoil()
            answers.append([out.detach(), x.grad, up.grad, down.grad])
        for got, want in zip(*answers, strict=True):
            assert got is not None and want is not None
            models.assert_same(got, want, f"round {number}", tolerance=1e-4)


@pytest.mark.parametrize("tp_size", [2, 4])
def test_memory_is_held_while_it_travels(tp_size: int) -> None:
    """On a CPU only the arithmetic of the test; tests/gpu runs the same with rows enough for an
    overlap.
    """
    run_ranks(churning, tp_size, 2, 8, 16, init={"tp_size": tp_size})


@pytest.mark.parametrize(
    ("rows", "wanted", "count"),
    [(12, 1, 1), (12, 2, 2), (12, 5, 4), (7, 4, 1), (7, 7, 7), (2, 8, 2), (0, 4, 1), (1, 2, 1)],
)
def test_chunks_are_equal(rows: int, wanted: int, count: int) -> None:
    assert overlap.num_equal_chunks(rows, wanted) == count


def bad_layers() -> None:
    for make, words in (
        (
            lambda: ColumnParallelLinear(4, 7),
            r"ColumnParallelLinear: out_features is 7.*tp_size=2.*multiple of 2.*8",
        ),
        (lambda: RowParallelLinear(7, 4), r"RowParallelLinear: in_features is 7.*tp_size=2.*8"),
        (lambda: VPEmbedding(7, 4), r"VPEmbedding: vocab_size is 7.*tp_size=2.*8"),
        (lambda: Linear(0, 4), r"Linear: in_features is 0: expected a whole number above 0"),
        (lambda: ColumnParallelLinear(4, 4, async_gather_chunks=0), r"async_gather_chunks is 0"),
        (lambda: VPEmbedding(4, 2.5), r"embedding_size is 2.5"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ConfigurationError, match=words):
            make()


def bad_calls() -> None:
    rank = bmt.rank()
    into, out, table = (
        made(ColumnParallelLinear, IN, OUT),
        made(RowParallelLinear, OUT, IN),
        made(VPEmbedding, VOCAB, IN),
    )
    every = made(RowParallelLinear, OUT, IN, split_input=True, all_reduce_output=True)
    x, h = torch.randn(4, IN), torch.randn(4, OUT // 2)
    wrong: list[tuple[Callable[[], Any], str]] = [
        (lambda: into(x[: 4 - rank]), r"rank 0: .*\(4, 8\).*rank 1: .*\(3, 8\).*pad or cut"),
        (lambda: into(x.double() if rank else x), r"rank 0: .*float32.*rank 1: .*float64"),
        (lambda: into(x.clone().requires_grad_(bool(rank))), r"rank 1: .*float32 with gradient"),
        (lambda: out(h[: 4 - 2 * rank]), r"rank 0: .*\(4, 6\).*rank 1: .*\(2, 6\)"),
        (lambda: every(torch.randn(4 + rank, OUT)), r"rank 0: .*\(4, 12\).*rank 1: .*\(5, 12\)"),
        (lambda: table(torch.arange(4 + rank)), r"rank 0: .*\(4,\).*rank 1: .*\(5,\)"),
        (lambda: table(x[: 4 - rank], projection=True), r"rank 0: .*\(4, 8\).*rank 1: .*\(3, 8\)"),
        (
            lambda: into(x) if rank else table(torch.arange(4)),
            r"rank 0: gather_rows.*rank 1: gather_linear",
        ),
        (
            lambda: into(torch.randn(4, IN + 1)),
            r"\(4, 9\) for a weight of \(6, 8\).*expected \(rows, \.\.\., 8\)",
        ),
        (lambda: into(torch.randn(IN)), r"shape \(8,\).*expected \(rows, \.\.\., 8\)"),
        (lambda: into(x.double()), r"float64 for a weight of torch\.float32.*equal dtypes"),
        (lambda: out(torch.randn(4, OUT)), r"\(4, 12\).*expected \(rows, \.\.\., 6\).*split_input"),
        (lambda: every(h), r"\(4, 6\).*expected \(rows, \.\.\., 12\)"),
        (lambda: out(h[:3]), r"3 rows \(dim 0\).*tp_size=2.*multiple of 2"),
        (
            lambda: table(torch.tensor([0, VOCAB])),
            r"id 16 \(2 of 4 ids of the tensor-parallel ranks are out of range\).*0 to 15",
        ),
        (
            lambda: table(torch.tensor([-1, 2]) if rank else torch.tensor([1, 2])),
            r"id -1 \(1 of 4 ids",
        ),
        (lambda: table(torch.ones(3)), r"ids of torch\.float32: expected integers"),
        (
            lambda: OpParallelLinear.apply(x, x, reduce_output_type="sum"),  # type: ignore[arg-type]
            r"reduce_output_type is 'sum'.*ALL_REDUCE",
        ),
        (
            lambda: OpParallelLinear.apply(x, x, split_input=True),
            r"split_input without reduce_output_type",
        ),
        (
            lambda: OpParallelLinear.apply(x, x, None, True, False, False, ReduceType.ALL_REDUCE),
            r"gather_input with",
        ),
        (
            lambda: OpParallelLinear.apply(x, x, None, False, True, True, ReduceType.ALL_REDUCE),
            r"gather_output with reduce_output_type: sums have all features",
        ),
    ]
    for call, words in wrong:
        with pytest.raises(ConfigurationError, match=words):
            call()
    into(x)  # the ranks are still together


@pytest.mark.parametrize("program", [bad_layers, bad_calls])
def test_bad_input_is_refused_on_every_rank(program: Callable[[], None]) -> None:
    """With an error that names it, where the ranks differ and where all are wrong alike; nothing
    hangs.
    """
    run_ranks(program, 2, init={"tp_size": 2}, timeout=20)
