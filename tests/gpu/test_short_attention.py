"""The kernels of attention over short sequences on a GPU: values, gradients, dropout and its replay, compiled code."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tests.gpu.test_engine import forbid_waiting
from torch.utils.checkpoint import checkpoint

from bmtrain.kernels.short_attention import (
    draw_words,
    keep_mask,
    short_attention,
    short_attention_applies,
    short_attention_reference,
)
from model_center.layer.attention import Attention

pytestmark = pytest.mark.gpu
BATCH, HEADS = 5, 3
TOLERANCE = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
Run = Callable[..., torch.Tensor]


def make_inputs(tokens: int, dim: int, dtype: torch.dtype) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Query, key and value as layers give them, views of (batch, tokens, heads, dim), and a gradient of the output."""
    generator = torch.Generator("cuda").manual_seed(tokens + dim)
    shape = (BATCH, tokens, HEADS, dim)
    q, k, v, grad = (torch.randn(shape, generator=generator, device="cuda").to(dtype).transpose(1, 2) for _ in range(4))
    return [x.requires_grad_() for x in (q, k, v)], grad


def make_keys(side: str, tokens: int) -> torch.Tensor | None:
    """Valid keys (BATCH, tokens): all, one, some, but for the last sample, which has none."""
    if side == "none":
        return None
    counts = torch.tensor([tokens, 1, tokens // 2 + 1, tokens // 3 + 1, 0], device="cuda")
    keys = torch.arange(tokens, device="cuda") < counts[:, None]
    return keys.flip(1) if side == "left" else keys


def assert_near(got: torch.Tensor, want: torch.Tensor, what: str, tolerance: float) -> None:
    """No element off by more than `tolerance` of the largest; where all should vanish, of 0.01."""
    assert got.shape == want.shape and got.isfinite().all(), what
    scale = max(want.abs().max().item(), 0.01)
    error = (got.float() - want).abs().max().item() / scale
    assert error <= tolerance, f"{what}: off by {error:g} of {scale:g}, allowed {tolerance:g}"


def compare(inputs: list[torch.Tensor], grad: torch.Tensor, keys: torch.Tensor | None, dropout_p: float) -> None:
    """The kernels against the formula in fp32, the same pairs dropped, output and all gradients."""
    scale, tolerance = 1.3 / inputs[0].shape[-1] ** 0.5, TOLERANCE[inputs[0].dtype]
    assert short_attention_applies(*inputs, dropout_p)
    torch.manual_seed(7)
    words = draw_words(inputs[0])
    torch.manual_seed(7)
    got = short_attention(*inputs, keys, scale=scale, dropout_p=dropout_p)
    exact = [x.detach().float().requires_grad_() for x in inputs]
    kept = keep_mask(words, dropout_p) if dropout_p else None
    want = short_attention_reference(*exact, keys, kept, scale=scale, dropout_p=dropout_p)
    assert got.dtype == inputs[0].dtype and got.transpose(1, 2).is_contiguous()
    assert_near(got, want.detach(), "output", tolerance)
    found, expected = torch.autograd.grad(got, inputs, grad), torch.autograd.grad(want, exact, grad.float())
    for name, mine, formula in zip(("query", "key", "value"), found, expected, strict=True):
        assert mine.dtype == inputs[0].dtype
        assert_near(mine, formula, f"gradient of the {name}", tolerance)


@pytest.fixture(autouse=True)
def exact_products() -> None:
    """The formula is not computed in TF32."""
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize(("side", "dropout_p"), [("none", 0.0), ("right", 0.1)])
@pytest.mark.parametrize("tokens", [1, 7, 64, 100, 128, 129, 200, 256])
def test_every_length(tokens: int, side: str, dropout_p: float) -> None:
    """Tiles that are full and tiles that are not."""
    compare(*make_inputs(tokens, 64, torch.bfloat16), make_keys(side, tokens), dropout_p)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("tokens", "dim"), [(60, 32), (256, 32), (128, 64), (60, 128), (128, 128)])
def test_every_width(tokens: int, dim: int, dtype: torch.dtype) -> None:
    """Heads of 32, 64 and 128 features, padding on the left, half of the pairs dropped."""
    compare(*make_inputs(tokens, dim, dtype), make_keys("left", tokens), 0.5)


def test_any_strides() -> None:
    """Heads before tokens, tokens side by side, q, k and v in one tensor; masks and gradients that repeat one element."""
    (q, _, _), grad = make_inputs(72, 64, torch.bfloat16)
    fused = torch.randn(BATCH, 72, 3, HEADS, 64, device="cuda").bfloat16().unbind(2)[1].transpose(1, 2)
    scattered = torch.randn(BATCH, HEADS, 64, 72, device="cuda").bfloat16().mT
    inputs = [q, fused.requires_grad_(), scattered.requires_grad_()]
    compare(inputs, grad, make_keys("left", 72), 0.1)
    compare([x.detach().contiguous().requires_grad_() for x in inputs], grad[:, :, :1, :1].expand_as(q), None, 0.0)
    keys = make_keys("right", 72)
    assert keys is not None
    compare(inputs, grad, keys[2:3], 0.0)


def test_what_does_not_fit_is_refused() -> None:
    """Longer sequences, other dtypes and widths, shared heads and cross attention stay with torch."""
    (q, k, v), _ = make_inputs(64, 64, torch.bfloat16)
    assert short_attention_applies(q, k, v, 0.1)
    assert not short_attention_applies(q.float(), k.float(), v.float())
    assert not short_attention_applies(q, k[:, :1], v[:, :1])
    assert not short_attention_applies(q[:, :, :1], k, v)
    assert not short_attention_applies(q[..., :48], k[..., :48], v[..., :48])
    assert not short_attention_applies(*make_inputs(257, 64, torch.bfloat16)[0])
    assert not short_attention_applies(*make_inputs(129, 128, torch.bfloat16)[0])


@pytest.mark.parametrize("dropout_p", [0.1, 0.5])
def test_dropout_drops_what_it_should(dropout_p: float) -> None:
    """With equal scores and ones for values, outputs count the kept keys: their mean is 1, their spread that of coins."""
    query = torch.zeros(64, 16, 128, 64, device="cuda", dtype=torch.float16)
    torch.manual_seed(0)
    first, second = (short_attention(query, query, torch.ones_like(query), dropout_p=dropout_p)[..., 0].double() for _ in "ab")
    spread = (dropout_p / (1 - dropout_p) / 128) ** 0.5
    assert abs(first.mean().item() - 1) < 5 * spread / first.numel() ** 0.5 + 1e-4
    assert first.std().item() == pytest.approx(spread, rel=0.02)
    assert not torch.equal(first, second)


def recomputed(function: Run) -> Run:
    return lambda *args: checkpoint(function, *args, use_reentrant=False)


def layer_of(dropout_p: float) -> tuple[Run, torch.Tensor, torch.Tensor]:
    """Attention among residuals, its input (BATCH, 100, 256) and a mask of keys."""
    torch.manual_seed(1)
    layer = Attention(256, 64, 4, dtype=torch.bfloat16, attn_scale=True, dropout_p=dropout_p, init_std=0.06).cuda()
    x = torch.randn(BATCH, 100, 256, device="cuda").bfloat16().requires_grad_()
    keys = make_keys("right", 100)
    assert keys is not None
    return lambda x, keys: x + layer(x, x, keys), x, keys


def run(function: Run, x: torch.Tensor, keys: torch.Tensor) -> list[torch.Tensor]:
    """The output and the gradient of x, after the same seed each time."""
    torch.manual_seed(5)
    out = function(x, keys)
    return [out.detach(), *torch.autograd.grad(out, x, torch.ones_like(out) + x.detach())]


def test_recomputation_replays_dropout_exactly() -> None:
    """Bitwise the gradients of a pass that kept its probabilities' words."""
    function, x, keys = layer_of(0.3)
    for one, other in zip(run(function, x, keys), run(recomputed(function), x, keys), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("wrap", [lambda function: function, recomputed], ids=["kept", "recomputed"])
def test_compiled_code_computes_the_same(wrap: Callable[[Run], Run], dropout_p: float) -> None:
    """One graph; with torch's own random numbers the same as without the compiler, dropout included."""
    warnings.filterwarnings("ignore", module=r"torch\.")  # Inductor warns of deprecated parts of torch itself
    torch._dynamo.reset()
    function, x, keys = layer_of(dropout_p)
    compiled = torch.compile(wrap(function), fullgraph=True, dynamic=False, options={"fallback_random": True})
    for got, want in zip(run(compiled, x, keys), run(function, x, keys), strict=True):
        assert_near(got, want.float(), "compiled", 2.0**-6)


@pytest.mark.parametrize("wrap", [lambda function: function, recomputed], ids=["kept", "recomputed"])
def test_compiled_backward_drops_what_forward_dropped(wrap: Callable[[Run], Run]) -> None:
    """The output is linear in the values: <gradient, output> = <gradient of the values, values>, for one mask only."""
    warnings.filterwarnings("ignore", module=r"torch\.")
    torch._dynamo.reset()
    (q, k, v), grad = make_inputs(128, 64, torch.float16)
    compiled = torch.compile(wrap(lambda q, k, v: short_attention(q.sin(), k, v, dropout_p=0.5)), fullgraph=True, dynamic=False)
    out = compiled(q, k, v)
    grad_v = torch.autograd.grad(out, v, grad)[0]
    per_head = (out.double() * grad.double()).sum((-1, -2))
    torch.testing.assert_close((grad_v.double() * v.double()).sum((-1, -2)), per_head, rtol=0, atol=0.01 * per_head.std().item())


def test_nothing_waits_for_the_device() -> None:
    """Forward and backward, with mask and dropout, after the kernels are compiled."""
    inputs, grad = make_inputs(128, 64, torch.bfloat16)
    keys = make_keys("right", 128)
    for forbidden in (False, True):
        forbid_waiting(forbidden)
        torch.autograd.grad(short_attention(*inputs, keys, dropout_p=0.1), inputs, grad)
        forbid_waiting(False)


def test_a_layer_uses_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not torch's attention, which is what it is compared with otherwise."""
    monkeypatch.setattr(F, "scaled_dot_product_attention", None)
    function, x, keys = layer_of(0.1)
    assert run(function, x, keys)[0].isfinite().all()
