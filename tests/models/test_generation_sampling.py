"""What is drawn from: the filters against those of transformers; that it is drawn so: statistics,
seeds.
"""

from typing import Any

import pytest
import torch
from tests.models import parity, small
from transformers.generation import logits_process as theirs

from model_center.errors import ConfigError
from model_center.generation.config import GenerationConfig
from model_center.generation.engine import generate
from model_center.generation.filters import Filters, repetition_penalty, top_k, top_p

IDS = torch.tensor([[3, 5, 7], [1, 2, 3]])


def tiny():
    """A small random model whose next tokens are neither certain nor all alike."""
    return small.model("Llama", num_layers=1, vocab_size=12)


def scores_of():
    """Random scores, some equal, some -inf."""
    scores = torch.randn(6, 50, generator=torch.Generator().manual_seed(3)) * 3
    scores[:, 10:20] = scores[:, :1]
    scores[1, 30:] = -torch.inf
    return scores


def test_filters_are_those_of_transformers():
    """Each by itself; and those of a configuration in their order, before and after the least
    number of new tokens.
    """
    scores, ids = scores_of(), parity.token_ids(6, 12, high=50, low=0)
    for k in (1, 2, 7, 50, 80):
        assert torch.equal(top_k(scores, k), theirs.TopKLogitsWarper(k)(None, scores))
    for p in (0.01, 0.3, 0.9, 0.999):
        assert torch.equal(top_p(scores, p), theirs.TopPLogitsWarper(p)(None, scores))
    for penalty in (0.5, 1.3, 4.0):
        expected = theirs.RepetitionPenaltyLogitsProcessor(penalty)(ids, scores)
        assert torch.equal(repetition_penalty(scores, ids, penalty), expected)
    options: dict[str, Any] = {"repetition_penalty": 1.4, "min_new_tokens": 3, "do_sample": True}
    options |= {"eos_token_id": [4, 9], "temperature": 0.7, "top_k": 20, "top_p": 0.8}
    config = GenerationConfig(**options, forbidden_tokens=[2, 3])
    for length in (8, 10, 11, 12):
        expected = scores
        for step in (
            theirs.RepetitionPenaltyLogitsProcessor(1.4),
            theirs.MinNewTokensLengthLogitsProcessor(8, 3, [4, 9]),
            theirs.SuppressTokensLogitsProcessor([2, 3]),
            theirs.TemperatureLogitsWarper(0.7),
            theirs.TopKLogitsWarper(20),
            theirs.TopPLogitsWarper(0.8),
        ):
            expected = step(ids[:, :length], expected)
        found = Filters(config, 8, None, ids.device)(scores, ids[:, :length])
        assert torch.equal(found, expected), length
        assert (found[:, [4, 9]] == -torch.inf).all() == (length < 11)
    assert torch.equal(scores, scores_of())


def test_what_counts_as_repeated():
    """The prompt without its padding, or not; only the last tokens of what counts."""
    ids = torch.tensor([[0, 0, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6]])
    mask = torch.arange(4).expand(2, 4) >= torch.tensor([[2], [0]])
    cases: list[tuple[int, Any, dict[str, Any], str]] = [
        (6, None, {}, "05678 123456"),
        (6, mask, {}, "5678 123456"),
        (6, mask, {"penalize_prompt": False}, "78 56"),
        (6, mask, {"repetition_window": 3}, "678 456"),
        (6, mask, {"repetition_window": 5}, "5678 23456"),
        (6, None, {"penalize_prompt": False, "repetition_window": 1}, "8 6"),
        (4, mask, {"penalize_prompt": False}, " "),
    ]
    for length, given, options, expected in cases:
        config = GenerationConfig(repetition_penalty=2.0, **options)
        scores = Filters(config, 4, given, ids.device)(torch.ones(2, 20), ids[:, :length])
        found = ["".join(map(str, (row != 1).nonzero().flatten().tolist())) for row in scores]
        assert found == expected.split(" "), options


def test_tokens_are_drawn_with_their_probabilities():
    """4000 drawn tokens have the frequencies of the filtered distribution (chi-squared: 0.999
    quantile).
    """
    model = tiny()
    options: dict[str, Any] = {"do_sample": True, "temperature": 1.5, "top_k": 8, "top_p": 0.95}
    out = generate(model, IDS[:1], max_new_tokens=1, num_return_sequences=4000, seed=5, **options)
    with torch.no_grad():
        logits = model(input_ids=IDS[:1]).logits[:, -1]
    expected = top_p(top_k(logits / 1.5, 8), 0.95).softmax(-1)[0] * 4000
    counts = torch.bincount(out.new_tokens[:, 0], minlength=12)
    possible = expected > 0
    assert 4 <= possible.sum() <= 8 and not counts[~possible].any()
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    assert statistic < {4: 16.3, 5: 18.5, 6: 20.5, 7: 22.5, 8: 24.3}[int(possible.sum())]


def test_a_seed_fixes_what_is_drawn():
    """Equal seeds, equal tokens; others differ; without one torch's own state decides; a generator
    is advanced.
    """
    model = tiny()

    def draw(**options):
        return generate(model, IDS, max_new_tokens=12, do_sample=True, **options).rows()

    assert draw(seed=1) == draw(seed=1) != draw(seed=2)
    torch.manual_seed(7)
    first, second = draw(), draw()
    torch.manual_seed(7)
    draw(seed=1)  # draws from numbers of its own
    assert draw() == first != second
    generator = torch.Generator().manual_seed(1)
    with pytest.raises(ConfigError, match="no seed"):
        draw(generator=generator, seed=1)
    with pytest.raises(ConfigError, match="expected do_sample=True"):
        generate(model, IDS, generator=generator)
    assert draw(generator=generator) == draw(seed=1) != draw(generator=generator)


def test_several_are_drawn_for_each_prompt():
    """Next to each other; with scores those of the filtered distribution; the likeliest only is
    greedy search.
    """
    model = tiny()
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": True, "return_scores": True}
    out = generate(model, IDS, seed=0, num_return_sequences=3, top_k=4, **options)
    assert out.token_scores is not None and out.scores is not None
    assert torch.equal(out.sequences[:, :3], IDS.repeat_interleave(3, 0))
    assert out.sequences.shape == (6, 9) and len(set(map(str, out.rows()[:3]))) == 3
    with torch.no_grad():
        logits = model(input_ids=out.sequences).logits[:, 2:-1]
    chances = top_k(logits.flatten(0, 1), 4).log_softmax(-1)
    expected = chances.gather(1, out.new_tokens.reshape(-1, 1)).view(6, 6)
    parity.assert_close(out.token_scores, expected)
    parity.assert_close(out.scores, expected.sum(1))
    drawn = generate(model, IDS, top_k=1, **options)
    assert torch.equal(drawn.sequences, generate(model, IDS, max_new_tokens=6).sequences)
