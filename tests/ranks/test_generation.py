"""Generation with sharded models: every rank gets what one process gets for its prompts, whatever
the other ranks do.
"""

import contextlib
from typing import Any
from unittest import mock

import pytest
import torch
from tests.models import parity
from tests.ranks.runner import on_ranks, run_ranks
from tests.ranks.test_memory import tensors
from tests.tensors import storage_of

import bmtrain as bmt
from model_center.errors import ConfigError, InputError
from model_center.generation.engine import generate, stream
from model_center.generation.ranks import GenerationRanks
from model_center.generation.resident import ResidentWeights
from model_center.generation.session import Session
from model_center.model.gpt2 import GPT2, GPT2Config
from model_center.model.t5 import T5, T5Config

VOCAB = 48
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "dim_model": 32,
    "num_heads": 4,
    "dim_head": 8,
    "dim_ff": 48,
    "dtype": "float32",
}
CLASSES: dict[str, Any] = {"gpt2": GPT2, "t5": T5}
# Of each rank: numbers of prompts and of their tokens, and options. The third one has no prompts.
WORK: list[tuple[int, int, dict[str, Any]]] = [
    (3, 5, {"max_new_tokens": 9, "eos_token_id": list(range(6))}),
    (1, 11, {"max_new_tokens": 2, "eos_token_id": None}),
    (0, 1, {}),
]
SEARCHES: list[dict[str, Any]] = [
    {},
    {"num_beams": 3, "num_return_sequences": 2, "early_stopping": True},
    {"do_sample": True, "seed": 4, "top_k": 20, "repetition_penalty": 1.5},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("models"))


def saved(root):
    """Small random models, each in a folder of its name."""
    torch.manual_seed(0)
    gpt2 = GPT2(GPT2Config(**SIZES, num_layers=3, position_size=20))
    t5 = T5(T5Config(**SIZES, num_encoder_layers=2, num_decoder_layers=3))
    for name, model in (("gpt2", gpt2), ("t5", t5)):
        parity.randomized(model, std=0.3).save_pretrained(root / name, format="model_center")
    return root


def made(folder, name):
    """The model, sharded in a process group."""
    return CLASSES[name].from_pretrained(folder / name, dtype="float32")


def prompts(rank):
    """The ids and mask of this rank; the first prompt is padded, if there are several."""
    rows, length, _ = WORK[rank]
    ids, mask = parity.token_ids(rows, length, high=VOCAB, seed=rank), torch.ones(rows, length)
    mask[:-1, :2] = 0
    return ids, mask


def results(model, rank):
    """What comes of all searches: tokens and scores."""
    ids, mask = prompts(rank)
    out = []
    for search in SEARCHES:
        found = generate(model, ids, mask, **WORK[rank][2], **search, return_scores=True)
        out.append((found.rows(), found.scores))
    return out


def all_results(folder, name):
    model = made(folder, name)
    assert GenerationRanks(model).are_several, "the model is not sharded"
    return results(model, bmt.rank())


def assert_results(found, model, rank):
    for (rows, scores), (expected, their_scores) in zip(found, results(model, rank), strict=True):
        assert rows == expected
        parity.assert_close(scores, their_scores, "scores")


@pytest.mark.parametrize("name", ["gpt2", pytest.param("t5", marks=pytest.mark.long)])
def test_every_rank_gets_what_one_process_gets(folder, name):
    """Other numbers of prompts, other lengths, other ends on each rank, and none at all."""
    alone = made(folder, name)
    assert {len(row) for rows, _ in results(alone, 0) for row in rows} > {9}, "no row ended early"
    for rank, found in enumerate(run_ranks(all_results, 3, folder, name)):
        assert_results(found, alone, rank)


@contextlib.contextmanager
def counted_gathers(engine):
    """How many shards were gathered, each time that some were."""
    counts = []
    gather = engine.transport.gather

    def counted(*gathers):
        counts.append(len(gathers))
        return gather(*gathers)

    with mock.patch.object(engine.transport, "gather", counted):
        yield counts


