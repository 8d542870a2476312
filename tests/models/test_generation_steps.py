"""Steps that are all the same work, recorded and issued ahead, give what other steps give."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from tests.models import parity
from tests.models.recording import recorded
from tests.models.test_generation_engine import made

from model_center.errors import InputError
from model_center.generation import engine
from model_center.generation.engine import generate, stream
from model_center.generation.output import GenerationOutput
from model_center.layer.cache import KeyValueCache
from model_center.layer.mask import AttentionMask
from model_center.layer.scaled_dot_product import attend, attend_visibly
from model_center.model.causal import TokenModel
from model_center.model.llama import Llama

TOLD = ["gpt2", "gptj", "opt", "llama"]  # models that have places told
OTHERS = ["cpm1", "cpm3", "t5", "cpm2"]
SEARCHES: dict[str, dict[str, Any]] = {
    "greedy": {"eos_token_id": list(range(5))},
    "penalty": {"repetition_penalty": 1.5, "repetition_window": 4, "min_new_tokens": 7},
    "drawn": {"do_sample": True, "temperature": 2.0, "top_p": 0.9, "eos_token_id": [1, 2, 3]},
    "seed": {"do_sample": True, "seed": 5, "top_k": 9, "num_return_sequences": 2},
    "beams": {"num_beams": 3, "num_return_sequences": 2, "eos_token_id": list(range(9))},
    "never": {"num_beams": 2, "early_stopping": "never", "eos_token_id": list(range(9))},
    "early": {"num_beams": 3, "early_stopping": True, "eos_token_id": list(range(20))},
}


@contextlib.contextmanager
def one_by_one() -> Iterator[None]:
    """Inside, no model has its places told: caches grow, and nothing is recorded."""
    with (
        mock.patch.object(Llama, "TELLS_PLACES", False),
        mock.patch.object(TokenModel, "TELLS_PLACES", False),
    ):
        yield


def prompts(padded: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    ids = parity.token_ids(4, 7, high=45)
    mask = torch.ones_like(ids)
    mask[0, :3] = mask[2, :1] = 0
    return ids, mask if padded else None


def output(name: str, padded: bool, options: dict[str, Any]) -> tuple[GenerationOutput, Any]:
    """What comes of a generation, and the next random numbers of the program."""
    model = made(name)  # which sets the seed too
    torch.manual_seed(3)
    out = generate(model, *prompts(padded), max_new_tokens=14, return_scores=True, **options)
    return out, torch.rand(3).tolist()


def assert_same(found: GenerationOutput, expected: GenerationOutput) -> None:
    assert torch.equal(found.sequences, expected.sequences)
    assert torch.equal(found.lengths, expected.lengths)
    for one, other in (
        (found.scores, expected.scores),
        (found.token_scores, expected.token_scores),
    ):
        assert one is not None and other is not None
        # of models with large weights, whose scores are sums of large numbers
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("name", TOLD)
def test_recorded_is_one_by_one(name: str, search: str, padded: bool) -> None:
    """Tokens, lengths, scores, and the numbers that are drawn afterwards."""
    with one_by_one():
        expected, drawn = output(name, padded, SEARCHES[search])
    assert len(set(expected.new_tokens.flatten().tolist())) > 3
    found, again = output(name, padded, SEARCHES[search])
    assert_same(found, expected)
    assert again == drawn
    for ahead in (0, 1, 2):
        with recorded(ahead) as recorder:
            found, again = output(name, padded, SEARCHES[search])
        assert recorder.num_aside == recorder.num_recorded == 1 and recorder.num_replays > 1
        assert_same(found, expected)
        assert again == drawn


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("name", OTHERS)
def test_other_models_are_ahead_too(name: str, search: str) -> None:
    """Step by step as they are: their biases and masks are made for each length."""
    options = SEARCHES[search]
    expected, drawn = output(name, False, options)
    with recorded(2) as recorder:
        found, again = output(name, False, options)
    assert recorder.num_aside == recorder.num_recorded == 0
    assert_same(found, expected)
    assert again == drawn


def test_a_generation_ends_before_its_last_step() -> None:
    """All rows end early: what was issued ahead is cut off, and no more is issued."""
    ids = prompts(False)[0]
    last = generate(made("gpt2"), ids, max_new_tokens=9).new_tokens[:, 3].tolist()
    expected = generate(made("gpt2"), ids, max_new_tokens=30, eos_token_id=last)
    assert expected.lengths.max() <= 4 and expected.new_tokens.shape[1] == expected.lengths.max()
    with recorded(2) as recorder:
        found = generate(made("gpt2"), ids, max_new_tokens=30, eos_token_id=last)
    assert torch.equal(found.sequences, expected.sequences)
    assert recorder.num_aside + recorder.num_replays <= expected.lengths.max() + 2


def test_streams_are_recorded() -> None:
    """The same tokens in the same steps; a stream that is left draws no more than was seen."""
    options: dict[str, Any] = {"do_sample": True, "eos_token_id": [1, 2, 3], "max_new_tokens": 14}
    model, ids = made("llama"), prompts(False)[0]
    torch.manual_seed(0)
    expected, drawn = list(stream(model, ids, **options)), torch.rand(2).tolist()
    assert [None in step for step in expected].count(True) not in {0, 14}
    torch.manual_seed(0)
    with recorded(2) as recorder:
        assert list(stream(model, ids, **options)) == expected
    assert recorder.num_replays > 3 and torch.rand(2).tolist() == drawn
    found: list[Any] = []
    for _ in range(2):
        torch.manual_seed(0)
        with recorded(2) if found else contextlib.nullcontext():
            steps = stream(model, ids, **options)
            found.append(([next(steps) for _ in range(5)], torch.rand(2).tolist()))
            steps.close()  # type: ignore[attr-defined]
    assert found[0] == found[1] and found[0][0] == expected[:5]


def test_a_stream_follows_the_weights() -> None:
    """Written in place and put in place of the old ones, between two tokens."""
    made.cache_clear()
    model, ids = made("llama"), prompts(False)[0]
    state = {name: value.clone() for name, value in model.state_dict().items()}

    def tokens() -> list[Any]:
        found = []
        for step in stream(model, ids, max_new_tokens=12):
            found.append(step)
            with torch.no_grad():
                if len(found) == 5:
                    model.encoder.output_layernorm.weight.mul_(-1)
                if len(found) == 8:
                    table = model.input_embedding
                    table.weight = torch.nn.Parameter(table.weight.flip(0))
        model.load_state_dict(state)
        return found

    with one_by_one():
        expected = tokens()
    with one_by_one():
        assert expected != list(stream(model, ids, max_new_tokens=12))
    with recorded(2) as recorder:
        assert tokens() == expected
    assert recorder.num_recorded == 2
    made.cache_clear()


def test_hooks_see_every_step() -> None:
    """A recording would call them once."""
    model, ids, seen = made("gpt2"), prompts(False)[0], []
    handle = model.encoder.layers[1].register_forward_hook(lambda *_: seen.append(1))
    try:
        ends = generate(model, ids, max_new_tokens=12).new_tokens[:, 8].tolist()
        seen.clear()
        with recorded(2) as recorder:
            steps = generate(model, ids, max_new_tokens=12, eos_token_id=ends).lengths.max()
    finally:
        handle.remove()
    assert len(seen) == steps < 12 and recorder.num_recorded == 0


def test_a_few_tokens_are_not_recorded() -> None:
    with recorded(0) as recorder:
        generate(made("gpt2"), prompts(False)[0], max_new_tokens=4)
    assert recorder.num_aside == 0


def test_holes_in_a_prompt_are_stepped_over() -> None:
    """Padding that is not in front is no reach."""
    ids, mask = prompts(False)[0], torch.ones(4, 7)
    mask[1, 2:4] = 0
    with one_by_one():
        expected = generate(made("llama"), ids, mask, max_new_tokens=9)
    with recorded(0) as recorder:
        found = generate(made("llama"), ids, mask, max_new_tokens=9)
    assert torch.equal(found.sequences, expected.sequences) and recorder.num_recorded == 0


def test_what_cannot_be_recorded_runs() -> None:
    """A look at the device in the model: one warning, and the tokens are right."""
    model, ids = made("gpt2"), prompts(False)[0]
    expected = generate(model, ids, max_new_tokens=12)
    enter = model.enter

    def looks(hidden: torch.Tensor, *rest: Any) -> Any:
        float(hidden.sum())
        return enter(hidden, *rest)

    with (
        mock.patch.object(model, "enter", looks),
        recorded(0) as recorder,
        pytest.warns(UserWarning, match="not permitted when stream is capturing"),
    ):
        found = generate(model, ids, max_new_tokens=12)
    assert torch.equal(found.sequences, expected.sequences) and recorder.num_recorded == 0


def test_nothing_is_kept() -> None:
    """Neither by the generation's end nor by a stream that is held on to, left or not."""
    caches: list[weakref.ref[Any]] = []
    fix = KeyValueCache.fix

    def noted(cache: KeyValueCache, place: torch.Tensor) -> None:
        fix(cache, place)
        pair = cache[0]._memory
        assert pair is not None
        caches.append(weakref.ref(pair[0]))

    gc.disable()
    try:
        with mock.patch.object(KeyValueCache, "fix", noted), recorded(2):
            generate(made("gpt2"), prompts(False)[0], max_new_tokens=12)
            whole = stream(made("gpt2"), prompts(False)[0], max_new_tokens=12)
            assert len(list(whole)) == 12
            left = stream(made("gpt2"), prompts(False)[0], max_new_tokens=12)
            next(left)
            assert caches[2]() is not None
            left.close()  # type: ignore[attr-defined]
        assert len(caches) == 3 and not [cache for cache in caches if cache() is not None]
    finally:
        gc.enable()


