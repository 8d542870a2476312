"""Generations that share a session give what each gives by itself, and nothing stays behind it."""

import contextlib
import copy
import operator
from collections.abc import Callable
from typing import Any
from unittest import mock

import peft
import pytest
import torch
from peft.tuners.lora import LoraLayer
from tests.models import parity
from tests.models.recording import alive, recorded, watched_caches
from tests.models.test_generation_engine import made
from tests.models.test_generation_steps import SEARCHES, assert_same

from model_center.errors import ConfigError
from model_center.generation import decode_runner
from model_center.generation.engine import generate, stream
from model_center.generation.fingerprint import HostStateFingerprint
from model_center.generation.session import Session, round_up_capacity
from model_center.layer.cache import KeyValueCache
from model_center.model.llama import Llama

__all__ = ["alive", "watched_caches"]  # for those that looked for them here


def fresh(name="llama"):
    """A model that a test may change."""
    return copy.deepcopy(made(name))


def prompt(length=7, rows=4, seed=0):
    return parity.token_ids(rows, length, high=45, seed=seed)


def rows_of(model, ids=None, new=12, **more):
    ids = prompt() if ids is None else ids
    return generate(model, ids, max_new_tokens=new, **more).rows()


@contextlib.contextmanager
def opened():
    """A session whose steps are recorded as on a GPU."""
    with recorded(2) as recorder, Session() as session:
        yield recorder, session


@pytest.mark.parametrize(
    ("name", "search"),
    [
        *(("gpt2", "seed"), ("gptj", "greedy"), ("opt", "never"), ("llama", "beams")),
        *(("llama", "penalty"), ("llama", "drawn")),
        pytest.param("gpt2", "early", marks=pytest.mark.long),
    ],
)
def test_one_recording_serves_other_prompts(name, search):
    """Of other lengths, padded or not, after an early end and after random numbers."""
    model, options = made(name), SEARCHES[search] | {"return_scores": True}
    mask = torch.ones(4, 5)
    mask[0, :3] = mask[2, :1] = 0
    calls = [(prompt(), None, 14), (prompt(5, seed=1), mask, 9), (prompt(9, seed=2), None, 11)]

    def outputs(**shared):
        torch.manual_seed(3)
        found: list[Any] = [
            generate(model, ids, padding, max_new_tokens=new, **options, **shared)
            for ids, padding, new in calls
        ]
        return [*found, torch.rand(3).tolist()]

    alone = outputs()
    with opened() as (recorder, session):
        together = outputs(session=session)
        assert recorder.num_recorded == 1
    for one, other in zip(together[:-1], alone[:-1], strict=True):
        assert_same(one, other)
    assert together[-1] == alone[-1]


def test_first_passes_are_recorded_where_prompts_are_alike():
    """From the third generation with prompts of one shape on, any tokens in them; not those of long
    prompts, of padded ones, and of several rows of each prompt.
    """
    model, counts, mask = made("llama"), [], torch.ones(4, 7)
    prompts = [prompt(5 if number in (5, 6) else 7, seed=number) for number in range(10)]
    expected = [rows_of(model, ids) for ids in prompts]
    with opened() as (recorder, session):
        for ids, rows in zip(prompts, expected, strict=True):
            assert rows_of(model, ids, session=session) == rows
            counts.append(recorder.num_recorded)
    assert counts == [1, 1, 2, 2, 2, 2, 3, 3, 4, 4]
    mask[0, :2] = 0
    others: list[dict[str, Any]] = [{"attention_mask": mask}, {"num_beams": 2}, {}]
    for options in others:
        rows = rows_of(model, **options)
        with (
            opened() as (recorder, session),
            mock.patch.object(decode_runner, "MOST_OF_PROMPTS", 27),
        ):
            for _ in range(4):
                assert rows_of(model, session=session, **options) == rows
            assert recorder.num_recorded == recorder.num_aside == 1


def test_what_has_no_room_is_recorded_anew():
    """More rows, fewer rows or more tokens; the memory of before is free then, and at the end."""
    model, found = made("llama"), []
    sizes = [(4, 7, 8), (4, 3, 8), (2, 7, 9), (2, 9, 23), (2, 9, 7), (3, 4, 30)]
    calls = [(model, prompt(length, rows), new) for rows, length, new in sizes]
    expected = [rows_of(*call) for call in calls]
    with watched_caches() as caches:
        with opened() as (recorder, session):
            for call in calls:
                found.append((rows_of(*call, session=session), recorder.num_recorded))
                assert sum(alive(caches)) == 1
        counts = [1, 1, 2, 2 + (round_up_capacity(16) < 32), 3, 4]
        assert found == list(zip(expected, counts, strict=True))
        assert not any(alive(caches))
    for closed in (session, Session()):
        with pytest.raises(ConfigError, match=r"the session is not open.*with Session"):
            stream(model, prompt(), max_new_tokens=9, session=closed)
    rooms = {size: round_up_capacity(size) for size in range(1, 5000)}
    assert all(size <= room < max(size, 64) * 1.25 for size, room in rooms.items())
    assert len(set(rooms.values())) < 40


OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "return_scores": True}


def assert_followed(model, session, before, is_same=False):
    """The model generates as without a session, which is otherwise than before."""
    expected = generate(model, prompt(), **OPTIONS)
    assert expected.token_scores is not None and before.token_scores is not None
    assert torch.equal(expected.token_scores, before.token_scores) == is_same
    for _ in range(3):
        assert_same(generate(model, prompt(), **OPTIONS, session=session), expected)


def hooked(part):
    part.register_forward_hook(lambda _, __, out: 3 * out)
    return part


def swapped(w_in):
    w_in.w_0, w_in.w_1 = w_in.w_1, w_in.w_0
    return w_in


# What takes the place of what; other kinds of changes are those of a fingerprint.
CHANGES: dict[str, Callable[[Any], Any]] = {
    "encoder.output_layernorm.weight": lambda weight: weight.mul_(-1),
    "input_embedding.weight": lambda weight: torch.nn.Parameter(weight.flip(0)),
    "input_embedding.weight.data": lambda data: data.flip(0),
    "encoder.layers.0.self_att.self_attention.project_q.weight.data": lambda data: data.t(),
    "encoder.layers.1.ffn.ffn.w_in": swapped,
    "config.sliding_window": lambda _: 2,
    "position_bias.base": lambda _: 3.0,
    "position_bias.scaling": lambda found: found.update(factor=3.0, rope_type="linear") or found,
    "encoder.layers.1.ffn.ffn": hooked,
}


IN_PLACE = ["encoder.output_layernorm.weight", "encoder.layers.1.ffn.ffn"]  # and hooks: none at all


@pytest.mark.parametrize("name", CHANGES)
def test_a_session_follows_the_model(name):
    model = fresh()
    before = generate(model, prompt(), **OPTIONS)
    with opened() as (recorder, session):
        for _ in range(3):
            assert_same(generate(model, prompt(), **OPTIONS, session=session), before)
        assert recorder.num_recorded == 2  # the first pass too
        owner, _, last = name.rpartition(".")
        with torch.no_grad():
            of = operator.attrgetter(owner)(model)
            setattr(of, last, CHANGES[name](getattr(of, last)))
        num_before = recorder.num_recorded
        rows_of(model, session=session)
        # values in place are no other recording
        assert (recorder.num_recorded == num_before) == (name in IN_PLACE)
        assert_followed(model, session, before)


def test_what_comes_and_goes_is_followed():
    """Autocast, a method of the class, adapters that are switched off, another model."""
    model, other, forward = fresh(), fresh(), Llama.forward
    config = peft.LoraConfig(r=2, target_modules=["project_q", "w_0"], init_lora_weights=False)
    peft.inject_adapter_in_model(config, model)
    adapters = [part for part in model.modules() if isinstance(part, LoraLayer)]

    def more(*args, **kwargs):
        out = forward(*args, **kwargs)
        out.last_hidden_state = -out.last_hidden_state
        return out

    @contextlib.contextmanager
    def switched_off():
        for is_on in (False, True):
            for adapter in adapters:
                adapter.enable_adapters(is_on)
            if not is_on:
                yield

    plain, others = generate(model, prompt(), **OPTIONS), generate(other, prompt(), **OPTIONS)
    with opened() as (_, session):
        for state in (
            torch.autocast("cpu", torch.bfloat16),
            mock.patch.object(Llama, "forward", more),
            switched_off(),
        ):
            with state:
                assert_followed(model, session, plain)
            assert_followed(model, session, plain, is_same=True)
            assert_same(generate(other, prompt(), **OPTIONS, session=session), others)


