"""When `attend` uses the kernel for short sequences, and that it hands it the right mask: the formula stands in for it."""

from __future__ import annotations

import functools

import pytest
import torch

from bmtrain.kernels.short_attention import short_attention_reference
from model_center.layer import scaled_dot_product
from model_center.layer.mask import AttentionMask
from model_center.layer.scaled_dot_product import attend, attend_visibly

BATCH, HEADS, TOKENS, DIM = 3, 2, 10, 32
KEYS = torch.arange(TOKENS) < torch.tensor([TOKENS, 4, 0])[:, None]
PAIRS = torch.rand(BATCH, 1, TOKENS, TOKENS, generator=torch.Generator().manual_seed(0)) < 0.7
settle = functools.partial(AttentionMask.settled, num_queries=TOKENS, num_keys=TOKENS, device=torch.device("cpu"))
TAKEN = [AttentionMask(), AttentionMask(keys=KEYS), settle(AttentionMask(keys=KEYS))]
LEFT = [
    AttentionMask(causal=True),
    AttentionMask(causal=True, keys=KEYS),
    AttentionMask(pairs=PAIRS),
    AttentionMask(keys=KEYS, pairs=PAIRS),
    AttentionMask(keys=KEYS, pairs=PAIRS[:, :, :1]),
    settle(AttentionMask(causal=True, keys=KEYS)),
    settle(AttentionMask(keys=KEYS, pairs=PAIRS)),
]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """One entry for each time the kernel would have run; shapes and devices are taken to fit."""
    seen: list[bool] = []

    def stand_in(*args: torch.Tensor, **options: float) -> torch.Tensor:
        seen.append(True)
        return short_attention_reference(*args[:4], None, **options)

    monkeypatch.setattr(scaled_dot_product, "short_attention_applies", lambda *args: True)
    monkeypatch.setattr(scaled_dot_product, "short_attention", stand_in)
    return seen


@pytest.mark.parametrize(("mask", "is_taken"), [(m, True) for m in TAKEN] + [(m, False) for m in LEFT])
def test_the_kernel_gets_masks_of_keys_alone(calls: list[bool], mask: AttentionMask, is_taken: bool) -> None:
    """The result is that of the explicit computation either way."""
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(BATCH, HEADS, TOKENS, DIM, generator=generator) for _ in range(3))
    found = attend(query, key, value, mask, scale=0.3)
    torch.testing.assert_close(found, attend_visibly(query, key, value, mask, scale=0.3)[0])
    assert calls == [True] * is_taken


def test_a_bias_is_not_for_the_kernel(calls: list[bool]) -> None:
    """It has no place for one."""
    x = torch.randn(BATCH, HEADS, TOKENS, DIM)
    attend(x, x, x, AttentionMask(), torch.zeros(1, HEADS, TOKENS, TOKENS))
    assert not calls
