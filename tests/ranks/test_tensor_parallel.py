"""Tensor-parallel layers against the whole computation of all tensor ranks in one process: values,
gradients, refusals.
"""

import functools
import itertools
import warnings
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from tests.ranks import models, test_compile
from tests.ranks.runner import on_ranks, run_ranks
from tests.tensors import grad_of
from torch import nn

import bmtrain as bmt
from bmtrain.compile import backend
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

IN, OUT, VOCAB = 8, 12, 16


def column(gather_input, gather_output, dim=0):
    def answer(inputs, params):
        size = len(inputs)
        given = [torch.cat(inputs, dim)] * size if gather_input else inputs
        parts = [F.linear(x, **params).chunk(size, -1)[rank] for rank, x in enumerate(given)]
        return [torch.cat(parts, -1)] * size if gather_output else parts

    return answer


def row(split_input, all_reduce):
    def answer(inputs, params):
        size = len(inputs)
        own = [x.chunk(size, -1)[rank] if split_input else x for rank, x in enumerate(inputs)]
        total = F.linear(torch.cat(own, -1), **params)
        return [total] * size if all_reduce else list(total.chunk(size))

    return answer


def lookup(inputs, params):
    return [F.embedding(ids, params["weight"]) for ids in inputs]


def tp_size():
    return int(bmt.config["tp_size"])


def seeded(*key):
    return torch.Generator().manual_seed(hash(key) % 2**31)


def factor(out, rank):
    """What multiplies a rank's output in its loss: other numbers on every rank."""
    return torch.randn(out.shape, generator=seeded(7, rank), dtype=out.dtype).to(out.device)


def whole_gradients(module):
    """Every parameter's whole gradient, put together by the module's own state dict.

    The module's values are lost.
    """
    with torch.no_grad():
        for param in module.parameters():
            param.copy_(grad_of(param))
    return {name: value.clone() for name, value in module.state_dict().items()}


def check(module, inputs, answer, what, call=None):
    """`module` on this rank's of all ranks' `inputs` gives what `answer` says, and the gradients of
    the sum of all losses.
    """
    what = f"{what}, tp_size {tp_size()} of {bmt.world_size()} ranks"
    rank = bmt.rank()
    # on the CPU, as the answer
    params = {name: value.clone().requires_grad_() for name, value in module.state_dict().items()}
    plain = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
    outs = []
    for first in range(0, bmt.world_size(), tp_size()):
        outs += answer(plain[first : first + tp_size()], params)
    losses = [(out * factor(out, r)).sum() for r, out in enumerate(outs)]
    torch.stack(losses).sum().backward()
    own = inputs[rank].to(bmt.device(), copy=True).requires_grad_(plain[rank].requires_grad)
    out = (call or module)(own)
    (out * factor(out, rank)).sum().backward()
    models.assert_same(out.detach().cpu(), outs[rank].detach(), what)
    if own.requires_grad:
        models.assert_same(grad_of(own).cpu(), plain[rank].grad, f"{what}: gradient of the input")
    expected = {name: value.grad for name, value in params.items()}
    models.assert_same_dicts(whole_gradients(module), expected, f"{what}: gradients")


