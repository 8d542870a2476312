"""Layers with the kernels of a GPU, which the interpreter runs, beside the same layers without."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from tests.models import parity

from bmtrain.kernels.cached_attention import cached_attention_by_triton
from bmtrain.kernels.gated import gated_by_triton
from bmtrain.kernels.norm import norm_by_triton
from bmtrain.kernels.rotary import rotate_by_triton
from model_center.generation.engine import generate
from model_center.layer import feedforward, fusion, layernorm, scaled_dot_product
from model_center.layer.position_embedding import rotary
from model_center.model.gptj import GPTj, GPTjConfig
from model_center.model.llama import Llama, LlamaConfig

SIZES: dict[str, Any] = {"vocab_size": 48, "dim_model": 32, "num_heads": 4, "dim_head": 8}
SIZES |= {"dim_ff": 48, "num_layers": 2, "dtype": "float32"}
MODELS: dict[str, tuple[Any, Any]] = {
    "llama": (Llama, LlamaConfig(**SIZES, num_heads_kv=2, sliding_window=9)),
    "gptj": (GPTj, GPTjConfig(**SIZES, pos_rotary_dim=4)),
}


@contextlib.contextmanager
def by_kernels() -> Iterator[list[mock.MagicMock]]:
    """Inside, layers compute as on a GPU; the kernels that count their calls."""
    kernels = {
        (feedforward, "gated"): gated_by_triton,
        (rotary, "rotate"): rotate_by_triton,
        (scaled_dot_product, "cached_attention"): cached_attention_by_triton,
        (layernorm, "norm_by_triton"): norm_by_triton,
    }
    with contextlib.ExitStack() as stack:
        for module in (feedforward, rotary, layernorm):
            stack.enter_context(mock.patch.object(module, "is_fused", lambda *_: True))
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
    assert used == [name == "llama", True, True, True]


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