def test_a_full_cache_is_told() -> None:
    cache = KeyValueCache(1, 4)
    with torch.no_grad():
        cache[0].append(torch.ones(2, 1, 3, 8), torch.ones(2, 1, 3, 8))
        place = torch.tensor([3])
        cache.fix(place)
        assert cache.place is place and cache.length == 3
        cache.advance()
        keys, _ = cache[0].append(2 * torch.ones(2, 1, 1, 8), torch.ones(2, 1, 1, 8))
        assert keys.shape == (2, 1, 4, 8) and keys[0, 0, :, 0].tolist() == [1, 1, 1, 2]
        with pytest.raises(InputError, match="room for 4 tokens"):
            cache.advance()


@pytest.mark.parametrize("window", [None, 3])
def test_a_reach_is_a_mask_of_keys(window: int | None) -> None:
    """For all ways to attend, and settled or not."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(3, 4, 1, 8, generator=generator)
    keys, values = torch.randn(2, 3, 2, 10, 8, generator=generator)
    reach = torch.tensor([[0, 2, 4], [5, 6, 9]])
    first = reach[0] if window is None else torch.maximum(reach[0], reach[1] - window)
    places = torch.arange(10)
    seen = (places >= first[:, None]) & (places < reach[1, :, None])
    expected = attend(query, keys, values, AttentionMask(keys=seen))
    mask = AttentionMask(causal=True, reach=reach, window=window)
    for one in (mask, mask.settled(1, 10, query.device)):
        torch.testing.assert_close(attend(query, keys, values, one), expected)
        torch.testing.assert_close(attend_visibly(query, keys, values, one)[0], expected)
        bias = torch.randn(4, 1, 10, generator=torch.Generator().manual_seed(1))
        torch.testing.assert_close(
            attend(query, keys, values, one, bias),
            attend(query, keys, values, AttentionMask(keys=seen), bias),
        )


def test_how_far_a_gpu_is_ahead() -> None:
    """No step on the CPU, which computes at once."""
    cpu, gpu = torch.device("cpu"), torch.device("meta")
    assert engine.steps_ahead(cpu) == 0
    assert engine.steps_ahead(gpu) == engine.AHEAD == 2


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_what_a_cache_takes_is_known(name: str) -> None:
    """Before it is made, of all layers; of an encoder's tokens too."""
    model, ids = made(name), prompts(False)[0]
    decoding = model.decoding(ids, None, {})
    with torch.no_grad():
        decoding.start(5)
        decoding.expand(3)
    found = 0
    for layer in decoding.cache:
        for cache in (layer, layer.cross):
            if cache is not None and cache._memory is not None:
                found += sum(memory.nbytes for memory in cache._memory)
    assert decoding.num_bytes(5, 3) == found > 0
