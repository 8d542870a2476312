"""A session of several ranks: gathered weights stay where they are, with the values of their time,
and go when they should.
"""

import contextlib
from unittest import mock

import pytest
import torch
from tests.garbage import without_collector
from tests.models import parity
from tests.models.recording import recorded
from tests.models.test_generation_session import alive, watched_caches
from tests.ranks import models, test_generation
from tests.ranks.runner import on_ranks, run_ranks
from tests.ranks.test_generation import VOCAB, counted_gathers, saved
from tests.tensors import own_slice
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import bmtrain as bmt
from bmtrain.distributed.transport import ShardSource
from bmtrain.errors import ParameterError
from bmtrain.runtime import world
from bmtrain.shard.engine import Engine
from model_center.generation.engine import generate, stream
from model_center.generation.lookahead import StopChecks
from model_center.generation.resident import ResidentWeights
from model_center.generation.session import Session


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("models"))


def made(folder):
    """A model, sharded."""
    return test_generation.made(folder, "gpt2")


def engine():
    return world.current().service(Engine)


def prompt(seed=0, rows=2):
    return parity.token_ids(rows, 5, high=VOCAB, seed=10 * bmt.rank() + seed)


def generated(model, ids, **options):
    out = generate(model, ids, **{"max_new_tokens": 9} | options, return_scores=True)
    assert out.scores is not None
    return out.rows(), out.scores


def layer_by_layer(model, ids):
    """By the gathers of any forward pass, which know nothing of earlier ones."""
    with mock.patch.object(ResidentWeights, "fits", lambda *_: False):
        return generated(model, ids)


def assert_near(found, expected):
    assert found[0] == expected[0]
    parity.assert_close(found[1], expected[1], "scores")


@contextlib.contextmanager
def opened():
    """A session whose steps are recorded as on a GPU, and the gathers inside."""
    with recorded(2) as recorder, Session() as session, counted_gathers(engine()) as gathers:
        yield session, recorder, gathers


@contextlib.contextmanager
def noted_places():
    """Where the whole weights of generations are."""
    places = set()
    addresses = ResidentWeights.addresses

    def noted(resident):
        found = addresses(resident)
        places.add(str(found))
        return found

    with mock.patch.object(ResidentWeights, "addresses", noted):
        yield places


@contextlib.contextmanager
def watched_buffers():
    """Memory of whole weights that is made inside; without Python's collector."""
    buffers = []
    new_full = ShardSource.new_full

    def noted(source, num_shards):
        full = new_full(source, num_shards)
        buffers.append(StorageWeakRef(full.untyped_storage()))
        return full

    with without_collector(), mock.patch.object(ShardSource, "new_full", noted):
        yield buffers


def there(buffers):
    return [not buffer.expired() for buffer in buffers]


def weight_of(model):
    return model.encoder.output_layernorm.weight


def nothing(model):
    pass


def in_place(model):
    with torch.no_grad():
        weight_of(model).mul_(-1)


def in_data(model):
    weight_of(model).data.mul_(-1)


def set_full(model):
    weight_of(model).set_full(-torch.ones(32))


def in_slice(model):
    own_slice(weight_of(model)).mul_(-1)


def in_inference(model):
    with torch.inference_mode():
        own_slice(weight_of(model)).mul_(-1)


def past_torch(model):
    """Which no version tells."""
    before = weight_of(model).storage_of.version()
    own_slice(weight_of(model)).numpy()[:] *= -1
    assert weight_of(model).storage_of.version() == before


def on_one_rank(model):
    """Which has all of it."""
    if bmt.rank() == 0:
        own_slice(weight_of(model)).mul_(-1)


def loaded(model):
    model.load_state_dict({name: -value for name, value in model.state_dict().items()})


def stepped(model, kind=bmt.optim.AdamOptimizer):
    model.train()
    manager = models.managed(kind(model.parameters(), lr=0.3))
    loss = -model(prompt()).logits.log_softmax(-1)[..., 7].mean()
    manager.backward(loss)
    manager.step()


def stepped_offloaded(model):
    """The values are still to come when the generation begins."""
    stepped(model, bmt.optim.AdamOffloadOptimizer)


def replaced(model):
    model.encoder.output_layernorm.weight = bmt.DistributedParameter(-torch.ones(32))


# Of each change, how many storages it writes, None for all; and how many recordings it costs.
CHANGES = {
    nothing: (0, 0),
    in_data: (1, 0),
    in_place: (1, 0),
    set_full: (1, 0),
    in_slice: (1, 0),
    in_inference: (1, 0),
    past_torch: (1, 0),
    on_one_rank: (1, 0),
    replaced: (1, 2),
    stepped: (None, 0),
    stepped_offloaded: (None, 0),
    loaded: (None, 0),
}


