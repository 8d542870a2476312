"""Layers with the kernels of a GPU, which the interpreter runs, beside the same layers without."""

from __future__ import annotations

import contextlib
import copy
import pathlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from tests.models import parity
from tests.ranks.runner import run_ranks

import bmtrain as bmt
from bmtrain.kernels import row_products as room
from bmtrain.kernels.cached_attention import cached_attention_by_triton
from bmtrain.kernels.gated import gated_by_triton
from bmtrain.kernels.largest import largest_by_triton
from bmtrain.kernels.norm import norm_by_triton
from bmtrain.kernels.rotary import rotate_by_triton
from bmtrain.kernels.row_products import row_products_by_triton
from model_center.generation import search
from model_center.generation.engine import generate
from model_center.layer import feedforward, fusion, layernorm, one_row, scaled_dot_product
from model_center.layer.linear import Linear
from model_center.layer.position_embedding import rotary
from model_center.layer.position_embedding.rotary import Rotary
from model_center.model.gpt2 import GPT2, GPT2Config
from model_center.model.gptj import GPTj, GPTjConfig
from model_center.model.llama import Llama, LlamaConfig
from model_center.model.qwen2 import Qwen2, Qwen2Config
from model_center.model.qwen3 import Qwen3, Qwen3Config

SIZES: dict[str, Any] = {"vocab_size": 48, "dim_model": 32, "num_heads": 4, "dim_head": 8}
SIZES |= {"dim_ff": 48, "num_layers": 2, "dtype": "float32"}
MODELS: dict[str, tuple[Any, Any]] = {
    "llama": (Llama, LlamaConfig(**SIZES, num_heads_kv=2, sliding_window=9)),
    "gptj": (GPTj, GPTjConfig(**SIZES, pos_rotary_dim=4)),
}
OF_ROWS: dict[str, tuple[Any, Any]] = MODELS | {
    "gpt2": (GPT2, GPT2Config(**SIZES, position_size=64)),
    "qwen2": (Qwen2, Qwen2Config(**SIZES, num_heads_kv=2)),
    "qwen3": (Qwen3, Qwen3Config(**SIZES, num_heads_kv=2)),
}


def of_places(positions: Rotary, places: torch.Tensor) -> torch.Tensor:
    return positions._frequencies(places.device)


@contextlib.contextmanager
def by_kernels() -> Iterator[list[mock.MagicMock]]:
    """Inside, layers compute as on a GPU; the kernels that count their calls."""
    kernels = {
        (feedforward, "gated"): gated_by_triton,
        (rotary, "rotate"): rotate_by_triton,
        (scaled_dot_product, "extended_attention"): cached_attention_by_triton,
        (layernorm, "norm_by_triton"): norm_by_triton,
        (one_row, "row_products"): row_products_by_triton,
    }
    with contextlib.ExitStack() as stack:
        # there is no stream to wait for
        stack.enter_context(mock.patch.object(Rotary, "_kept_frequencies", of_places))
        # fewer programs, which the interpreter runs one after the other
        stack.enter_context(mock.patch.object(room, "BLOCK_OUT", 32))
        for module in (feedforward, rotary, layernorm, one_row, scaled_dot_product):
            stack.enter_context(mock.patch.object(module, "is_fused", lambda *_: True))
        stack.enter_context(mock.patch.object(search, "is_fused", lambda *_: True))
        stack.enter_context(mock.patch.object(search, "largest", largest_by_triton))
        yield [
            stack.enter_context(mock.patch.object(module, name, wraps=kernel))
            for (module, name), kernel in kernels.items()
        ]


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_the_formulas(name: str) -> None:
    """Greedily, of prompts with padding; all kernels that the model has a use for are used."""
    kind, config = MODELS[name]
    torch.manual_seed(0)
    model = parity.randomized(kind(config), std=0.5)
    ids, mask = parity.token_ids(3, 6, high=48), torch.ones(3, 6)
    mask[0, :2] = 0
    expected = generate(model, ids, mask, max_new_tokens=6, return_scores=True)
    with by_kernels() as kernels:
        found = generate(model, ids, mask, max_new_tokens=6, return_scores=True)
    assert torch.equal(found.sequences, expected.sequences)
    assert found.scores is not None and expected.scores is not None
    torch.testing.assert_close(found.scores, expected.scores, rtol=1e-4, atol=1e-4)
    used = [kernel.call_count > 0 for kernel in kernels]
    assert used == [name == "llama", True, True, True, False]


