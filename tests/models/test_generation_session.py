"""Generations that share a session give what each gives by itself, and nothing stays behind it."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import peft
import pytest
import torch
from peft.tuners.lora import LoraLayer
from tests.garbage import without_collector
from tests.models import parity
from tests.models.recording import OperationRecorder, recorded
from tests.models.test_generation_engine import made
from tests.models.test_generation_steps import SEARCHES, TOLD, assert_same

from bmtrain.graphs.conditions import Conditions
from model_center.errors import ConfigError
from model_center.generation import passes
from model_center.generation.engine import generate, stream
from model_center.generation.output import GenerationOutput
from model_center.generation.session import Session, roomy
from model_center.layer.cache import KeyValueCache
from model_center.layer.feedforward import gelu_new
from model_center.layer.linear import Linear
from model_center.model.llama import Llama


def fresh(name: str = "llama") -> Any:
    """A model that a test may change."""
    return copy.deepcopy(made(name))


def prompt(length: int = 7, rows: int = 4, seed: int = 0) -> torch.Tensor:
    return parity.token_ids(rows, length, high=45, seed=seed)


@contextlib.contextmanager
def opened() -> Iterator[tuple[OperationRecorder, Session]]:
    """A session whose steps are recorded as on a GPU."""
    with recorded(2) as recorder, Session() as session:
        yield recorder, session


@contextlib.contextmanager
def watched_caches() -> Iterator[list[weakref.ref[torch.Tensor]]]:
    """Memory of every cache that is fixed inside; without Python's collector."""
    caches: list[weakref.ref[torch.Tensor]] = []
    fix = KeyValueCache.fix

    def noted(cache: KeyValueCache, place: torch.Tensor) -> None:
        fix(cache, place)
        pair = cache[0]._memory
        assert pair is not None
        caches.append(weakref.ref(pair[0]))

    with without_collector(), mock.patch.object(KeyValueCache, "fix", noted):
        yield caches


def differ(one: GenerationOutput, other: GenerationOutput) -> bool:
    assert one.token_scores is not None and other.token_scores is not None
    return not torch.equal(one.token_scores, other.token_scores)


def alive(caches: list[weakref.ref[torch.Tensor]]) -> list[bool]:
    return [cache() is not None for cache in caches]


@pytest.mark.parametrize(
    ("name", "search"),
    [*((name, "greedy") for name in TOLD), *(("llama", name) for name in SEARCHES)],
)
def test_one_recording_serves_other_prompts(name: str, search: str) -> None:
    """Of other lengths, padded or not, after an early end and after random numbers."""
    model, options = made(name), SEARCHES[search] | {"return_scores": True}
    mask = torch.ones(4, 5)
    mask[0, :3] = mask[2, :1] = 0
    calls = [(prompt(), None, 14), (prompt(5, seed=1), mask, 9), (prompt(9, seed=2), None, 11)]
    alone: list[Any] = []
    together: list[Any] = []
    for found, context in ((alone, contextlib.nullcontext()), (together, opened())):
        torch.manual_seed(3)
        with context as both:
            session: dict[str, Any] = {} if both is None else {"session": both[1]}
            for ids, padding, num_new in calls:
                found.append(
                    generate(model, ids, padding, max_new_tokens=num_new, **options, **session)
                )
            if both is not None:
                assert both[0].num_recorded == 1
        found.append(torch.rand(3).tolist())
    for one, other in zip(together[:-1], alone[:-1], strict=True):
        assert_same(one, other)
    assert together[-1] == alone[-1]


def test_first_passes_are_recorded_where_prompts_are_alike() -> None:
    """From the third generation with prompts of one shape on; any tokens may be in them."""
    model = made("llama")
    lengths = [7, 7, 7, 7, 7, 5, 5, 7, 7, 7]
    prompts = [prompt(length, seed=number) for number, length in enumerate(lengths)]
    options: dict[str, Any] = {"max_new_tokens": 9, "return_scores": True}
    alone = [generate(model, ids, **options) for ids in prompts]
    counts = []
    with opened() as (recorder, session):
        for ids, expected in zip(prompts, alone, strict=True):
            assert_same(generate(model, ids, **options, session=session), expected)
            counts.append(recorder.num_recorded)
    assert counts == [1, 1, 2, 2, 2, 2, 3, 3, 4, 4]


