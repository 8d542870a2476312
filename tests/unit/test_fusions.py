"""What compiled blocks compute otherwise than the compiler would, on a CPU: beside plain PyTorch, and
where.
"""

import contextlib
import copy
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from bmtrain.compile import backend, fusions, joining, masks
from bmtrain.kernels.launch import takes
from bmtrain.torch_internals import lower_as_inductor

N = 48
X = torch.randn(3, 8, N, generator=torch.Generator().manual_seed(0))
# torch's compiler of itself
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


class PreNorm(nn.Module):
    """As the layers of a GPT: three maps of one norm, two residual sums."""

    def __init__(self, norm=nn.LayerNorm):
        super().__init__()
        self.first, self.second = norm(N), norm(N)
        self.maps = nn.ModuleList(nn.Linear(N, N) for _ in range(3))
        self.out, self.up, self.down = nn.Linear(N, N), nn.Linear(N, 2 * N), nn.Linear(2 * N, N)

    def forward(self, x):
        h = self.first(x)
        a, b, c = (part(h) for part in self.maps)
        x = x + self.out(torch.sigmoid(a) * torch.tanh(b) + c)
        return x + self.down(F.gelu(self.up(self.second(x)), approximate="tanh"))


class Other(nn.Module):
    """A module of what a function makes of its linear map and its norm."""

    def __init__(self, function):
        super().__init__()
        self.linear, self.norm, self.function = nn.Linear(N, N), nn.LayerNorm(N), function
        self.bare, self.square = nn.Linear(N, N, bias=False), nn.LayerNorm((8, N))

    def forward(self, x):
        return self.function(self, x)


def post_norm(m, x):
    """As the layers of a BERT, with GELU in its exact form."""
    return m.norm(x + F.gelu(m.linear(x)))


def uneven(m, x):
    """What is normalised has two terms, of which one goes on beside the norm."""
    return m.bare(m.norm(m.linear(x) + x)) + x


def shared(m, x):
    """GELU of what is needed otherwise too, and of a map without bias; a norm of two dimensions and one
    without weights.
    """
    h = m.linear(F.layer_norm(m.square(x), (N,)))
    return h * F.gelu(h, approximate="tanh") + F.gelu(m.bare(x), approximate="tanh")


def early(m, x):
    """What is normalised makes the weight of its norm too."""
    total = x + m.linear(x)
    return F.layer_norm(total, (N,), m.norm.weight + total.mean((0, 1)), m.norm.bias)


def measuring(m, x):
    """GELU of a product that the program wants no gradients of."""
    with torch.no_grad():
        product = m.linear(x)
    out = F.gelu(product, approximate="tanh")
    return out + x * (m.linear.weight.sum() + m.linear.bias.sum())


def of_two_dtypes(m, x):
    """What is normalised is a sum of two dtypes."""
    return m.norm(m.linear(x).bfloat16() + x)


class Attending(nn.Module):
    """Attention to itself under masks: for each, a function of a learnt bias and of the tokens."""

    def __init__(self, *masks):
        super().__init__()
        self.bias, self.linear, self.masks = nn.Embedding(16, 2, 3), nn.Linear(N, N), masks

    def forward(self, x):
        tokens = torch.arange(x.shape[-2], device=x.device)
        bias = self.bias(tokens[:, None] - tokens + 8).permute(2, 0, 1)[None]
        heads = self.linear(x).unflatten(-1, (2, -1)).transpose(1, 2)
        for mask in self.masks:
            heads = F.scaled_dot_product_attention(
                heads, heads, heads, attn_mask=mask(bias, tokens), scale=1.0
            )
        return heads.transpose(1, 2).flatten(2) + bias.sum()


def written(bias, tokens):
    """What is no constant for all that it is computed of numbers."""
    mask = torch.ones((8, 8), dtype=torch.bool, device=tokens.device)
    mask[:, 1] = False
    return mask


