"""Layers with the kernels of a GPU, which the interpreter runs, beside the same layers without."""

import contextlib
import copy
import functools
from unittest import mock

import pytest
import torch
from tests.models import parity, small
from tests.ranks.runner import run_ranks
from tests.tensors import by_kernel

import bmtrain as bmt
from bmtrain.kernels.norm import norm
from model_center import kernels
from model_center.generation import search
from model_center.generation.engine import generate
from model_center.kernels import row_products as room
from model_center.kernels.cached_attention import cached_attention_by_triton
from model_center.kernels.gated import gated_by_triton
from model_center.kernels.largest import largest_by_triton
from model_center.kernels.rotary import rotate_by_triton
from model_center.kernels.row_products import row_products_by_triton
from model_center.layer import decode_row, feedforward, layernorm, scaled_dot_product
from model_center.layer.linear import Linear
from model_center.layer.position_embedding import rotary
from model_center.layer.position_embedding.rotary import Rotary
from model_center.model import Llama

SIZES = parity.values("vocab_size=48 num_heads=4 dim_head=4 dim_ff=24 num_layers=1")
NEW = 3  # tokens: one follows the prompt, one each step
MODELS = {
    "Llama": "num_heads_kv=2 sliding_window=6",
    "GPTj": "pos_rotary_dim=2",
    "GPT2": "position_size=64",
    "Qwen2": "num_heads_kv=2",
    "Qwen3": "num_heads_kv=2",
}


def model_of(name, **more):
    return small.model(name, std=0.7, **SIZES | parity.values(MODELS[name]) | more)


def of_places(positions, places):
    return positions._frequencies(places.device)


@contextlib.contextmanager
def by_kernels():
    """Inside, layers compute as on a GPU; the kernels that count their calls."""
    kernels = {
        (feedforward, "gated"): gated_by_triton,
        (rotary, "rotate"): rotate_by_triton,
        (scaled_dot_product, "extended_attention"): cached_attention_by_triton,
        (layernorm, "norm"): functools.partial(by_kernel, norm),
        (decode_row, "row_products"): row_products_by_triton,
    }
    with contextlib.ExitStack() as stack:

        def put(module, name, value):
            stack.enter_context(mock.patch.object(module, name, value))

        put(Rotary, "_kept_frequencies", of_places)  # there is no stream to wait for
        # fewer programs, which the interpreter runs one after the other
        put(room, "BLOCK_OUT", 32)
        for module in (feedforward, rotary, layernorm, decode_row, scaled_dot_product, search):
            put(module, "is_fused", lambda *_: True)
        put(search, "largest", largest_by_triton)
        counted = [mock.MagicMock(wraps=kernel) for kernel in kernels.values()]
        for (module, name), kernel in zip(kernels, counted, strict=True):
            put(module, name, kernel)
        yield counted


def tokens(model, rows=1):
    """With scores, greedily; of several rows the first has padding."""
    ids, mask = parity.token_ids(rows, 5, high=48), torch.ones(rows, 5)
    if rows > 1:
        mask[0, :2] = 0
    return generate(model, ids, mask, max_new_tokens=NEW, return_scores=True)


def check(model, rows=1):
    """Tokens and scores are those of the formulas: these, and how often each kernel was called."""
    expected = tokens(model, rows)
    with by_kernels() as kernels:
        found = tokens(model, rows)
    assert torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(found.scores, expected.scores, rtol=1e-4, atol=1e-4)
    return expected.scores, [kernel.call_count for kernel in kernels]


@pytest.mark.parametrize("name", ["Llama", "GPTj"])
def test_tokens_are_those_of_the_formulas(name):
    """All kernels that the model has a use for are used."""
    _, counts = check(model_of(name), rows=2)
    assert [count > 0 for count in counts] == [name == "Llama", True, True, True, False]


@pytest.mark.parametrize("name", MODELS)
def test_one_row_is_that_of_the_formulas(name):
    """With as few kernels as the model allows."""
    _, counts = check(model_of(name))
    # in each step, and the head, of the prompt's last token too
    steps = NEW - 1
    assert counts[-1] == steps * (2 if name == "GPTj" else 4) + NEW
    if name == "Llama":
        # of a step the last norm, the head, and five kernels; the rest is the prompt's
        assert counts == [1, 1, steps, 3 + steps, steps * 4 + NEW]


def counted(seen, function):
    """The function, which counts its calls."""

    def call(*args):
        seen.append(1)
        return function(*args)

    return call


def changed(model, change, seen):
    attention, part = model.encoder.layers[0].self_att, model.encoder.layers[0].ffn
    if change == "hook":
        attention.self_attention.project_k.register_forward_hook(counted(seen, lambda *_: None))
    elif change == "subclass":

        class Counted(Linear):
            forward = counted(seen, lambda self, x: 2 * Linear.forward(self, x))

        part.ffn.w_in.w_1.__class__ = Counted
    elif change == "forward":
        plain = part.ffn.w_out.forward
        part.ffn.w_out.forward = counted(seen, lambda x: plain(x) + 1)
    elif change == "hook of a block":
        part.ffn.w_in.register_forward_pre_hook(counted(seen, lambda *_: None))
    elif change == "hook of a norm":
        norm = part.layernorm_before_ffn
        norm.register_forward_hook(counted(seen, lambda _, __, out: 3 * out))
    elif change == "module":
        part.ffn = torch.nn.Module()
        part.ffn.forward = counted(seen, torch.sin)
    else:
        head = model.output_projection
        head.register_forward_hook(counted(seen, lambda _, __, out: -out))


