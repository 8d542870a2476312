"""What compiled blocks compute otherwise than the compiler would, compiled for the CPU: beside
plain PyTorch, and where.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from bmtrain.compile import backend, fusions, joining

N = 48
# torch's compiler of itself
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


class PreNorm(nn.Module):
    """As the layers of a GPT: three maps of one norm, two residual sums."""

    def __init__(self, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.first, self.second = norm(N), norm(N)
        self.maps = nn.ModuleList(nn.Linear(N, N) for _ in range(3))
        self.out, self.up, self.down = nn.Linear(N, N), nn.Linear(N, 2 * N), nn.Linear(2 * N, N)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        a, b, c = (part(h) for part in self.maps)
        x = x + self.out(torch.sigmoid(a) * torch.tanh(b) + c)
        return x + self.down(F.gelu(self.up(self.second(x)), approximate="tanh"))


class PostNorm(nn.Module):
    """As the layers of a BERT, with GELU in its exact form."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(N, 2 * N), nn.Linear(2 * N, N), nn.LayerNorm(N)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.down(F.gelu(self.up(x))))


class Shared(nn.Module):
    """GELU of what is needed otherwise too, and of a map without bias; a norm of two dimensions and
    one without weights.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up, self.bare, self.norm = (
            nn.Linear(N, N),
            nn.Linear(N, N, bias=False),
            nn.LayerNorm((8, N)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(F.layer_norm(self.norm(x), (N,)))
        return h * F.gelu(h, approximate="tanh") + F.gelu(self.bare(x), approximate="tanh")


class Dropping(PreNorm):
    """A layer with dropout behind it."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(super().forward(x), self.p, self.training)