def rows_of_all(*shape, alike=False):
    """What every rank passes; `alike` within each tensor-parallel group."""
    return [
        torch.randn(shape, generator=seeded(3, r // tp_size() if alike else r))
        for r in range(bmt.world_size())
    ]


def started(module):
    """With its first values, and biases that are not zero."""
    bmt.init_parameters(module)
    values = {
        name: value if value.any() else torch.linspace(-1, 1, len(value))
        for name, value in module.state_dict().items()
    }
    module.load_state_dict(values)
    return module


def made(kind, *args, **kwargs):
    return started(kind(*args, **kwargs))


# Chunks and shapes of rows; each set of flags meets every third one.
SHAPES = [*((1, (2,)), (2, (2,)), (4, (6,)), (3, (1, 3))), *((2, (3, 1, 5)), (2, (5,)), (2, (0,)))]
FLAGS = list(itertools.product((False, True), repeat=3))


# As many chunks as are asked for, however little they compute.
in_all_chunks = mock.patch.object(overlap, "LEAST_WORK", 1)


@in_all_chunks
def columns():
    for number, (gather_input, gather_output, bias) in enumerate(FLAGS):
        for chunks, shape in SHAPES[number % 3 :: 3]:
            module = made(
                ColumnParallelLinear, IN, OUT, bias, None, gather_output, gather_input, chunks
            )
            inputs = rows_of_all(*shape, IN, alike=not gather_input)
            answer = column(gather_input, gather_output)
            check(module, inputs, answer, f"{module} {shape} chunks {chunks}")


@in_all_chunks
def rows():
    size = tp_size()
    for number, (split_input, all_reduce, bias) in enumerate(FLAGS):
        for chunks, shape in SHAPES[number % 3 :: 3]:
            module = made(RowParallelLinear, IN, OUT, bias, None, split_input, all_reduce, chunks)
            features = IN if split_input else IN // size
            inputs = rows_of_all(size * shape[0], *shape[1:], features)
            check(module, inputs, row(split_input, all_reduce), f"{module} {shape} chunks {chunks}")


def embeddings():
    for shape in ((6,), (2, 3), (), (0,), (2, 1, 3)):
        ids = [
            torch.randint(0, VOCAB, shape, generator=seeded(5, r)) for r in range(bmt.world_size())
        ]
        if len(shape) == 1:
            ids = [x.int() for x in ids]
        check(made(VPEmbedding, VOCAB, IN), ids, lookup, f"lookup {shape}")
    for sizes in ((6, IN), (2, 3, IN), (3, 1, 2, IN)):
        head = made(VPEmbedding, VOCAB, IN)
        call = functools.partial(head, projection=True)
        answer = column(True, False, int(len(sizes) > 2))  # sequences come whole
        check(head, rows_of_all(*sizes), answer, f"projection {sizes}", call)
        assert call(rows_of_all(*sizes)[bmt.rank()].to(bmt.device())).is_contiguous()


@on_ranks(4, init={"tp_size": 2})
def test_layers():
    """All flags, row shapes and chunk counts; a layer that is not split."""
    for program in (columns, rows, embeddings):
        program()
    for bias in (False, True):
        check(
            made(Linear, IN, OUT, bias),
            rows_of_all(2, 3, IN),
            lambda xs, p: [F.linear(x, **p) for x in xs],
            "Linear",
        )


class Layer(nn.Module):
    """Column, then row: the shape of a feed-forward layer; and an ordinary norm before it."""

    def __init__(self, up, down):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(IN), up(IN, OUT), down(OUT, IN)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def layer(inputs, params):
    plain = Layer(nn.Linear, nn.Linear)
    return [torch.func.functional_call(plain, params, (x,)) for x in inputs]


def block_of(level, recompute):
    split = Layer(ColumnParallelLinear, RowParallelLinear)
    block = bmt.Block(split, use_checkpoint=recompute, zero_level=level)
    started(block)
    return block


def blocks():
    for level, recompute in itertools.product((2, 3), (False, True)):
        block = block_of(level, recompute)
        check(block, rows_of_all(4, 3, IN), layer, f"ZeRO-{level}, recompute={recompute}")


@on_ranks(4, init={"tp_size": 2})
def test_blocks():
    """Inside a Block: with ZeRO-3 the saved weights are found again in a buffer gathered anew."""
    blocks()


def compiled(backend, level, recompute):
    block = block_of(level, recompute)
    block.compile(backend=backend, fullgraph=True)
    for _ in range(2):  # a second call of compiled code
        block.zero_grad()
        values = {name: value.clone() for name, value in block.state_dict().items()}
        check(
            block, rows_of_all(4, 3, IN), layer, f"{backend}, ZeRO-{level}, recompute={recompute}"
        )
        block.load_state_dict(values)
    assert block._runner.is_compiled and block._runner.recomputing(Level.BLOCK) is not None


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("level", "recompute"), [(3, True), pytest.param(2, False, marks=pytest.mark.long)]
)
@on_ranks(2, init={"tp_size": 2})
def test_compiles_as_one_graph(level, recompute):
    """No break at the operations, recomputation inside the graph, and the same numbers."""
    compiled("aot_eager", level, recompute)


class Branches(nn.Module):
    """Three columns of one input, whose gradients autograd and the compiler may take in any order."""

    def __init__(self, column, row):
        super().__init__()
        self.q, self.k, self.v = (column(IN, OUT) for _ in range(3))
        self.out = row(OUT, IN)

    def forward(self, x):
        return x + self.out(torch.tanh(self.q(x)) * self.k(x) + self.v(x))


def branches(inputs, params):
    plain = Branches(nn.Linear, nn.Linear)
    return [torch.func.functional_call(plain, params, (x,)) for x in inputs]


def by_default():
    """Blocks that leave `compile` at its default: the tensor-parallel ranks compile together, and
    where one of them cannot, none does.
    """

    def noting(run):
        def noted(*args):
            uncompiled.append(args)
            return run(*args)

        return noted

    def train(what):
        before = len(uncompiled)
        block.zero_grad()
        values = {name: value.clone() for name, value in block.state_dict().items()}
        check(block, rows_of_all(4, 3, IN), branches, what)
        block.load_state_dict(values)
        return len(uncompiled) - before

    uncompiled = []
    for fails in (False, True):
        own = test_compile.lowering(traces=True, fails=fails and bmt.rank() == 1)
        split = Branches(ColumnParallelLinear, RowParallelLinear)
        block = started(bmt.Block(split, use_checkpoint=False))
        block._eager.plain = noting(block._eager.plain)
        block._runner._uncompiled = noting(block._runner._uncompiled)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found = [train(f"fails: {fails}, pass {number}") for number in range(2)]
        assert found == [fails] * 2 and own.num_graphs == 1, (found, own.num_graphs)
        assert ["this processor is unknown" in str(x.message) for x in said] == [True] * fails
        x = rows_of_all(4, 3, IN)[bmt.rank()].requires_grad_(bmt.rank() == 0)
        with pytest.raises(ConfigurationError, match=r"x \(4, 3, 8\) torch.float32 with gradient"):
            block(x)
        hook = split.q.register_forward_hook(lambda *_: None) if bmt.rank() == 0 else None
        assert train("a hook on one rank") == 1
        if hook is not None:
            hook.remove()
        assert train("no hook any more") == fails


@pytest.mark.compiler
@on_ranks(2, init={"tp_size": 2, "compile": True})
def test_compiles_by_default():
    by_default()


class Scaled(Branches):
    scale: float | None = 1.0

    def forward(self, x):
        if self.scale is None:
            return self.out(self.q(x))
        return super().forward(x) * self.scale


@pytest.mark.compiler
@on_ranks(2, init={"tp_size": 2, "compile": True})
def test_a_rank_that_compiles_alone():
    """An attribute that changes on one rank: right, uncompiled from then on."""

    def expected(inputs, params):
        first, second = branches(inputs, params)
        return [first, second * scale]

    own = test_compile.lowering(traces=True)
    split = Scaled(ColumnParallelLinear, RowParallelLinear)
    block = started(bmt.Block(split, use_checkpoint=False))
    for scale in (1.0, 2.0, 1.0):
        if bmt.rank() == 1:
            split.scale = scale
        block.zero_grad()
        values = {name: value.clone() for name, value in block.state_dict().items()}
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            check(block, rows_of_all(4, 3, IN), expected, f"scale {scale}")
        block.load_state_dict(values)
        assert ["runs uncompiled (rank 0: " in str(x.message) for x in said] == [True] * (scale > 1)
    assert own.num_graphs == 1 + bmt.rank()


@pytest.mark.compiler
@on_ranks(2, init={"tp_size": 2, "compile": True})
def test_ranks_whose_code_differs():
    """They run uncompiled, and what does not match is told by the operation."""
    test_compile.lowering(traces=True)
    split = Scaled(ColumnParallelLinear, RowParallelLinear)
    block = started(bmt.Block(split, use_checkpoint=False))
    block(rows_of_all(4, 3, IN)[bmt.rank()])
    if bmt.rank() == 1:
        split.scale = None
    with pytest.raises(ConfigurationError, match=r"rank 0: gather_linear.*rank 1: linear_scatter"):
        block(rows_of_all(4, 3, IN)[bmt.rank()])


def test_code_is_compared_by_names():
    """Functions have other addresses on other ranks."""

    def code(name):
        def function(x):
            return x

        function.__name__, graph = name, torch.fx.Graph()
        graph.output(graph.call_function(function, (graph.placeholder("x"),)))
        return backend._agreeing(torch.fx.GraphModule({}, graph))

    assert code("one") == code("one") != code("other")


UNWANTED = ("gather_rows", "scatter_rows", "all_reduce", "gather_linear", "check_alike")


@on_ranks(2)
def test_one_tensor_rank_is_plain():
    """Without tensor parallelism the layers are the plain ones to the last bit, and the tensor axis
    is not used.
    """
    names = (*UNWANTED, "linear_scatter", "linear_reduce")
    raising = {name: mock.Mock(side_effect=AssertionError(name)) for name in names}
    x = rows_of_all(4, 3, IN)[bmt.rank()]
    with mock.patch.multiple(tensor_parallel, **raising):
        for module in (
            made(ColumnParallelLinear, IN, OUT),
            made(RowParallelLinear, IN, OUT, split_input=True),
            made(Linear, IN, OUT),
        ):
            assert torch.equal(module(x), F.linear(x, **module.state_dict()))
        table = made(VPEmbedding, VOCAB, IN)
        weight = table.state_dict()["weight"]
        assert torch.equal(table(torch.arange(VOCAB)), weight)
        assert torch.equal(table(x, projection=True), F.linear(x, weight))
        with pytest.raises(ConfigurationError, match=r"id 16 \(1 of 2 ids"):
            table(torch.tensor([0, VOCAB]))


def first_values():
    torch.manual_seed(4)
    out = []
    for kind in (ColumnParallelLinear, RowParallelLinear, Linear, VPEmbedding):
        module = kind(16, OUT)
        bmt.init_parameters(module)
        out.append({name: value.clone() for name, value in module.state_dict().items()})
    module = Linear(16, OUT, init_method=bmt.ParameterInitializer(nn.init.constant_, 3.0))
    bmt.init_parameters(module)
    return [*out, dict(module.state_dict())]


def test_first_values_do_not_depend_on_the_split():
    """The same whole weights for any tp_size, in the range that torch's layers take."""
    plain = run_ranks(first_values, 1)[0]
    for values in run_ranks(first_values, 4, init={"tp_size": 2}):
        for got, want in zip(values, plain, strict=True):
            models.assert_same_dicts(got, want, "first values", tolerance=0.0)
    for linear in plain[:3]:
        assert set(linear) == {"weight", "bias"}
        assert 0.8 * 16**-0.5 < linear["weight"].abs().max() <= 16**-0.5
        assert not linear["bias"].any()
    assert plain[3]["weight"].std().sub(1).abs() < 0.2
    assert (plain[4]["weight"] == 3.0).all()


@on_ranks(2, init={"tp_size": 2})
def test_operations():
    """The operations by themselves, on plain tensors, as BMTrain programs call them; autocast;
    frozen weights and inputs without gradient.
    """
    rank, size = bmt.rank(), tp_size()
    weight, bias = torch.randn(OUT, IN, generator=seeded(1)), torch.randn(OUT, generator=seeded(2))
    inputs = rows_of_all(4, IN)
    assert torch.equal(OpLinear.apply(inputs[0], weight, bias), F.linear(inputs[0], weight, bias))
    own = inputs[rank], weight.chunk(size)[rank], bias.chunk(size)[rank], True
    whole = F.linear(torch.cat(inputs), weight, bias)
    models.assert_same(OpParallelLinear.apply(*own), whole.chunk(size, 1)[rank], "gathered input")
    for kind, want in (
        (ReduceType.ALL_REDUCE, whole),
        (ReduceType.REDUCE_SCATTER, whole.chunk(size)[rank]),
    ):
        got = OpParallelLinear.apply(
            torch.cat(inputs), weight.chunk(size, 1)[rank], bias, False, False, True, kind, 2
        )
        models.assert_same(got, want, str(kind))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = OpParallelLinear.apply(*own)
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


@pytest.mark.fresh
@on_ranks(2, init={"tp_size": 2})
def test_rows_travel_beside_multiplication():
    """Own rows are multiplied before the first are awaited; a chunk is summed while the next is
    multiplied.
    """
    log = []
    current = world.current().service(overlap.Overlap)

    def noting(module, name, word):
        original = getattr(module, name)

        def noted(*args, **kwargs):
            log.append(word)
            return original(*args, **kwargs)

        setattr(module, name, noted)

    noting(overlap, "_multiply", "multiply")
    noting(overlap, "gather_shards", "gather")
    noting(overlap, "reduce_shards", "reduce")
    noting(current._streams, "compute_waits", "wait")
    x, weight = torch.randn(4, IN, requires_grad=True), torch.randn(OUT, IN, requires_grad=True)
    with in_all_chunks:
        out = tensor_parallel.gather_linear(x, weight, None, 2)
        assert log == ["gather", "gather", "multiply", "wait", "multiply", "wait", "multiply"]
        log.clear()
        out.sum().backward()
        # The gather of x comes first and is awaited by the gradient of the weight; the reduction of the
        # gradient of x last.
        chunk = ["multiply", "multiply", "reduce"]
        assert log == ["gather", *chunk, *chunk, "wait", "wait"]
        log.clear()
        out = tensor_parallel.linear_scatter(x, weight, False, 2)
        assert log == [*chunk, *chunk, "wait"]
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
        ]