def test_streams():
    """Two side by side, and a generation between their tokens; one that is left leaves its
    recording; one that outlives the session goes on, and leaves nothing.
    """
    model, prompts = made("llama"), (prompt(), prompt(seed=1))
    expected = [list(stream(model, ids, max_new_tokens=14)) for ids in prompts]
    whole = rows_of(model)
    with watched_caches() as caches:
        with opened() as (recorder, session):
            options: dict[str, Any] = {"max_new_tokens": 14, "session": session}
            rows_of(model, session=session)
            streams = [stream(model, ids, **options) for ids in prompts]
            steps = []
            for _ in range(14):
                steps.append([next(each) for each in streams])
                assert rows_of(model, session=session) == whole
            assert [list(found) for found in zip(*steps, strict=True)] == expected
            assert [list(each) for each in streams] == [[], []] and sum(alive(caches)) == 1
        assert not any(alive(caches))
        with opened() as (recorder, session):
            options["session"] = session
            for length in (5, 12, 8):
                left = stream(model, prompts[0], **options)
                assert [next(left) for _ in range(length)] == expected[0][:length]
                left.close()  # type: ignore[attr-defined]
            assert recorder.num_recorded == 2  # a step, and the first pass
            left = stream(model, prompts[0], **options)
            found = [next(left) for _ in range(5)]
        with recorded(2):
            assert found + list(left) == expected[0] and not any(alive(caches))


def test_a_stream_in_a_session_follows_weights_and_model():
    """Between two tokens; and what it leaves is of the model as it was recorded."""
    model, ids = fresh(), prompt()
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def results(**shared):
        model.load_state_dict(before)
        model.config.sliding_window, found = 6, []
        for step in stream(model, ids, max_new_tokens=12, **shared):
            found.append(step)
            if len(found) == 6:
                model.config.sliding_window, table = 2, model.input_embedding
                table.weight = torch.nn.Parameter(table.weight.flip(0))
        for window in (2, 6):
            model.config.sliding_window = window
            found.append(rows_of(model, ids, **shared))
        return found

    expected = results()
    model.load_state_dict(before)
    with opened() as (recorder, session):
        for _ in range(3):  # the first pass is recorded too
            rows_of(model, session=session)
        assert recorder.num_recorded == 2
        assert results(session=session) == expected


@pytest.mark.parametrize("num_beams", [1, 2])
def test_errors_and_values_that_are_no_numbers_leave_nothing(num_beams):
    """Memory of an earlier generation is multiplied by probabilities of zero."""
    model, ids = fresh(), prompt()
    options: dict[str, Any] = {"num_beams": num_beams}
    expected = rows_of(model, **options)
    weight = model.encoder.layers[0].self_att.self_attention.project_v.weight
    kept = weight.detach().clone()
    with opened() as (recorder, session), watched_caches() as caches, torch.no_grad():
        options["session"] = session
        rows_of(model, **options)
        broken = mock.patch.object(KeyValueCache, "advance", side_effect=ZeroDivisionError)
        with broken, contextlib.suppress(ZeroDivisionError):
            rows_of(model, **options)
        assert not any(alive(caches))
        assert rows_of(model, **options) == expected
        weight.fill_(float("nan"))
        rows_of(model, torch.cat([ids, ids], 1), 14, **options)
        weight.copy_(kept)
        assert rows_of(model, **options) == expected
        assert recorder.num_recorded == 2


def test_what_is_not_recorded_shares_nothing():
    """Few tokens, holes in prompts, hooks, models that do not tell places; and what does goes on."""
    model, holes = fresh(), torch.ones(4, 7)
    holes[1, 2:4] = 0
    calls: list[tuple[Any, dict[str, Any]]] = [
        *((model, {}), (model, {"attention_mask": holes}), (model, {"new": 3}), (model, {})),
        *((made("cpm1"), {}), (model, {"new": 3})),
    ]
    expected = [rows_of(one, **options) for one, options in calls]
    with opened() as (recorder, session):
        found = [rows_of(one, session=session, **options) for one, options in calls]
        assert found == expected
        assert recorder.num_recorded == 2  # a step, and once the first pass of the same prompts
        handle = model.encoder.layers[1].register_forward_hook(lambda *_: None)
        assert rows_of(model, session=session) == expected[0]
        handle.remove()
        assert recorder.num_recorded == 2


def test_on_the_cpu_a_session_does_nothing():
    """Not even a look at the model, once a generation, costs more than one."""
    model = made("llama")
    seen = mock.patch.object(decode_runner, "HostStateFingerprint", wraps=HostStateFingerprint)
    with watched_caches() as caches, seen as fingerprints, Session() as session:
        for _ in range(2):
            assert rows_of(model, session=session) == rows_of(model)
        assert not any(alive(caches)) and fingerprints.call_count == 2