def test_other_first_passes_are_not_recorded() -> None:
    """Those of long prompts, of padded ones, and of several rows of each prompt."""
    model, mask = made("llama"), torch.ones(4, 7)
    mask[0, :2] = 0
    calls: list[dict[str, Any]] = [{"attention_mask": mask}, {"num_beams": 2}, {}]
    for options in calls:
        expected = generate(model, prompt(), max_new_tokens=9, **options).rows()
        with opened() as (recorder, session), mock.patch.object(passes, "MOST_OF_PROMPTS", 27):
            for _ in range(4):
                found = generate(model, prompt(), max_new_tokens=9, session=session, **options)
                assert found.rows() == expected
            assert recorder.num_recorded == recorder.num_aside == 1


def test_what_has_no_room_is_recorded_anew() -> None:
    """More rows, fewer rows or more tokens; the memory of before is free then."""
    model = made("llama")
    calls = [(4, 7, 9), (4, 3, 8), (2, 7, 9), (2, 9, 23), (2, 9, 7), (3, 4, 30)]
    expected = [
        generate(model, prompt(length, rows), max_new_tokens=new).rows()
        for rows, length, new in calls
    ]
    with opened() as (recorder, session), watched_caches() as caches:
        found, counts = [], []
        for rows, length, new in calls:
            ids = prompt(length, rows)
            found.append(generate(model, ids, max_new_tokens=new, session=session).rows())
            counts.append(recorder.num_recorded)
            assert sum(alive(caches)) == 1
    assert found == expected and counts == [1, 1, 2, 2 + (roomy(16) < 32), 3, 4]


def test_sizes_are_few_and_little_more() -> None:
    sizes = [roomy(size) for size in range(1, 5000)]
    assert all(size <= room for size, room in enumerate(sizes, start=1))
    assert all(room < size * 1.25 for size, room in enumerate(sizes, start=1) if size > 64)
    assert len(set(sizes)) < 40


def test_a_session_keeps_until_its_end() -> None:
    with opened() as (_, session), watched_caches() as caches:
        generate(made("gpt2"), prompt(), max_new_tokens=12, session=session)
        assert alive(caches) == [True]
        session.__exit__(None, None, None)
        assert alive(caches) == [False]
        generate(made("gpt2"), prompt(), max_new_tokens=12)
        assert alive(caches) == [False, False]


def test_a_closed_session_is_refused() -> None:
    session = Session()
    with pytest.raises(ConfigError, match="the session is not open"):
        generate(made("gpt2"), prompt(), max_new_tokens=9, session=session)
    with session:
        pass
    with pytest.raises(ConfigError, match="with Session"):
        stream(made("gpt2"), prompt(), max_new_tokens=9, session=session)


def written(model: Any) -> None:
    with torch.no_grad():
        model.encoder.output_layernorm.weight.mul_(-1)


def put(model: Any) -> None:
    table = model.input_embedding
    table.weight = torch.nn.Parameter(table.weight.flip(0))


def data_replaced(model: Any) -> None:
    table = model.input_embedding
    table.weight.data = table.weight.data.flip(0)


def turned_in_place(model: Any) -> None:
    """The same memory, read in another order."""
    weight = model.encoder.layers[0].self_att.self_attention.project_q.weight
    weight.data = weight.data.t()


def swapped(model: Any) -> None:
    w_in = model.encoder.layers[1].ffn.ffn.w_in
    w_in.w_0, w_in.w_1 = w_in.w_1, w_in.w_0


def windowed(model: Any) -> None:
    model.config.sliding_window = 2


def other_base(model: Any) -> None:
    model.position_bias.base = 3.0