@on_ranks(2)
def test_weights_are_gathered_once_if_all_ranks_have_room():
    """And given back at the end. Ranks without room are not left behind: all gather in each step,
    layer by layer: of 8 layers two are ever whole.
    """
    torch.manual_seed(0)
    model = GPT2(GPT2Config(**SIZES, num_layers=8, position_size=20))
    bmt.init_parameters(model)
    engine = storage_of(model.encoder.layers[0]).engine
    size = min(storage_of(layer).layout.numel for layer in model.encoder.layers) * 4

    def buffers():
        return sum(nbytes >= size for nbytes in tensors().values())

    ids, _ = prompts(0)
    steps = stream(model, ids, max_new_tokens=3 + bmt.rank())
    assert all(buffers() <= 2 for _ in steps)
    with mock.patch.object(ResidentWeights, "fits", lambda *_: False):
        generate(model, ids, max_new_tokens=2)
    before, found, counted = buffers(), [], []
    assert before == 0
    for fits in (True, False):
        # only one rank decides otherwise
        with (
            counted_gathers(engine) as counts,
            mock.patch.object(ResidentWeights, "fits", lambda *_: fits or bmt.rank() == 0),  # noqa: B023
        ):
            found.append(generate(model, ids, max_new_tokens=9 - bmt.rank()).rows())
        counted.append(sum(counts))
        assert buffers() == before
    assert found[0] == found[1] and len(found[0][0]) == 9 - bmt.rank()
    assert 8 < counted[0] < 16 and counted[1] > 8 * 8, "gathers"


def trained_between(folder):
    """Generation before, after and between steps of training, and the model's values at the end."""
    model = made(folder, "gpt2")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    ids, found = prompts(0)[0], []
    for step in range(3):
        found.append(generate(model, ids, max_new_tokens=8).rows())
        loss = -model(ids).logits.log_softmax(-1)[..., 7 * step + 1].mean()
        (loss / bmt.world_size()).backward()  # every rank has the same rows
        optimizer.step()
        optimizer.zero_grad()
    streamed = []
    for number, tokens in enumerate(stream(model, ids, max_new_tokens=8)):
        streamed.append(tokens)
        if number == 3:
            with torch.no_grad():
                model.encoder.output_layernorm.weight.mul_(-1)
    norms = [parameter.double().norm().item() for parameter in model.parameters()]
    return found, streamed, norms


def test_training_and_generation_take_turns(folder):
    """Each generation has the weights of its time, a stream those of each token; training goes on
    as without it.
    """
    alone = trained_between(folder)
    assert alone[0][0] != alone[0][1] != alone[0][2]
    assert alone[1][:4] != alone[1][4:]
    for found, streamed, norms in run_ranks(trained_between, 2, folder):
        assert found == alone[0] and streamed == alone[1]
        assert norms == pytest.approx(alone[2], rel=1e-5)


def left_early(folder):
    """Rank 0 leaves its stream after two tokens; rank 1 calls wrongly in several ways; then all
    generate.
    """
    model, ids = made(folder, "gpt2"), prompts(0)[0]
    steps = []
    for tokens in stream(model, ids, max_new_tokens=8):
        steps.append(tokens)
        if bmt.rank() == 0 and len(steps) == 2:
            break
    told = []
    wrongs: list[dict[str, Any]] = [
        {"temperatur": 1},
        {"max_new_tokens": 100},
        {"eos_token_id": 99},
        {"attention_mask": torch.zeros(3, 5)},
        {"session": Session()},
    ]
    for wrong in wrongs:
        with pytest.raises((ConfigError, InputError)) as error:
            generate(model, ids, **(wrong if bmt.rank() == 1 else {}))
        told.append(str(error.value))
    with pytest.raises((AttributeError, InputError)[bmt.rank() == 0 :]):
        generate(model, ids if bmt.rank() == 0 else "a text")  # type: ignore[arg-type]
    return steps, told, results(model, bmt.rank())


def test_ranks_that_leave_or_err_harm_no_other(folder):
    """A stream that is left on one rank gives the others all their tokens; an error on one rank is
    one on all, before anything is computed, and the rank that made it says what it is. Nobody hangs
    then or later.
    """
    alone = made(folder, "gpt2")
    expected = list(stream(alone, prompts(0)[0], max_new_tokens=8))
    (short, told, after), (whole, own, others_after) = run_ranks(left_early, 2, folder)
    assert short == expected[:2] and whole == expected and len(expected) == 8
    assert (
        told
        == ["generate failed on rank 1, whose message names the cause: call it again on all ranks."]
        * 5
    )
    parts = "nearest: 'temperature'", "20 positions", "token 99", "prompt 0", "session is not open"
    for part, text in zip(parts, own, strict=True):
        assert part in text
    for rank, found in enumerate((after, others_after)):
        assert_results(found, alone, rank)


def alone_on_rank_0():
    """A model that is not sharded: generating with it concerns one rank only."""
    torch.manual_seed(0)
    model = GPT2(GPT2Config(**SIZES, num_layers=1, position_size=20))
    bmt.init_distributed(device="cpu")
    assert not GenerationRanks(model).are_several
    ids = torch.tensor([[1, 2, 3]])
    rows = generate(model, ids, max_new_tokens=4).rows() if bmt.rank() == 0 else []
    bmt.synchronize()
    return rows


def test_a_model_that_is_not_sharded_needs_no_other_rank():
    first, second = run_ranks(alone_on_rank_0, 2, join=False)
    assert len(first[0]) == 4 and second == []