def tokens(model: Any, ids: torch.Tensor) -> Any:
    return generate(model, ids, max_new_tokens=6, return_scores=True)


def assert_same(found: Any, expected: Any) -> None:
    assert torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(found.scores, expected.scores, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", OF_ROWS)
def test_one_row_is_that_of_the_formulas(name: str) -> None:
    """Greedily; with as few kernels as the model allows."""
    kind, config = OF_ROWS[name]
    torch.manual_seed(0)
    model = parity.randomized(kind(config), std=0.5)
    ids = parity.token_ids(1, 6, high=48)
    expected = tokens(model, ids)
    with by_kernels() as kernels:
        assert_same(tokens(model, ids), expected)
    # five steps of two layers, and the head, of the prompt's last token too
    assert kernels[-1].call_count == 5 * 2 * (2 if name == "gptj" else 4) + 6
    if name == "llama":
        # of a step the last norm, the head, and five kernels in each layer; the rest is the prompt's
        assert [kernel.call_count for kernel in kernels] == [2, 2, 5 * 2, 5 + 5, 5 * 2 * 4 + 6]


def hooked(model: Any, seen: list[Any]) -> None:
    model.encoder.layers[0].self_att.self_attention.project_k.register_forward_hook(
        lambda *_: seen.append(1)
    )


def subclassed(model: Any, seen: list[Any]) -> None:
    class Counted(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(1)
            return 2 * super().forward(x)

    model.encoder.layers[0].ffn.ffn.w_in.w_1.__class__ = Counted


def out_replaced(model: Any, seen: list[Any]) -> None:
    part = model.encoder.layers[1].ffn.ffn
    plain = part.w_out.forward

    def more(x: torch.Tensor) -> torch.Tensor:
        seen.append(1)
        return plain(x) + 1

    part.w_out.forward = more


def block_hooked(model: Any, seen: list[Any]) -> None:
    model.encoder.layers[0].ffn.ffn.w_in.register_forward_pre_hook(lambda *_: seen.append(1))


def norm_hooked(model: Any, seen: list[Any]) -> None:
    def larger(_: Any, __: Any, out: torch.Tensor) -> torch.Tensor:
        seen.append(1)
        return 3 * out

    model.encoder.layers[0].ffn.layernorm_before_ffn.register_forward_hook(larger)


def replaced(model: Any, seen: list[Any]) -> None:
    class Other(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(1)
            return x.sin()

    model.encoder.layers[0].ffn.ffn = Other()


@pytest.mark.parametrize(
    ("change", "left"),
    [
        (hooked, 6),
        (subclassed, 6),
        (out_replaced, 7),
        (block_hooked, 6),
        (norm_hooked, 8),
        (replaced, 6),
    ],
)
def test_what_is_more_than_a_product_is_called(change: Any, left: int) -> None:
    """Beside kernels for the rest: so many in a step, of eight."""
    kind, config = MODELS["llama"]
    torch.manual_seed(0)
    model, seen = parity.randomized(kind(config), std=0.5), list[Any]()
    plain = tokens(model, parity.token_ids(1, 6, high=48))
    change(model, seen)
    expected = tokens(model, parity.token_ids(1, 6, high=48))
    assert len(seen) == 6  # for the prompt, and in each of five steps
    if change not in (hooked, block_hooked):
        assert not torch.equal(plain.scores, expected.scores)
    with by_kernels() as kernels:
        assert_same(tokens(model, parity.token_ids(1, 6, high=48)), expected)
    assert len(seen) == 12 and kernels[-1].call_count == 5 * left + 6


def test_a_head_that_is_more_than_its_weight_is_called() -> None:
    kind, config = MODELS["llama"]
    torch.manual_seed(0)
    model, ids = parity.randomized(kind(config), std=0.5), parity.token_ids(1, 6, high=48)
    model.output_projection.register_forward_hook(lambda _, __, out: -out)
    expected = tokens(model, ids)
    with by_kernels() as kernels:
        assert_same(tokens(model, ids), expected)
    assert kernels[-1].call_count == 5 * 2 * 4


def of_a_rank(folder: pathlib.Path, fused: bool) -> tuple[list[Any], int]:
    """What follows a prompt of this rank's own, and how many products of one row there were."""
    model = MODELS["llama"][0].from_pretrained(folder, dtype="float32")
    ids = parity.token_ids(1, 6, high=48, seed=bmt.rank() if bmt.is_initialized() else 0)
    if not fused:
        return generate(model, ids, max_new_tokens=6).rows(), 0
    with by_kernels() as kernels:
        return generate(model, ids, max_new_tokens=6).rows(), kernels[-1].call_count


def test_whole_weights_of_ranks_go_through_the_kernels(tmp_path: pathlib.Path) -> None:
    """What was gathered is multiplied where it is."""
    kind, config = MODELS["llama"]
    torch.manual_seed(0)
    parity.randomized(kind(config), std=0.5).save_pretrained(tmp_path, format="model_center")
    alone = of_a_rank(tmp_path, fused=False)[0]
    found = run_ranks(of_a_rank, 2, tmp_path, True)
    expected = run_ranks(of_a_rank, 2, tmp_path, False)
    assert [rows for rows, _ in found] == [rows for rows, _ in expected]
    assert found[0][0] == alone and found[1][0] != alone
    assert [count for _, count in found] == [5 * 2 * 4 + 6] * 2


def test_shapes_that_do_not_fit_are_told() -> None:
    """By torch: a kernel would read other memory."""
    x = torch.randn(1, 1, 8)
    maps = [Linear(8, size, dtype=torch.float32) for size in (4, 4, 6)]
    with torch.no_grad(), by_kernels():
        for fits, given in (
            (True, one_row.together(x, maps)),
            (True, one_row.together(x, maps[:2], act="silu")),
            (True, one_row.together(x, maps[:1], residual=torch.ones(1, 1, 4))),
            (False, one_row.together(x, maps[1:], act="silu")),
            (False, one_row.together(x, maps[:1], residual=torch.ones(1, 1, 3))),
            (False, one_row.together(x[..., :7], maps[:1])),
            (False, one_row.together(x.expand(2, 1, 8), maps[:1])),
        ):
            assert (given is not None) == fits
        maps[0].weight = torch.nn.Parameter(torch.randn(8, 4).T)  # columns are not side by side
        assert one_row.together(x, maps[:1]) is None


def test_frequencies_are_made_once() -> None:
    """On a GPU; again for another device or base, and neither kept of a recording nor for training."""
    one, positions = Rotary(8, 100.0, interleaved=False), torch.arange(3)
    expected, made = one.tables(positions), mock.Mock(wraps=one._frequencies)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(one, "_frequencies", made))
        stack.enter_context(mock.patch.object(rotary, "is_fused", lambda *_: True))
        capturing = stack.enter_context(
            mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True)
        )
        waits = stack.enter_context(mock.patch.object(torch.cuda, "current_stream"))
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


def test_dropout_is_not_left_out() -> None:
    """A program that draws while it does not differentiate."""
    kind, _ = MODELS["llama"]
    model = kind(LlamaConfig(**SIZES, num_heads_kv=2, dropout_p=0.5)).train()
    hidden, block = torch.randn(1, 1, 32), model.encoder.layers[0].ffn
    with torch.no_grad(), by_kernels() as kernels:
        torch.manual_seed(0)
        found = block(hidden)
        torch.manual_seed(0)
        expected = hidden + block.added(block.layernorm_before_ffn(hidden))
        assert torch.equal(found, expected) and kernels[-1].call_count == 0
        model.eval()
        block(hidden)
        assert kernels[-1].call_count == 2


def test_kernels_are_for_gpus_without_gradients() -> None:
    """Not on the CPU, nor where somebody differentiates, traces or looks."""
    device = torch.device("cpu")
    x, other, wide = (
        mock.Mock(is_cuda=True, device=device, dtype=dtype)
        for dtype in (torch.float32, torch.float16, torch.float64)
    )
    with torch.no_grad():
        assert fusion.is_fused(x) and fusion.is_fused(x, None, x)
        assert not fusion.is_fused(torch.empty(3)), "the CPU"
        assert not fusion.is_fused(torch.empty(3, device="meta"))
        assert not fusion.is_fused(x, other), "two dtypes"
        assert not fusion.is_fused(wide)
        with mock.patch.object(fusion, "num_dispatch_modes", lambda: 1):
            assert not fusion.is_fused(x)
        with torch.autocast("cpu", torch.bfloat16):
            assert not fusion.is_fused(x)
    assert not fusion.is_fused(x), "gradients"