def other_scaling(model: Any) -> None:
    model.position_bias.scaling["factor"] = 3.0
    model.position_bias.scaling["rope_type"] = "linear"


def other_eps(model: Any) -> None:
    model.encoder.output_layernorm.eps = 20.0


def other_activation(model: Any) -> None:
    model.encoder.layers[0].ffn.ffn.w_in.act = gelu_new


def other_forward(model: Any) -> None:
    part = model.encoder.layers[1].ffn
    plain = part.forward
    part.forward = lambda x: 3 * plain(x)


def other_class(model: Any) -> None:
    class Doubled(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    model.encoder.layers[0].ffn.ffn.w_in.w_1.__class__ = Doubled


def other_child(model: Any) -> None:
    """With the same weights in the same order."""
    layers = model.encoder.layers
    layers[0].ffn.dropout = torch.nn.Tanh()


def hooked(model: Any) -> None:
    model.encoder.layers[1].ffn.ffn.register_forward_hook(lambda _, __, out: 3 * out)


def one_layer(model: Any) -> None:
    model.encoder.layers = torch.nn.ModuleList([model.encoder.layers[1]] * 2)


CHANGES = [written, put, data_replaced, turned_in_place, swapped, windowed, other_base]
CHANGES += [other_scaling, other_eps, other_activation, other_forward, other_class, other_child]
CHANGES += [hooked, one_layer]


@pytest.mark.parametrize("change", CHANGES)
def test_a_session_follows_the_model(change: Callable[[Any], None]) -> None:
    """Whatever is changed between two generations, and what goes back to what it was."""
    model, ids = fresh(), prompt()
    options: dict[str, Any] = {"max_new_tokens": 12, "return_scores": True}
    before = generate(model, ids, **options)
    with opened() as (recorder, session):
        for _ in range(3):
            assert_same(generate(model, ids, **options, session=session), before)
        assert recorder.num_recorded == 2  # the first pass too
        change(model)
        expected = generate(model, ids, **options)
        assert differ(expected, before)
        for _ in range(3):
            assert_same(generate(model, ids, **options, session=session), expected)


def test_a_window_may_come_and_go() -> None:
    """The last recording is of the last state, not of the first."""
    model, ids = fresh(), prompt()
    with opened() as (recorder, session):
        for window in (6, 2, 6, 6, 2):
            model.config.sliding_window = window
            expected = generate(model, ids, max_new_tokens=12)
            before = recorder.num_recorded
            found = generate(model, ids, max_new_tokens=12, session=session)
            assert torch.equal(found.sequences, expected.sequences)
        assert recorder.num_recorded == before + 1


def test_training_goes_on_in_between() -> None:
    """Values in place: nothing is recorded twice, and training is as without it."""
    models, ids = (fresh("gpt2"), fresh("gpt2")), prompt()
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
    counts = []
    for _ in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            model(ids).logits.log_softmax(-1)[..., 5].mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    rows: list[list[Any]] = [[], []]
    with opened() as (recorder, session):
        for _ in range(3):
            for place, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                shared: dict[str, Any] = {"session": session} if place else {}
                before = recorder.num_recorded
                rows[place].append(generate(model, ids, max_new_tokens=9, **shared).rows())
                counts += [recorder.num_recorded - before] if place else []
                model(ids).logits.log_softmax(-1)[..., 5].mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    assert rows[0] == rows[1] and rows[0][0] != rows[0][2] and counts == [1, 0, 1]
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)


def test_models_take_turns() -> None:
    one, other, ids = made("llama"), fresh(), prompt()
    written(other)
    expected = [generate(model, ids, max_new_tokens=12).rows() for model in (one, other)]
    with opened() as (_, session):
        for _ in range(2):
            for model, rows in zip((one, other), expected, strict=True):
                assert generate(model, ids, max_new_tokens=12, session=session).rows() == rows


