"""What is drawn from: the filters against those of transformers; that it is drawn so: statistics,
seeds.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.models import parity
from transformers.generation import logits_process

from model_center.errors import ConfigError
from model_center.generation.config import GenerationConfig
from model_center.generation.engine import generate
from model_center.generation.filters import Filters, repetition_penalty, top_k, top_p
from model_center.model.llama import Llama, LlamaConfig


def tiny(vocab_size: int = 12) -> Llama:
    """A small random model whose next tokens are neither certain nor all alike."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "dim_model": 16,
        "num_heads": 2,
        "dim_head": 8,
        "dim_ff": 24,
        "num_layers": 1,
    }
    return parity.randomized(Llama(LlamaConfig(vocab_size=vocab_size, dtype="float32", **sizes)))


def scores_of(rows: int = 6, vocab: int = 50) -> torch.Tensor:
    """Random scores, some equal, some -inf."""
    scores = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(3)) * 3
    scores[:, 10:20] = scores[:, :1]
    scores[1, 30:] = -torch.inf
    return scores


@pytest.mark.parametrize("k", [1, 2, 7, 50, 80])
def test_top_k_is_that_of_transformers(k: int) -> None:
    scores = scores_of()
    assert torch.equal(top_k(scores, k), logits_process.TopKLogitsWarper(k)(None, scores))


@pytest.mark.parametrize("p", [0.01, 0.3, 0.9, 0.999])
def test_top_p_is_that_of_transformers(p: float) -> None:
    scores = scores_of()
    assert torch.equal(top_p(scores, p), logits_process.TopPLogitsWarper(p)(None, scores))


def test_top_p_keeps_the_fewest_tokens_that_reach_it() -> None:
    probabilities = torch.tensor([[0.1, 0.4, 0.2, 0.3]])
    for p, kept in (
        (0.39, [1]),
        (0.41, [1, 3]),
        (0.69, [1, 3]),
        (0.71, [1, 2, 3]),
        (0.95, [0, 1, 2, 3]),
    ):
        assert top_p(probabilities.log(), p)[0].isfinite().nonzero().flatten().tolist() == kept


@pytest.mark.parametrize("penalty", [0.5, 1.3, 4.0])
def test_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    scores, occurred = scores_of(), parity.token_ids(6, 9, high=50, low=0)
    expected = logits_process.RepetitionPenaltyLogitsProcessor(penalty)(occurred, scores)
    assert torch.equal(repetition_penalty(scores, occurred, penalty), expected)


def penalized(
    ids: torch.Tensor, mask: torch.Tensor | None = None, **options: Any
) -> list[list[int]]:
    """Which tokens each row's filters penalise after these ids, of which the first four are the
    prompt.
    """
    config = GenerationConfig(repetition_penalty=2.0, **options)
    scores = Filters(config, 4, mask, ids.device)(torch.ones(len(ids), 20), ids)
    return [(row != 1).nonzero().flatten().tolist() for row in scores]


def test_what_counts_as_repeated() -> None:
    """The prompt without its padding, or not; only the last tokens of what counts."""
    ids = torch.tensor([[0, 0, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6]])
    mask = torch.tensor([[False, False, True, True], [True] * 4])
    assert penalized(ids) == [[0, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6]]
    assert penalized(ids, mask) == [[5, 6, 7, 8], [1, 2, 3, 4, 5, 6]]
    assert penalized(ids, mask, penalize_prompt=False) == [[7, 8], [5, 6]]
    assert penalized(ids, mask, repetition_window=3) == [[6, 7, 8], [4, 5, 6]]
    assert penalized(ids, mask, repetition_window=5) == [[5, 6, 7, 8], [2, 3, 4, 5, 6]]
    assert penalized(ids, penalize_prompt=False, repetition_window=1) == [[8], [6]]
    assert penalized(ids[:, :4], mask, penalize_prompt=False) == [[], []]