def bands(bias, tokens):
    return (tokens[:, None] >= tokens) & (tokens[:, None] - tokens < 3)


def everything(bias, tokens):
    return (tokens[None, None, :, None] >= 0).expand(3, -1, 8, 8)


def triangle(bias, tokens):
    return (tokens[None, None, :, None] >= tokens).expand(3, -1, -1, -1)


# Masks and the strides that attention gets; None: no mask; True: `is_causal`.
MASKS = {
    everything: None,
    triangle: True,
    bands: (8, 1),
    written: (8, 1),
    lambda bias, tokens: torch.zeros((1, 2, 8, 8), dtype=bias.dtype, device=bias.device): None,
    lambda bias, tokens: torch.full((1, 2, 8, 8), 0.5, dtype=bias.dtype, device=bias.device): (
        64,
        8,
        1,
    ),
    lambda bias, tokens: bias: (64, 8, 1),
    lambda bias, tokens: torch.where(everything(bias, tokens), bias, -100.0): (64, 8, 1),
    lambda bias, tokens: torch.where(triangle(bias, tokens), bias, -100.0): (128, 64, 8, 1),
    lambda bias, tokens: triangle(bias, tokens) & (bias > -10): (128, 64, 8, 1),
    lambda bias, tokens: tokens[None, None, :, None] >= tokens.flip(0): (8, 1),
}


class Noted(NamedTuple):
    """The arguments of kernels of norms and of their gradients, as the compiler is given them."""

    norms: list[Any]
    gradients: list[Any]

    def sums(self):
        """Of each gradient: terms of gradient and input, whether there is a mean and a residual, and
        which column sums joined.
        """
        return [
            (len(grads), len(inputs), mean is not None, rest[:1] not in ([], [None]), rest[1:])
            for grads, inputs, _, mean, _, *rest in self.gradients
        ]


