"""Steps that are all the same work, recorded and issued ahead, give what other steps give."""

import contextlib
from typing import Any
from unittest import mock

import pytest
import torch
from tests.models import parity
from tests.models.recording import alive, recorded, watched_caches
from tests.models.test_generation_engine import made

from model_center.errors import InputError
from model_center.generation import engine
from model_center.generation.engine import generate, stream
from model_center.layer.cache import KeyValueCache
from model_center.layer.mask import AttentionMask
from model_center.layer.scaled_dot_product import attend, attend_visibly
from model_center.model.causal import TokenModel
from model_center.model.llama import Llama

TOLD = ["gpt2", "gptj", "opt", "llama"]  # models that have places told
OTHERS = ["cpm1", "cpm3", "t5", "cpm2"]
SEARCHES: dict[str, Any] = {
    "greedy": {"eos_token_id": list(range(5))},
    "penalty": {"repetition_penalty": 1.5, "repetition_window": 4, "min_new_tokens": 7},
    "drawn": {"do_sample": True, "temperature": 2.0, "top_p": 0.9, "eos_token_id": [1, 2, 3]},
    "seed": {"do_sample": True, "seed": 5, "top_k": 9, "num_return_sequences": 2},
    "beams": {"num_beams": 3, "num_return_sequences": 2, "eos_token_id": list(range(9))},
    "never": {"num_beams": 2, "early_stopping": "never", "eos_token_id": list(range(9))},
    "early": {"num_beams": 3, "early_stopping": True, "eos_token_id": list(range(20))},
}
IDS = parity.token_ids(4, 7, high=45)


@contextlib.contextmanager
def one_by_one():
    """Inside, no model has its places told: caches grow, and nothing is recorded."""
    with (
        mock.patch.object(Llama, "TELLS_PLACES", False),
        mock.patch.object(TokenModel, "TELLS_PLACES", False),
    ):
        yield


def output(name, padded, options):
    """What comes of a generation, and the next random numbers of the program."""
    mask = torch.ones_like(IDS)
    mask[0, :3] = mask[2, :1] = 0
    model = made(name)  # which sets the seed too
    torch.manual_seed(3)
    given = (IDS, mask) if padded else (IDS,)
    out = generate(model, *given, max_new_tokens=14, return_scores=True, **options)
    return out, torch.rand(3).tolist()


def assert_same(found, expected):
    assert torch.equal(found.sequences, expected.sequences)
    assert torch.equal(found.lengths, expected.lengths)
    for name in ("scores", "token_scores"):
        # of models with large weights, whose scores are sums of large numbers
        one, other = getattr(found, name), getattr(expected, name)
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "search"),
    [
        pytest.param(name, search, marks=[] if (place + number) % 4 < 1 else pytest.mark.long)
        for place, search in enumerate(SEARCHES)
        for number, name in enumerate(TOLD + OTHERS)
    ],
)
def test_recorded_is_one_by_one(name, search):
    """Tokens, lengths, scores, and the numbers that are drawn afterwards. Of models whose biases and
    masks are made for each length steps are issued ahead as they are.
    """
    options, tells = SEARCHES[search], name in TOLD
    for padded, ahead in ((False, 0), (False, 2), (True, 1)) if tells else ((False, 2),):
        with one_by_one():
            expected, drawn = output(name, padded, options)
        assert not tells or len(set(expected.new_tokens.flatten().tolist())) > 3
        assert_same(output(name, padded, options)[0], expected)
        with recorded(ahead) as recorder:
            found, again = output(name, padded, options)
        assert recorder.num_aside == recorder.num_recorded == tells
        assert (recorder.num_replays > 1) == tells
        assert_same(found, expected)
        assert again == drawn


def test_a_generation_ends_before_its_last_step():
    """All rows end early: what was issued ahead is cut off, and no more is issued."""
    model = made("gpt2")
    last = generate(model, IDS, max_new_tokens=9).new_tokens[:, 3].tolist()
    expected = generate(model, IDS, max_new_tokens=30, eos_token_id=last)
    assert expected.lengths.max() <= 4 and expected.new_tokens.shape[1] == expected.lengths.max()
    with recorded(2) as recorder:
        found = generate(model, IDS, max_new_tokens=30, eos_token_id=last)
    assert torch.equal(found.sequences, expected.sequences)
    assert recorder.num_aside + recorder.num_replays <= expected.lengths.max() + 2
    # a GPU is ahead, a CPU computes at once
    assert engine.steps_ahead(torch.device("cpu")) == 0
    assert engine.steps_ahead(torch.device("meta")) == engine.AHEAD == 2