def test_the_filters_of_a_configuration_are_those_of_transformers_in_their_order() -> None:
    """All at once, before and after the least number of new tokens."""
    config = GenerationConfig(
        repetition_penalty=1.4,
        min_new_tokens=3,
        eos_token_id=[4, 9],
        forbidden_tokens=[2, 3],
        do_sample=True,
        temperature=0.7,
        top_k=20,
        top_p=0.8,
    )
    ids = parity.token_ids(6, 12, high=50, low=0)
    for length in (8, 10, 11, 12):
        seen, scores = ids[:, :length], scores_of()
        for step in (
            logits_process.RepetitionPenaltyLogitsProcessor(1.4),
            logits_process.MinNewTokensLengthLogitsProcessor(8, 3, [4, 9]),
            logits_process.SuppressTokensLogitsProcessor([2, 3]),
            logits_process.TemperatureLogitsWarper(0.7),
            logits_process.TopKLogitsWarper(20),
            logits_process.TopPLogitsWarper(0.8),
        ):
            scores = step(seen, scores)
        assert torch.equal(Filters(config, 8, None, ids.device)(scores_of(), seen), scores), length
        assert (scores[:, [4, 9]] == -torch.inf).all() == (length < 11)


def test_tokens_are_drawn_with_their_probabilities() -> None:
    """4000 drawn tokens have the frequencies of the filtered distribution (chi-squared: 0.999
    quantile).
    """
    model, ids = tiny(), torch.tensor([[3, 5, 7]])
    options: dict[str, Any] = {"do_sample": True, "temperature": 1.5, "top_k": 8, "top_p": 0.95}
    out = generate(model, ids, max_new_tokens=1, num_return_sequences=4000, seed=5, **options)
    with torch.no_grad():
        logits = model(input_ids=ids).logits[:, -1]
    expected = top_p(top_k(logits / 1.5, 8), 0.95).softmax(-1)[0] * 4000
    counts = torch.bincount(out.new_tokens[:, 0], minlength=12)
    possible = expected > 0
    assert 4 <= possible.sum() <= 8 and not counts[~possible].any()
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    assert statistic < {4: 16.3, 5: 18.5, 6: 20.5, 7: 22.5, 8: 24.3}[int(possible.sum())]


def test_a_seed_fixes_what_is_drawn() -> None:
    """Equal seeds, equal tokens; others differ; without one torch's own state decides; a generator
    is advanced.
    """
    model, ids = tiny(), torch.tensor([[3, 5, 7], [1, 2, 3]])

    def draw(**options: Any) -> torch.Tensor:
        return generate(model, ids, max_new_tokens=12, do_sample=True, **options).sequences

    assert torch.equal(draw(seed=1), draw(seed=1))
    assert not torch.equal(draw(seed=1), draw(seed=2))
    torch.manual_seed(7)
    first, second = draw(), draw()
    torch.manual_seed(7)
    assert torch.equal(draw(), first) and not torch.equal(first, second)
    generator = torch.Generator().manual_seed(1)
    first, second = draw(generator=generator), draw(generator=generator)
    assert torch.equal(first, draw(seed=1)) and not torch.equal(first, second)
    with pytest.raises(ConfigError, match="no seed"):
        draw(generator=generator, seed=1)
    with pytest.raises(ConfigError, match="expected do_sample=True"):
        generate(model, ids, generator=generator)


def test_several_are_drawn_for_each_prompt() -> None:
    """Next to each other; with scores those of the filtered distribution; the likeliest only is
    greedy search.
    """
    model, ids = tiny(), torch.tensor([[3, 5, 7], [1, 2, 3]])
    out = generate(
        model,
        ids,
        max_new_tokens=6,
        do_sample=True,
        seed=0,
        num_return_sequences=3,
        top_k=4,
        return_scores=True,
    )
    assert out.token_scores is not None and out.scores is not None
    assert out.sequences.shape == (6, 9) and torch.equal(
        out.sequences[:, :3], ids.repeat_interleave(3, 0)
    )
    assert len(set(map(str, out.rows()[:3]))) == 3
    with torch.no_grad():
        logits = model(input_ids=out.sequences).logits[:, 2:-1]
    expected = (
        top_k(logits.flatten(0, 1), 4)
        .log_softmax(-1)
        .gather(1, out.new_tokens.reshape(-1, 1))
        .view(6, 6)
    )
    parity.assert_close(out.token_scores, expected)
    parity.assert_close(out.scores, expected.sum(1))
    drawn = generate(model, ids, max_new_tokens=6, do_sample=True, top_k=1)
    assert torch.equal(drawn.sequences, generate(model, ids, max_new_tokens=6).sequences)