def follow(folder, part):
    for change, (num_written, num_recorded) in list(CHANGES.items())[part]:
        model, ids = made(folder), prompt()
        with opened() as (session, recorder, gathers), noted_places() as places:
            before = [generated(model, ids, session=session) for _ in range(4)]
            total = gathers.pop(0)
            assert gathers == [] and recorder.num_recorded == 2 and total > 3, change
            change(model)
            gathers.clear()
            found = [generated(model, ids, session=session)]
            written = total if num_written is None else num_written
            assert sum(gathers) == written, change
            found += [generated(model, ids, session=session) for _ in range(3)]
            assert sum(gathers) == written, change
            assert recorder.num_recorded == 2 + num_recorded, change
            assert len(places) == 1 or num_recorded, change
            expected = layer_by_layer(model, ids)
        for one in found:
            assert_near(one, expected)
        assert (found[0][0] != before[0][0]) == (change is not nothing), change
        assert_near(before[0], before[3])


@pytest.mark.parametrize(
    ("part", "init"),
    [
        (slice(0, None, 4), {}),
        pytest.param(slice(1, None, 4), {}, marks=pytest.mark.long),
        pytest.param(slice(2, None, 4), {}, marks=pytest.mark.long),
        pytest.param(slice(3, None, 4), {}, marks=pytest.mark.long),
        pytest.param(slice(1, None, 2), {"zero_level": 2}, marks=pytest.mark.long),
        pytest.param(slice(0, None, 2), {"transport": "copy_engine"}, marks=pytest.mark.long),
    ],
)
def test_whatever_is_written_is_gathered(folder, part, init):
    """And nothing else, to the same memory: recordings go on."""
    run_ranks(follow, 2, folder, part, init=init)


@on_ranks(2)
def test_memory_is_freed(folder):
    """At the end of the session, for another model, and on all ranks if one has no room."""
    model, other, ids = made(folder), made(folder), prompt()
    with watched_buffers() as buffers, watched_caches() as caches, opened() as (session, *_):
        generated(model, ids)
        total = len(buffers)
        assert total > 3 and not any(there(buffers) + alive(caches))
        resident = ResidentWeights.of(model)
        assert resident is not None
        with torch.no_grad(), resident.held(), resident.bound():
            model(ids)
            assert sum(there(buffers)) == total
        assert not any(there(buffers))
        generated(model, ids, session=session)
        stepped(model)  # training has no more room than on one rank
        assert sum(there(buffers)) == total and sum(alive(caches)) == 1
        generated(other, ids, session=session)
        assert all(there(buffers)[-total:]) and sum(there(buffers)) == total
        assert sum(alive(caches)) == 1
        # only one rank has no room
        with mock.patch.object(ResidentWeights, "fits", lambda *_: bmt.rank() == 0):
            generated(other, ids, session=session)
        assert not any(there(buffers) + alive(caches))
        generated(other, ids, session=session)
        assert sum(there(buffers)) == total and sum(alive(caches)) == 1
        session.__exit__(None, None, None)
        assert not any(there(buffers) + alive(caches))


@on_ranks(2)
def test_an_error_on_one_rank_is_its_own(folder):
    """It keeps nothing; the others do, and all gather together again."""
    model, ids = made(folder), prompt()
    expected, is_failing = layer_by_layer(model, ids), bmt.rank() == 1
    with watched_buffers() as buffers, opened() as (session, _, gathers):
        generated(model, ids, session=session)
        total = len(buffers)
        before = list(there(buffers))
        if is_failing:
            wrong = mock.patch.object(StopChecks, "ask", side_effect=ZeroDivisionError)
            with wrong, pytest.raises(ZeroDivisionError) as told:
                generated(model, ids, session=session)
            assert told.tb is not None  # its frames hold nothing
        else:
            generated(model, ids, session=session)
        assert before == [True] * total and there(buffers) == [not is_failing] * total
        gathers.clear()
        assert_near(generated(model, ids, session=session), expected)
        assert gathers == [total]
        assert_near(generated(model, ids, session=session), expected)
        assert gathers == [total] and sum(there(buffers)) == total


@on_ranks(2)
def test_ranks_may_differ(folder):
    """One has a session, the other has none, or enters it later."""
    model, ids = made(folder), prompt()
    expected = layer_by_layer(model, ids)
    with opened() as (session, recorder, gathers), noted_places() as places:
        own = {"session": session} if bmt.rank() == 0 else {}
        for _ in range(3):
            assert_near(generated(model, ids, **own), expected)
        assert len(gathers) == 3 and recorder.num_recorded == (2 if own else 3)
        assert len(places) == 1 or not own
        # what both keep is there for a generation that is in no session
        for number in range(4):
            own = {"session": session} if number == bmt.rank() else {}
            assert_near(generated(model, ids, **own), expected)
        assert len(gathers) in (3 + 1, 3 + 2)