def test_generations_at_the_same_time() -> None:
    """Two streams side by side, and a generation between their tokens."""
    model, first, second = made("llama"), prompt(), prompt(seed=1)
    expected = [list(stream(model, ids, max_new_tokens=14)) for ids in (first, second)]
    whole = generate(model, first, max_new_tokens=10).rows()
    with opened() as (_, session), watched_caches() as caches:
        generate(model, first, max_new_tokens=14, session=session)
        streams = [
            stream(model, ids, max_new_tokens=14, session=session) for ids in (first, second)
        ]
        found: list[list[Any]] = [[], []]
        for _ in range(14):
            for tokens, each in zip(found, streams, strict=True):
                tokens.append(next(each))
            assert generate(model, first, max_new_tokens=10, session=session).rows() == whole
        for each in streams:
            assert list(each) == []
        assert found == expected and sum(alive(caches)) == 1
    assert not any(alive(caches))


def test_a_stream_that_is_left_leaves_its_recording() -> None:
    model, ids = made("llama"), prompt()
    expected = list(stream(model, ids, max_new_tokens=12))
    with opened() as (recorder, session):
        for length in (5, 12, 8):
            steps = stream(model, ids, max_new_tokens=12, session=session)
            assert [next(steps) for _ in range(length)] == expected[:length]
            steps.close()  # type: ignore[attr-defined]
        assert recorder.num_recorded == 2  # a step, and the first pass


def test_a_stream_that_outlives_the_session() -> None:
    """It goes on, and leaves nothing."""
    model, ids = made("llama"), prompt()
    expected = list(stream(model, ids, max_new_tokens=12))
    with watched_caches() as caches, recorded(2):
        with Session() as session:
            steps = stream(model, ids, max_new_tokens=12, session=session)
            found = [next(steps) for _ in range(5)]
        assert found + list(steps) == expected and not any(alive(caches))


def test_a_stream_in_a_session_follows_weights_and_model() -> None:
    """Between two tokens; and what it leaves is of the model as it was recorded."""
    model, ids = fresh(), prompt()

    def tokens(**shared: Any) -> list[Any]:
        model.config.sliding_window, found = 6, []
        for step in stream(model, ids, max_new_tokens=12, **shared):
            found.append(step)
            if len(found) == 6:
                model.config.sliding_window = 2
                put(model)
        return found

    before = {name: value.clone() for name, value in model.state_dict().items()}
    expected = tokens()
    after = [generate(model, ids, max_new_tokens=12).rows()]
    model.config.sliding_window = 6
    after.append(generate(model, ids, max_new_tokens=12).rows())
    model.load_state_dict(before)
    with opened() as (recorder, session):
        for _ in range(3):  # the first pass is recorded too
            generate(model, ids, max_new_tokens=12, session=session)
        assert recorder.num_recorded == 2
        assert tokens(session=session) == expected
        found = [generate(model, ids, max_new_tokens=12, session=session).rows()]
        model.config.sliding_window = 6
        found.append(generate(model, ids, max_new_tokens=12, session=session).rows())
    assert found == after


def test_an_error_leaves_nothing() -> None:
    """And the next generation is right."""
    model, ids = made("llama"), prompt()
    expected = generate(model, ids, max_new_tokens=12).rows()
    with opened() as (recorder, session), watched_caches() as caches:
        generate(model, ids, max_new_tokens=12, session=session)
        with (
            mock.patch.object(KeyValueCache, "advance", side_effect=ZeroDivisionError),
            contextlib.suppress(ZeroDivisionError),
        ):
            generate(model, ids, max_new_tokens=12, session=session)
        assert not any(alive(caches))
        assert generate(model, ids, max_new_tokens=12, session=session).rows() == expected
        assert recorder.num_recorded == 2


def test_values_that_are_no_numbers_do_not_last() -> None:
    """Memory of an earlier generation is multiplied by probabilities of zero."""
    model, ids = fresh(), prompt()
    expected = generate(model, ids, max_new_tokens=9).rows()
    weight = model.encoder.layers[0].self_att.self_attention.project_v.weight
    kept = weight.detach().clone()
    with opened() as (recorder, session), torch.no_grad():
        weight.fill_(float("nan"))
        generate(model, torch.cat([ids, ids], 1), max_new_tokens=14, session=session)
        weight.copy_(kept)
        assert generate(model, ids, max_new_tokens=9, session=session).rows() == expected
        assert recorder.num_recorded == 1