@contextlib.contextmanager
def compiled_anew():
    """What is compiled inside was not compiled before."""
    torch._dynamo.reset()
    with (
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        yield


@pytest.fixture
def joined(monkeypatch):
    """Of all graphs of a test."""
    found, join = Noted([], []), joining.join

    def noting(graph):
        join(graph)
        for calls, name in ((found.norms, "norm"), (found.gradients, "norm_backward")):
            target = getattr(torch.ops.bmtrain, name).default
            calls += [node.args for node in graph.find_nodes(op="call_function", target=target)]

    monkeypatch.setattr(joining, "join", noting)
    with compiled_anew():
        yield found


def without_code(graph, inputs, **_):
    """Inductor's graphs of forward and backward, run as they are."""

    def run(graph, inputs, **_):
        def boxed(args):
            return graph.forward(*args)

        boxed._boxed_call = True  # type: ignore[attr-defined]
        return boxed

    return lower_as_inductor(graph, inputs, run, backend._with_joint_pass({}))


class Everywhere:
    """The backend of compiled blocks, which puts these functions in on a CPU too; `names` are theirs."""

    def __init__(self, lower=without_code):
        self.names = []
        self.lower = lower

    def __call__(self, graph, inputs, **options):
        parts = [part for part in graph.modules() if isinstance(part, torch.fx.GraphModule)]
        for part in parts:
            fusions.rewrite(part, lambda _: True)
        nodes = [node for part in parts for node in part.graph.nodes if node.op == "call_function"]
        self.names += [
            node.target.__name__
            for node in nodes
            if getattr(node.target, "__module__", "").startswith("bmtrain")
        ]
        return self.lower(graph, inputs, **options)


def passed(run, module, x, *rest):
    """The output, and the gradients of x and of parameters."""
    x = x.detach().requires_grad_()
    out = run(x, *rest)
    weights = torch.linspace(0.5, 1.5, out.numel(), dtype=out.dtype, device=out.device)
    wanted = [x, *(p for p in module.parameters() if p.requires_grad)]
    used = torch.autograd.grad(out, wanted, weights.view(out.shape), materialize_grads=True)
    return [out.detach(), *used]


def check_against_plain(run, module, x, *rest, dtype=None):
    """Values and gradients of `run` are those of plain PyTorch in fp64, up to four times what it is off
    in the dtype of `x`; `dtype` is that of the output.
    """
    exact = copy.deepcopy(module).double()
    want = passed(exact, exact, x.double(), *rest)
    got, theirs = (passed(each, module, x, *rest) for each in (run, module))
    assert got[0].dtype == (dtype or x.dtype)
    for ours, plain, true in zip(got, theirs, want, strict=True):
        assert ours.dtype == plain.dtype and ours.shape == plain.shape
        error, allowed = (float((each.double() - true).norm()) for each in (ours, plain))
        assert error <= 4 * allowed + 1e-6 * float(true.norm())  # sums in another order


def equal_to_plain(module, x, lower=backend.inductor):
    """What was put in, of what computes as plain PyTorch does."""
    to = Everywhere(lower)
    check_against_plain(torch.compile(module, backend=to), module, x)
    return sorted(to.names)


def wide_rows(monkeypatch):
    """As if rows were too long for the compiler, and for column sums beside them."""
    monkeypatch.setattr(fusions, "NARROW", N - 1)
    monkeypatch.setattr(joining, "WIDE", N - 1)


@pytest.mark.parametrize(
    ("norm", "dtype", "wide"),
    [
        (nn.LayerNorm, torch.float32, False),
        (nn.LayerNorm, torch.bfloat16, False),
        (nn.RMSNorm, torch.float32, False),
        (nn.LayerNorm, torch.float32, True),
        (nn.RMSNorm, torch.bfloat16, True),
    ],
)
def test_layer_of_a_gpt(joined, norm, dtype, wide, monkeypatch):
    """The second norm of wide rows gets the residual and what is added to it; its backward pass gets
    their sum.
    """
    torch.manual_seed(0)
    if wide:
        wide_rows(monkeypatch)
    centered = norm is nn.LayerNorm
    names = equal_to_plain(PreNorm(norm).to(dtype), X.to(dtype), without_code)
    name = "layer_norm" if centered else "rms_norm"
    assert names == sorted([name, name, "linear_gelu"])
    # of the second norm, then of the first
    assert joined.sums() == [
        (1, 1 if wide else 2, centered, True, [] if wide else [True, True]),
        (3, 1, centered, True, []),
    ]
    assert [len(inputs) for inputs, *_ in joined.norms] == ([1, 2] if wide else [])


@pytest.mark.long
@pytest.mark.compiler
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_code(joined, norm, dtype, monkeypatch):
    for number in range(2):
        torch._dynamo.reset()
        assert len(equal_to_plain(PreNorm(norm).to(dtype), X.to(dtype))) == 3
        assert len(joined.gradients) == 2 * (number + 1)
        wide_rows(monkeypatch)


def test_what_wide_norms_add_up_is_computed_again(joined, monkeypatch):
    """With recomputation nothing is kept but inputs."""
    wide_rows(monkeypatch)
    torch.manual_seed(0)
    module, sizes = PreNorm(), []
    run = torch.compile(
        lambda x: checkpoint(module, x, use_reentrant=False), backend=Everywhere(), fullgraph=True
    )
    known = {p.data_ptr() for p in module.parameters()}

    def pack(tensor):
        if tensor.data_ptr() not in known:
            sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        got = passed(run, module, X)
    assert_close(got, passed(module, module, X), rtol=1e-4, atol=1e-5)
    assert sizes == [X.numel()] and joined.gradients


def test_sums_that_have_other_readers(joined, monkeypatch):
    """Gradients of a norm that are needed twice; a sum that is needed before its norm."""
    torch.manual_seed(0)
    for layer in (post_norm, uneven):
        joined.gradients.clear()
        torch._dynamo.reset()
        assert equal_to_plain(Other(layer), X, without_code) == ["layer_norm"]
        assert [found[:4] for found in joined.sums()] == [(1, 2, True, False)]
    wide_rows(monkeypatch)
    assert equal_to_plain(Other(early), X, without_code) == ["layer_norm"]


def test_what_does_not_fit_is_left_to_the_compiler(joined):
    torch.manual_seed(0)
    assert equal_to_plain(Other(shared), X, without_code) == ["gelu", "gelu"]
    assert equal_to_plain(PreNorm().requires_grad_(False), X, without_code) == ["gelu"]
    assert equal_to_plain(PreNorm().double(), X.double(), without_code) == []
    # positive: the parameters' gradient is one sum of all numbers, in which others would cancel
    assert equal_to_plain(Other(measuring), X.abs(), without_code) == ["gelu"]
    assert not joined.gradients
    assert equal_to_plain(Other(of_two_dtypes), X, without_code) == ["layer_norm"]


def test_masks_of_attention_suit_the_kernels(joined):
    """Constant ones are left out or become `is_causal`; others have a contiguous last dimension."""
    torch.manual_seed(0)
    seen = []

    def noting(graph, inputs):
        masks.rewrite(graph, lambda _: True)
        attend = F.scaled_dot_product_attention
        for node in graph.graph.find_nodes(op="call_function", target=attend):
            mask = node.kwargs["attn_mask"]
            value = mask and mask.meta["example_value"]
            # those of dimensions of more than one
            strides = mask and tuple(value.squeeze().stride())
            seen.append(strides or node.kwargs.get("is_causal"))
        return without_code(graph, inputs)

    assert equal_to_plain(Attending(*MASKS), X, noting) == ["small_table"]
    assert seen[: len(MASKS)] == [*MASKS.values()]


@pytest.mark.parametrize(("p", "training"), [(0.1, True), (0.1, False), (0.0, True)])
def test_beside_dropout_only_formulas_change(p, training):
    torch._dynamo.reset()
    lower = Everywhere(lambda graph, _: graph.forward)
    module = nn.Sequential(PreNorm(), nn.Dropout(p)).train(training)
    torch.compile(module, backend=lower)(X.clone().requires_grad_())
    is_dropped = p > 0 and training
    names = ["gelu"] if is_dropped else ["layer_norm", "layer_norm", "linear_gelu"]
    assert lower.names == names


def test_autocast_is_left_to_the_compiler(joined):
    torch.manual_seed(0)
    module, lower = PreNorm(), Everywhere()
    with torch.autocast("cpu", torch.bfloat16):
        got, want = (
            passed(run, module, X) for run in (torch.compile(module, backend=lower), module)
        )
    for ours, plain in zip(got, want, strict=True):
        assert float((ours - plain).norm()) <= 0.02 * float(plain.norm())
    assert lower.names == ["layer_norm", "layer_norm", "gelu"]


def test_other_sizes(joined):
    """From the second on they are variables."""
    torch.manual_seed(0)
    module, lower = PreNorm(), Everywhere()
    run = torch.compile(module, backend=lower)
    for rows in (3, 5, 7):
        x = torch.randn(rows, 8, N)
        got, plain = passed(run, module, x), passed(module, module, x)
        assert_close(got, plain, rtol=1e-4, atol=1e-5)
    assert len(lower.names) == 6 and len(joined.gradients) == 4


def test_nothing_changes_on_a_cpu():
    torch._dynamo.reset()
    seen = []

    def lower(graph, inputs):
        fusions.rewrite(graph, takes)
        seen.extend(node.target for node in graph.graph.nodes)
        return graph.forward

    torch.compile(PreNorm(), backend=lower)(X)
    names = [getattr(target, "__module__", "") for target in seen]
    assert F.linear in seen and fusions.__name__ not in names