def test_streams_are_recorded():
    """The same tokens in the same steps; a stream that is left draws no more than was seen."""
    options: dict[str, Any] = {"do_sample": True, "eos_token_id": [1, 2, 3], "max_new_tokens": 14}
    found: list[Any] = []
    for length in (None, 5):
        for context in (contextlib.nullcontext(), recorded(2)):
            torch.manual_seed(0)
            with context as recorder:
                steps = stream(made("llama"), IDS, **options)
                tokens = list(steps) if length is None else [next(steps) for _ in range(length)]
                found.append((tokens, torch.rand(2).tolist()))
                steps.close()  # type: ignore[attr-defined]
            assert recorder is None or recorder.num_replays > 1
    whole, again, left, left_again = found
    assert whole == again and left == left_again and left[0] == whole[0][:5]
    assert [None in step for step in whole[0]].count(True) not in {0, 14}


def test_what_is_not_recorded_is_right():
    """Hooks, which see every step, and none too many; a few tokens; padding that is not in front; a
    look at the device in the model, of which one warning tells.
    """
    model, seen, holes = made("gpt2"), [], torch.ones(4, 7)
    holes[1, 2:4] = 0
    for options in ({"max_new_tokens": 7}, {"max_new_tokens": 9, "attention_mask": holes}):
        with one_by_one():
            expected = generate(model, IDS, **options)
        with recorded(0) as recorder:
            assert generate(model, IDS, **options).rows() == expected.rows()
        assert recorder.num_recorded == recorder.num_aside == 0
    whole, enter = generate(model, IDS, max_new_tokens=12), model.enter
    handle = model.encoder.layers[1].register_forward_hook(lambda *_: seen.append(1))
    with recorded(2) as recorder:
        ends = whole.new_tokens[:, 8].tolist()
        steps = generate(model, IDS, max_new_tokens=12, eos_token_id=ends).lengths.max()
    handle.remove()
    assert len(seen) == steps < 12 and recorder.num_recorded == 0

    def looks(hidden, *rest):
        float(hidden.sum())
        return enter(hidden, *rest)

    with (
        mock.patch.object(model, "enter", looks),
        recorded(0) as recorder,
        pytest.warns(UserWarning, match="not permitted when stream is capturing"),
    ):
        found = generate(model, IDS, max_new_tokens=12)
    assert torch.equal(found.sequences, whole.sequences) and recorder.num_recorded == 0


def test_nothing_is_kept():
    """Neither by the generation's end nor by a stream that is held on to, left or not."""
    with recorded(2), watched_caches() as caches:
        generate(made("gpt2"), IDS, max_new_tokens=12)
        whole, left = (stream(made("gpt2"), IDS, max_new_tokens=12) for _ in range(2))
        assert len(list(whole)) == 12
        next(left)
        assert alive(caches) == [False, False, True]
        left.close()  # type: ignore[attr-defined]
        assert not any(alive(caches))


@torch.no_grad()
def test_a_full_cache_is_told():
    with pytest.raises(InputError, match="the mask has no reach"):
        AttentionMask().bounds  # noqa: B018
    cache, place, ones = KeyValueCache(1, 4), torch.tensor([3]), torch.ones(2, 1, 3, 8)
    cache[0].append(ones, ones)
    cache.fix(place)
    assert cache.next_position is place and cache.length == 3
    cache.advance()
    keys, _ = cache[0].append(2 * ones[:, :, :1], ones[:, :, :1])
    assert keys.shape == (2, 1, 4, 8) and keys[0, 0, :, 0].tolist() == [1, 1, 1, 2]
    with pytest.raises(InputError, match="room for 4 tokens"):
        cache.advance()
    assert cache.length == 4


@pytest.mark.parametrize("window", [None, 3])
def test_a_reach_is_a_mask_of_keys(window):
    """For all ways to attend, and settled or not."""
    torch.manual_seed(0)
    query, bias = torch.randn(3, 4, 1, 8), torch.randn(4, 1, 10)
    keys, values = torch.randn(2, 3, 2, 10, 8)
    reach = torch.tensor([[0, 2, 4], [5, 6, 9]])
    first = reach[0] if window is None else torch.maximum(reach[0], reach[1] - window)
    places = torch.arange(10)
    plain = AttentionMask(keys=(places >= first[:, None]) & (places < reach[1, :, None]))
    mask = AttentionMask(causal=True, reach=reach, window=window)
    for one in (mask, mask.materialized(1, 10, query.device)):
        for given in ((), (bias,)):
            expected = attend(query, keys, values, plain, *given)
            torch.testing.assert_close(attend(query, keys, values, one, *given), expected)
            found, _ = attend_visibly(query, keys, values, one, *given)
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_what_a_cache_takes_is_known(name):
    """Before it is made, of all layers; of an encoder's tokens too."""
    decoding = made(name).decoding(IDS, None, {})
    with torch.no_grad():
        decoding.start(5)
        decoding.expand(3)
    caches = [cache for layer in decoding.cache for cache in (layer, layer.cross)]
    memory = [cache._memory for cache in caches if cache is not None and cache._memory is not None]
    assert decoding.num_bytes(5, 3) == sum(part.nbytes for pair in memory for part in pair) > 0