def test_what_is_not_recorded_shares_nothing() -> None:
    """Few tokens, holes in prompts, hooks, models that do not tell places; and what does goes on."""
    model, ids, holes = fresh(), prompt(), torch.ones(4, 7)
    holes[1, 2:4] = 0
    calls: list[tuple[Any, dict[str, Any]]] = [
        (model, {"max_new_tokens": 9}),
        (model, {"max_new_tokens": 9, "attention_mask": holes}),
        (model, {"max_new_tokens": 3}),
        (model, {"max_new_tokens": 9}),
        (made("cpm1"), {"max_new_tokens": 9}),
        (model, {"max_new_tokens": 3}),
    ]
    expected = [generate(one, ids, **options).rows() for one, options in calls]
    with opened() as (recorder, session):
        found = [generate(one, ids, **options, session=session).rows() for one, options in calls]
        assert recorder.num_recorded == 2  # a step, and once the first pass of the same prompts
        handle = model.encoder.layers[1].register_forward_hook(lambda *_: None)
        assert generate(model, ids, max_new_tokens=9, session=session).rows() == expected[0]
        handle.remove()
    assert found == expected


def test_on_the_cpu_a_session_does_nothing() -> None:
    model, ids = made("llama"), prompt()
    expected = generate(model, ids, max_new_tokens=12).rows()
    with (
        watched_caches() as caches,
        mock.patch.object(passes, "Conditions", wraps=Conditions) as conditions,
        Session() as session,
    ):
        for _ in range(2):
            assert generate(model, ids, max_new_tokens=12, session=session).rows() == expected
        assert not any(alive(caches))
        assert conditions.call_count == 2  # a look at the model costs something


def test_autocast_is_seen() -> None:
    model, ids = fresh(), prompt()
    options: dict[str, Any] = {"max_new_tokens": 12, "return_scores": True}
    with opened() as (_, session):
        plain = generate(model, ids, **options, session=session)
        with torch.autocast("cpu", torch.bfloat16):
            found = generate(model, ids, **options, session=session)
            assert_same(found, generate(model, ids, **options))
        assert differ(found, plain)
        assert_same(generate(model, ids, **options, session=session), plain)


def test_the_class_is_seen() -> None:
    """A method of a class that is replaced for all of its modules."""
    model, ids, forward = fresh(), prompt(), Llama.forward

    def more(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        out.last_hidden_state = -out.last_hidden_state
        return out

    with opened() as (_, session):
        plain = generate(model, ids, max_new_tokens=12, session=session).rows()
        with mock.patch.object(Llama, "forward", more):
            found = generate(model, ids, max_new_tokens=12, session=session).rows()
            assert found == generate(model, ids, max_new_tokens=12).rows() != plain
        assert generate(model, ids, max_new_tokens=12, session=session).rows() == plain


def test_adapters_are_switched_on_and_off() -> None:
    """Which changes no weight, but attributes of their modules."""
    model, ids = fresh(), prompt()
    config = peft.LoraConfig(r=2, target_modules=["project_q", "w_0"], init_lora_weights=False)
    peft.inject_adapter_in_model(config, model)
    layers = [part for part in model.modules() if isinstance(part, LoraLayer)]
    rows = []
    with opened() as (_, session):
        for is_on, scale in ((True, 1.0), (False, 1.0), (True, 1.0), (True, 9.0)):
            for layer in layers:
                layer.enable_adapters(is_on)
                layer.set_scale("default", scale)
            expected = generate(model, ids, max_new_tokens=12).rows()
            for _ in range(3):
                assert generate(model, ids, max_new_tokens=12, session=session).rows() == expected
            rows.append(expected)
    assert rows[0] == rows[2] and rows[0] != rows[1] != rows[3] != rows[0]
