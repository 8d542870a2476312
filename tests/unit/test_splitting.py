"""Which codes of FP8 forward makes and which backward makes again, in graphs compiled for the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from bmtrain.compile import backend, splitting
from bmtrain.compile.compiled import recomputing
from bmtrain.compile.fp8 import call_in_fp8
from bmtrain.kernels import fp8
from bmtrain.recompute.level import Level

N = 48
# torch's compiler of itself
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


class Layer(nn.Module):
    """Two maps of one norm, a gated product of theirs, and a map back."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.down = nn.LayerNorm(N), nn.Linear(2 * N, N)
        self.gate, self.up = (nn.Linear(N, 2 * N, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        out: torch.Tensor = x + self.down(torch.sigmoid(self.gate(h)) * self.up(h))
        return out


def scaled(a: Any, a_unit: Any, b: Any, b_unit: Any, bias: Any, dtype: Any, fast: bool) -> Any:
    """`fp8.product` by the operator that GPUs have, which CPUs have too."""
    out = torch._scaled_mm(
        a.contiguous(), b.contiguous().t(), scale_a=a_unit, scale_b=b_unit, out_dtype=dtype
    )
    return out if bias is None else out + bias


class Passes:
    """A backend that notes the graphs of forward and backward."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.Graph] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        return backend.traced(graph, inputs, take=self._take)

    def _take(self, graph: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        self.graphs.append(graph.graph)
        return graph

    def wanted(self) -> list[list[tuple[Any, ...]]]:
        """Of each pass: codes, transposed codes and sums, where `fp8_encode` makes them."""
        op = torch.ops.bmtrain.fp8_encode.default
        return [
            sorted(
                (node.args[2:] for node in graph.find_nodes(op="call_function", target=op)), key=str
            )
            for graph in self.graphs
        ]

    def largest(self) -> list[int]:
        """Of each pass: of how many tensors it finds the largest number."""
        op = torch.ops.aten.amax.default
        return [len(graph.find_nodes(op="call_function", target=op)) for graph in self.graphs]


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(fp8, "product", scaled)
    torch._dynamo.reset()
    with (
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        yield


def passes(level: Level) -> Passes:
    found = Passes()
    run = torch.compile(
        recomputing(level), backend=backend.InFp8(backend.AtOnce(found)), fullgraph=True
    )
    run(Layer().bfloat16(), (torch.randn(3, 8, N, dtype=torch.bfloat16, requires_grad=True),), {})
    return found


X, GRAD = fp8.E4M3, fp8.E5M2
GRADS = [(GRAD, True, True, False)] * 2 + [(GRAD, True, True, True)]


def test_what_forward_keeps_it_makes_at_once(products: None) -> None:
    """The norm's result once for both maps; only the gradients in backward."""
    found = passes(Level.NOTHING)
    assert found.wanted() == [[(X, True, True, False)] * 2, GRADS]
    assert found.largest() == [2 + 3, 3]


def test_what_backward_makes_again_is_transposed_only(products: None) -> None:
    """And forward's codes are left to the compiler. No weight is read for its largest number."""
    found = passes(Level.CHEAP)
    assert found.wanted() == [[], [(X, False, True, False)] * 2 + GRADS]
    assert found.largest() == [2 + 3, 3]


def test_where_products_are_made_again_too_nothing_is_split(products: None) -> None:
    found = passes(Level.BLOCK)
    assert found.wanted() == [[(X, True, True, False)] * 2, [(X, True, True, False)] * 2 + GRADS]


@pytest.mark.parametrize("level", [Level.NOTHING, Level.CHEAP, Level.BLOCK])
def test_values_are_those_of_the_uncompiled_block(
    products: None, level: Level, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    module, x = Layer(), torch.randn(3, 8, N)
    graphs: list[torch.fx.Graph] = []
    split = splitting.split

    def noting(graph: torch.fx.Graph) -> None:
        graphs.append(graph)
        split(graph)

    monkeypatch.setattr(splitting, "split", noting)
    run = torch.compile(recomputing(level), backend=backend.InFp8(backend.inductor), fullgraph=True)
    results = []
    for function in (run, call_in_fp8):
        leaf = x.clone().requires_grad_()
        out = function(module, (leaf,), {})
        grads = torch.autograd.grad(out.square().sum(), [leaf, *module.parameters()])
        results.append([out.detach(), *grads])
    assert graphs
    for ours, theirs in zip(*results, strict=True):
        # the norm rounds otherwise, and now and then a code is the next one
        assert float((ours - theirs).norm()) <= 5e-3 * float(theirs.norm())