@on_ranks(2)
def test_ranks_with_other_prompts(folder):
    """And with none. A cache that is there already needs no room, that of another model does."""
    model, spares = made(folder), list[int]()
    cache = 4 * 2 * 3 * 32  # bytes of a token of one row
    # rows of each rank in each generation
    rows = [(2, 1), (2, 0), (3, 1), (0, 0), (2, 1)]
    expected = [layer_by_layer(model, prompt(rows=each[bmt.rank()])) for each in rows]

    def fits(_, spare):
        spares.append(spare)
        return True

    with opened() as (session, _, gathers), mock.patch.object(ResidentWeights, "fits", fits):
        for each, one in zip(rows, expected, strict=True):
            with watched_caches():
                ids = prompt(rows=each[bmt.rank()])
                assert_near(generated(model, ids, session=session), one)
        generated(made(folder), prompt(rows=2 - bmt.rank()), session=session)
    assert len(gathers) == 2
    found = [spare / cache / (5 + 9) for spare in spares]
    assert found == ([3, 0, 2, 0, 2, 3] if bmt.rank() else [6, 4, 9, 0, 6, 6])


@on_ranks(2)
def test_models_that_are_not_recorded(folder):
    """Their weights stay, and nothing else."""
    model, ids = test_generation.made(folder, "t5"), prompt()
    expected = layer_by_layer(model, ids)
    with watched_caches() as caches, opened() as (session, recorder, gathers):
        for _ in range(3):
            assert_near(generated(model, ids, session=session), expected)
        assert len(gathers) == 1 and recorder.num_recorded == 0 and not any(alive(caches))


@on_ranks(2)
def test_streams_in_between(folder):
    """They go layer by layer, and leave what is kept where it is, if there is room."""
    model, ids = made(folder), prompt()
    expected, tokens = layer_by_layer(model, ids), list(stream(model, ids, max_new_tokens=9))
    with watched_buffers() as buffers, opened() as (session, recorder, gathers):
        for _ in range(2):
            assert_near(generated(model, ids, session=session), expected)
        total, begun = gathers[0], len(gathers)
        found = []
        for number, each in enumerate(stream(model, ids, max_new_tokens=9, session=session)):
            found.append(each)
            if number == 4:
                assert_near(generated(model, ids, session=session), expected)
        assert found == tokens and sum(there(buffers)) == total and recorder.num_recorded == 2
        assert total not in gathers[begun:]  # the stream's are one by one
        with mock.patch.object(ResidentWeights, "fits", lambda *_: bmt.rank() == 0):
            assert list(stream(model, ids, max_new_tokens=9, session=session)) == tokens
        assert sum(there(buffers)) == total * (bmt.rank() == 0)
        assert_near(generated(model, ids, session=session), expected)


@on_ranks(2)
def test_what_is_written_into_a_copy_is_lost(folder):
    """As ever: a program holds on to gathered weights, and writes there between generations."""
    model, ids = made(folder), prompt()
    expected, seen = layer_by_layer(model, ids), list[Tensor]()
    table = model.input_embedding

    def look(module, _):
        seen.append(module.weight)

    with Session() as session, counted_gathers(engine()) as gathers:
        handle = table.register_forward_pre_hook(look)
        generated(model, ids, session=session)
        handle.remove()
        seen[0][24:].zero_() if bmt.rank() == 0 else seen[0][:24].zero_()  # the other's part
        assert_near(generated(model, ids, session=session), expected)
        assert len(gathers) == 2 and gathers[1] == 1


@on_ranks(2)
def test_after_an_error_copies_are_not_trusted(folder):
    """Another session has the same memory."""
    model, ids = made(folder), prompt()
    expected = layer_by_layer(model, ids)
    table = model.input_embedding
    look_up = table.forward

    def wrong(*args, **kwargs):
        table.weight[24:].zero_()
        return look_up(*args, **kwargs)

    with Session() as other, Session() as session, counted_gathers(engine()) as gathers:
        generated(model, ids, session=other)
        if bmt.rank() == 0:  # which has the part before
            table.forward = wrong
            with pytest.raises(ParameterError, match="gave parameter"):
                generated(model, ids, session=session)
            table.forward = look_up
        else:
            generated(model, ids, session=session)
        assert len(gathers) == 1
        assert_near(generated(model, ids, session=other), expected)
        assert len(gathers) == 2
