"""Attention over short sequences, what needs no GPU: the formula against torch's own, and the pairs that dropout keeps."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from bmtrain.kernels.short_attention import draw_words, keep_mask, short_attention_applies, short_attention_reference

BATCH, HEADS, TOKENS, DIM = 3, 4, 50, 32


def inputs() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(BATCH, HEADS, TOKENS, DIM, generator=generator).requires_grad_() for _ in range(3)]


@pytest.mark.parametrize("valid", [None, (50, 7, 0)])
def test_the_formula_is_torchs(valid: tuple[int, ...] | None) -> None:
    """Values and gradients; a sample without a valid key sees all keys."""
    own, other = inputs(), inputs()
    keys = None if valid is None else torch.arange(TOKENS) < torch.tensor(valid)[:, None]
    seen = None if valid is None else torch.arange(TOKENS) < torch.tensor([n or TOKENS for n in valid])[:, None]
    found = short_attention_reference(*own, keys, scale=0.3)
    expected = F.scaled_dot_product_attention(*other, attn_mask=None if seen is None else seen[:, None, None, :], scale=0.3)
    torch.testing.assert_close(found, expected)
    found.square().sum().backward()
    expected.square().sum().backward()
    for mine, theirs in zip(own, other, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-4)


def test_dropout_scales_what_it_keeps() -> None:
    """With the identity for values, the output is the probabilities: dropped ones are 0, others larger by 1 / (1 - p)."""
    query, key, _ = (x.detach() for x in inputs())
    value = torch.eye(TOKENS).expand(BATCH, HEADS, TOKENS, TOKENS)
    kept = torch.rand(BATCH, HEADS, TOKENS, TOKENS, generator=torch.Generator().manual_seed(1)) < 0.75
    plain = short_attention_reference(query, key, value, scale=0.3)
    dropped = short_attention_reference(query, key, value, None, kept, scale=0.3, dropout_p=0.25)
    torch.testing.assert_close(dropped, torch.where(kept, plain / 0.75, 0.0))


@pytest.mark.parametrize("dropout_p", [0.003, 0.1, 0.5])
def test_kept_pairs_are_as_many_as_asked_and_independent(dropout_p: float) -> None:
    """Within five standard deviations of independent draws: the rate, its spread, and products of neighbours."""
    torch.manual_seed(0)
    dropped = ~keep_mask(draw_words(torch.empty(32, 8, 128, 32)), dropout_p)
    noise = (dropped.double() - dropout_p) / (dropout_p * (1 - dropout_p)) ** 0.5
    corners = noise[..., ::2, ::2] * noise[..., 1::2, ::2] * noise[..., ::2, 1::2] * noise[..., 1::2, 1::2]
    products = {
        "rate": noise,
        "keys": noise[..., 1:] * noise[..., :-1],
        "queries": noise[..., 1:, :] * noise[..., :-1, :],
        "mirrored": (noise * noise.mT).triu(1)[:, :, :-1],
        "heads": noise[:, 1:] * noise[:, :-1],
        "corners of squares": corners,
    }
    for name, x in products.items():
        deviations = x.mean().item() * x.numel() ** 0.5
        assert abs(deviations) < 5, f"{name}: {deviations:.1f} standard deviations"
    for dim in (-1, -2):  # a word of a query or key must not make its row or column luckier than chance does
        assert noise.mean(dim).var().item() * 128 == pytest.approx(1, abs=0.05)


def test_nothing_is_dropped_at_zero() -> None:
    """All pairs survive, whatever the words."""
    assert keep_mask(torch.randint(-(2**31), 2**31, (2, 2, 2, 64), dtype=torch.int32), 0.0).all()


def test_the_kernels_do_not_offer_themselves_on_the_cpu() -> None:
    """Attention on the CPU stays torch's."""
    assert not short_attention_applies(*(x.bfloat16() for x in inputs()))