@in_all_chunks
def churning(num_rounds, rows, width):
    """Nothing is read before it is there or overwritten while it travels: memory that is given back
    is spoiled at once.
    """

    def spoil():
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


@on_ranks(2, init={"tp_size": 2})
def test_memory_is_held_while_it_travels():
    """On a CPU only the arithmetic of the test; tests/gpu runs the same with rows enough for an
    overlap.
    """
    churning(2, 8, 16)


def test_chunks_are_equal_and_worth_their_issue():
    wanted = {(12, 1): 1, (12, 2): 2, (12, 5): 4, (7, 4): 1, (7, 7): 7, (2, 8): 2, (0, 4): 1}
    for sizes, count in wanted.items():
        assert overlap.num_equal_chunks(*sizes) == count
    over = overlap.Overlap(
        mock.Mock(mesh=mock.Mock(tp=mock.Mock(size=2)), device=torch.device("cpu"))
    )
    matrix = torch.empty(2560, 3840, device="meta")
    found = [over.num_chunks(rows, matrix, 4) for rows in (1, 8192, 16384, 2**20)]
    assert found == [1, 1, 2, 4]


@on_ranks(2, init={"tp_size": 2}, timeout=20)
def test_bad_layers_are_refused():
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


@on_ranks(2, init={"tp_size": 2}, timeout=20)
def test_bad_calls_are_refused_on_every_rank():
    """With an error that names it, where the ranks differ and where all are wrong alike; the next
    pass is as the first.
    """
    rank = bmt.rank()
    into, out, table = (
        made(ColumnParallelLinear, IN, OUT),
        made(RowParallelLinear, OUT, IN),
        made(VPEmbedding, VOCAB, IN),
    )
    every = made(RowParallelLinear, OUT, IN, split_input=True, all_reduce_output=True)
    x, h = torch.randn(4, IN), torch.randn(4, OUT // 2)

    def again():
        leaf = x.clone().requires_grad_()
        y = out(into(leaf)) + table(torch.arange(4))
        y.square().sum().backward()
        return [y, grad_of(leaf)]

    first = again()
    wrong = [
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
        (lambda: out(h[:3]), r"over 2 ranks got shape \(3, 6\): expected dim 0 divisible by 2"),
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
            r"excludes gather_input and gather_output, got True and False",
        ),
        (
            lambda: OpParallelLinear.apply(x, x, None, False, True, True, ReduceType.ALL_REDUCE),
            r"excludes gather_input and gather_output, got False and True",
        ),
    ]
    for call, words in wrong:
        with pytest.raises(ConfigurationError, match=words):
            call()
        models.assert_equal(again(), first, f"after {words}")