@pytest.mark.parametrize(
    ("change", "products"),
    [
        ("hook", 2),
        ("subclass", 2),
        ("forward", 3),
        ("hook of a block", 2),
        ("hook of a norm", 4),
        ("module", 2),
        ("head", 4),
    ],
)
def test_what_is_more_than_a_product_is_called(change, products):
    """Beside kernels for the rest: so many in a step, of four."""
    model, seen = model_of("Llama"), []
    changed(model, change, seen)
    scores, counts = check(model)
    assert len(seen) == 2 * NEW  # for the prompt, and in each step
    assert counts[-1] == (NEW - 1) * products + (0 if change == "head" else NEW)
    if "hook" != change != "hook of a block":
        assert not torch.equal(tokens(model_of("Llama")).scores, scores)


def of_a_rank(folder, fused):
    """What follows a prompt of this rank's own, and how many products of one row there were."""
    model = Llama.from_pretrained(folder, dtype="float32")
    ids = parity.token_ids(1, 5, high=48, seed=bmt.rank() if bmt.is_initialized() else 0)
    with by_kernels() if fused else contextlib.nullcontext([mock.Mock(call_count=0)]) as kernels:
        return generate(model, ids, max_new_tokens=NEW).rows(), kernels[-1].call_count


def both_ways(folder):
    return [of_a_rank(folder, fused) for fused in (True, False)]


def test_whole_weights_of_ranks_go_through_the_kernels(tmp_path):
    """What was gathered is multiplied where it is."""
    model_of("Llama").save_pretrained(tmp_path, format="model_center")
    alone = of_a_rank(tmp_path, fused=False)[0]
    found = run_ranks(both_ways, 2, tmp_path)
    for (rows, products), (expected, _) in found:
        assert rows == expected and products == (NEW - 1) * 4 + NEW
    assert found[0][0][0] == alone != found[1][0][0]


def test_shapes_that_do_not_fit_are_told():
    """By torch: a kernel would read other memory."""
    x = torch.randn(1, 1, 8)
    maps = [Linear(8, size, dtype=torch.float32) for size in (4, 4, 6)]
    with torch.no_grad(), by_kernels():
        for fits, given in (
            (True, decode_row.fused_row_linear(x, maps)),
            (True, decode_row.fused_row_linear(x, maps[:2], act="silu")),
            (True, decode_row.fused_row_linear(x, maps[:1], residual=torch.ones(1, 1, 4))),
            (False, decode_row.fused_row_linear(x, maps[1:], act="silu")),
            (False, decode_row.fused_row_linear(x, maps[:1], residual=torch.ones(1, 1, 3))),
            (False, decode_row.fused_row_linear(x[..., :7], maps[:1])),
            (False, decode_row.fused_row_linear(x.expand(2, 1, 8), maps[:1])),
        ):
            assert (given is not None) == fits
        maps[0].weight = torch.nn.Parameter(torch.randn(8, 4).T)  # columns are not side by side
        assert decode_row.fused_row_linear(x, maps[:1]) is None


def test_frequencies_are_made_once():
    """On a GPU; again for another device or base, and neither kept of a recording nor for training."""
    one, positions = Rotary(8, 100.0, interleaved=False), torch.arange(3)
    expected, made = one.tables(positions), mock.Mock(wraps=one._frequencies)
    capturing = mock.Mock(return_value=True)
    with (
        mock.patch.object(one, "_frequencies", made),
        mock.patch.object(rotary, "is_fused", lambda *_: True),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", capturing),
        mock.patch.object(torch.cuda, "current_stream") as waits,
    ):
        for count in (1, 2):
            assert torch.equal(one.tables(positions).cos, expected.cos) and made.call_count == count
        capturing.return_value = False
        for _ in range(3):
            assert torch.equal(one.tables(positions).sin, expected.sin) and made.call_count == 3
        waits.return_value.synchronize.assert_called_once()
        assert one._kept and not copy.deepcopy(one)._kept, "a copy may go to another device"
        one.base = 50.0
        assert not torch.equal(one.tables(positions).sin, expected.sin) and made.call_count == 4
        with torch.inference_mode():
            one.tables(positions)
        assert made.call_count == 5


def test_dropout_is_not_left_out():
    """A program that draws while it does not differentiate."""
    model = model_of("Llama", dropout_p=0.5).train()
    hidden, block = torch.randn(1, 1, 16), model.encoder.layers[0].ffn
    with torch.no_grad(), by_kernels() as kernels:
        torch.manual_seed(0)
        found = block(hidden)
        torch.manual_seed(0)
        expected = hidden + block.added(block.layernorm_before_ffn(hidden))
        assert torch.equal(found, expected) and kernels[-1].call_count == 0
        model.eval()
        block(hidden)
        assert kernels[-1].call_count == 2


def test_kernels_are_for_gpus_without_gradients():
    """Not on the CPU, nor where somebody differentiates, traces or looks."""
    x, other, wide = (
        mock.Mock(is_cuda=True, device=torch.device("cpu"), dtype=dtype)
        for dtype in (torch.float32, torch.float16, torch.float64)
    )
    with torch.no_grad():
        assert kernels.is_fused(x) and kernels.is_fused(x, None, x)
        for given in ((torch.empty(3),), (torch.empty(3, device="meta"),), (x, other), (wide,)):
            assert not kernels.is_fused(*given)
        with mock.patch.object(kernels, "num_dispatch_modes", lambda: 1):
            assert not kernels.is_fused(x)
        with torch.autocast("cpu", torch.bfloat16):
            assert not kernels.is_fused(x)
    assert not kernels.is_fused(x), "gradients"