class Frozen(PreNorm):
    """A layer whose own parameters do not learn."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


def noted(monkeypatch: pytest.MonkeyPatch, operator: Any) -> list[Any]:
    """The arguments of an operator, as the compiler will be given them."""
    found: list[Any] = []
    join = joining.join

    def noting(graph: torch.fx.Graph) -> None:
        join(graph)
        found.extend(node.args for node in graph.find_nodes(op="call_function", target=operator))

    monkeypatch.setattr(joining, "join", noting)
    return found


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The arguments of kernels of norms' gradients."""
    found = noted(monkeypatch, torch.ops.bmtrain.norm_backward.default)
    torch._dynamo.reset()
    with (
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        yield found


class Everywhere:
    """The backend of compiled blocks, which puts these functions in on a CPU too; `names` are
    theirs.
    """

    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        parts = [part for part in graph.modules() if isinstance(part, torch.fx.GraphModule)]
        for part in parts:
            fusions.rewrite(part, lambda _: True)
        nodes = [node for part in parts for node in part.graph.nodes if node.op == "call_function"]
        self.names += [
            node.target.__name__
            for node in nodes
            if getattr(node.target, "__module__", "").startswith("bmtrain")
        ]
        return backend.inductor(graph, inputs, **options)


def passed(run: Any, module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """The output, and the gradients of x and of parameters."""
    x = x.detach().requires_grad_()
    out = run(x)
    weights = torch.linspace(0.5, 1.5, out.numel(), dtype=out.dtype, device=out.device).view(
        out.shape
    )
    return [
        out.detach(),
        *torch.autograd.grad(
            out, [x, *(p for p in module.parameters() if p.requires_grad)], weights
        ),
    ]


def equal_to_plain(module: nn.Module, x: torch.Tensor) -> list[str]:
    """Values and gradients are those of plain PyTorch in fp64, up to four times what it is off in
    the dtype. What was put in.
    """
    exact = copy.deepcopy(module).double()
    want = passed(exact, exact, x.double())
    lower = Everywhere()
    got, theirs = (passed(run, module, x) for run in (torch.compile(module, backend=lower), module))
    for ours, plain, true in zip(got, theirs, want, strict=True):
        assert ours.dtype == plain.dtype == x.dtype
        error, allowed = (float((each.double() - true).norm()) for each in (ours, plain))
        assert error <= 4 * allowed + 1e-6 * float(true.norm())  # sums in another order
    return sorted(lower.names)


@pytest.fixture
def wide_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if rows were too long for the compiler."""
    monkeypatch.setattr(fusions, "NARROW", N - 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_of_a_gpt(joined: list[Any], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    names = equal_to_plain(PreNorm().to(dtype), torch.randn(3, 8, N, dtype=dtype))
    assert names == ["layer_norm", "layer_norm", "linear_gelu"]
    # Of the second norm, then of the first: terms of gradient and input, and whether residual
    # gradients and column sums joined.
    counts = [
        (len(grads), len(inputs), len(rest) > 2 and rest[2] is not None, rest[3:])
        for grads, inputs, _, *rest in joined
    ]
    assert counts == [(1, 2, True, [True, True]), (3, 1, True, [])]


def test_layer_with_rms_norms(joined: list[Any]) -> None:
    torch.manual_seed(0)
    assert equal_to_plain(PreNorm(nn.RMSNorm), torch.randn(3, 8, N)) == [
        "linear_gelu",
        "rms_norm",
        "rms_norm",
    ]
    assert [(len(grads), len(inputs), mean) for grads, inputs, _, mean, *_ in joined] == [
        (1, 2, None),
        (3, 1, None),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_norms_of_wide_rows_make_the_sum_that_they_normalise(
    joined: list[Any],
    wide_rows: None,
    norm: type[nn.Module],
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second norm gets the residual and what is added to it; its backward pass gets their
    sum.
    """
    torch.manual_seed(0)
    normalised = noted(monkeypatch, torch.ops.bmtrain.norm.default)
    equal_to_plain(PreNorm(norm).to(dtype), torch.randn(3, 8, N, dtype=dtype))
    assert [len(inputs) for inputs, *_ in normalised] == [1, 2]
    assert [(len(grads), len(inputs)) for grads, inputs, *_ in joined] == [(1, 1), (3, 1)]


class Early(nn.Module):
    """What is normalised makes the weight of its norm too."""

    def __init__(self) -> None:
        super().__init__()
        self.out, self.norm = nn.Linear(N, N), nn.LayerNorm(N)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x + self.out(x)
        return F.layer_norm(total, (N,), self.norm.weight + total.mean((0, 1)), self.norm.bias)


def test_a_sum_that_is_needed_before_the_norm_is_made_before_it(
    joined: list[Any], wide_rows: None
) -> None:
    torch.manual_seed(0)
    assert equal_to_plain(Early(), torch.randn(3, 8, N)) == ["layer_norm"]


def test_what_wide_norms_add_up_is_computed_again(joined: list[Any], wide_rows: None) -> None:
    """With recomputation nothing is kept but inputs."""
    torch.manual_seed(0)
    module, x, sizes = PreNorm(), torch.randn(3, 8, N), []
    run = torch.compile(
        lambda x: checkpoint(module, x, use_reentrant=False), backend=Everywhere(), fullgraph=True
    )
    known = {p.data_ptr() for p in module.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in known:
            sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        got = passed(run, module, x)
    for ours, plain in zip(got, passed(module, module, x), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)
    assert sizes == [x.numel()] and joined


def test_layer_of_a_bert(joined: list[Any]) -> None:
    torch.manual_seed(0)
    assert equal_to_plain(PostNorm(), torch.randn(3, 8, N)) == ["layer_norm"]
    ((grads, inputs, *_),) = joined
    assert len(grads) == 1 and len(inputs) == 2


def test_what_does_not_fit_is_left_to_the_compiler(joined: list[Any]) -> None:
    torch.manual_seed(0)
    assert equal_to_plain(Shared(), torch.randn(3, 8, N)) == ["gelu", "gelu"]
    assert equal_to_plain(Frozen(), torch.randn(3, 8, N)) == ["gelu"]
    assert equal_to_plain(PreNorm().double(), torch.randn(3, 8, N, dtype=torch.float64)) == []
    assert not joined


class Measuring(nn.Module):
    """GELU of a product that the program wants no gradients of."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(N, N)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            product = self.linear(x)
        out = F.gelu(product, approximate="tanh")
        return out + x * (self.linear.weight.sum() + self.linear.bias.sum())


def test_products_without_gradients_get_none(joined: list[Any]) -> None:
    torch.manual_seed(0)
    # positive: the parameters' gradient is one sum of all numbers, in which others would cancel
    assert equal_to_plain(Measuring(), torch.rand(3, 8, N)) == ["gelu"]


@pytest.mark.parametrize(
    ("p", "training", "names"), [(0.1, True, ["gelu"]), (0.1, False, None), (0.0, True, None)]
)
def test_beside_dropout_only_formulas_change(
    p: float, training: bool, names: list[str] | None
) -> None:
    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []

    def lower(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        fusions.rewrite(graph, lambda _: True)
        graphs.append(graph)
        return graph.forward

    torch.compile(Dropping(p).train(training), backend=lower)(
        torch.randn(3, 8, N, requires_grad=True)
    )
    targets = [
        node.target
        for node in graphs[0].graph.nodes
        if getattr(node.target, "__module__", "").startswith("bmtrain")
    ]
    assert [target.__name__ for target in targets] == (
        names or ["layer_norm", "layer_norm", "linear_gelu"]
    )


def test_autocast_is_left_to_the_compiler(joined: list[Any]) -> None:
    torch.manual_seed(0)
    module, x, lower = PreNorm(), torch.randn(3, 8, N), Everywhere()
    with torch.autocast("cpu", torch.bfloat16):
        got, want = (
            passed(run, module, x) for run in (torch.compile(module, backend=lower), module)
        )
    for ours, plain in zip(got, want, strict=True):
        assert float((ours - plain).norm()) <= 0.02 * float(plain.norm())
    assert lower.names == ["layer_norm", "layer_norm", "gelu"]


def test_other_sizes(joined: list[Any]) -> None:
    """From the second on they are variables."""
    torch.manual_seed(0)
    module, lower = PreNorm(), Everywhere()
    run = torch.compile(module, backend=lower)
    for rows in (3, 5, 7):
        x = torch.randn(rows, 8, N)
        for ours, plain in zip(passed(run, module, x), passed(module, module, x), strict=True):
            torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)
    assert len(lower.names) == 6 and len(joined) == 4


def test_nothing_changes_on_a_cpu() -> None:
    torch._dynamo.reset()
    seen: list[Any] = []

    def lower(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        fusions.rewrite(graph)
        seen.extend(node.target for node in graph.graph.nodes)
        return graph.forward

    torch.compile(PreNorm(), backend=lower)(torch.randn(3, 8, N))
    assert F.linear in seen and not any(
        getattr(target, "__module__", "") == fusions.__name__ for target in seen
    )
