"""Generation with sharded models: every rank gets what one process gets for its prompts, whatever
the other ranks do.
"""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from tests.models import parity
from tests.models.recording import recorded
from tests.ranks.runner import run_ranks
from tests.ranks.test_memory import tensors
from tests.tensors import storage_of

import bmtrain as bmt
from bmtrain.block.resident import Resident
from bmtrain.distributed.transport import Gather
from bmtrain.shard.engine import Engine
from model_center.errors import ConfigError, InputError
from model_center.generation.engine import generate, stream
from model_center.generation.peers import Peers
from model_center.generation.session import Session
from model_center.model.base import BaseModel
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
CLASSES: dict[str, type[BaseModel]] = {"gpt2": GPT2, "t5": T5}
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
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return saved(tmp_path_factory.mktemp("models"))


def saved(root: pathlib.Path) -> pathlib.Path:
    """Small random models, each in a folder of its name."""
    torch.manual_seed(0)
    gpt2 = GPT2(GPT2Config(**SIZES, num_layers=3, position_size=20))
    t5 = T5(T5Config(**SIZES, num_encoder_layers=2, num_decoder_layers=3))
    for name, model in (("gpt2", gpt2), ("t5", t5)):
        parity.randomized(model, std=0.3).save_pretrained(root / name, format="model_center")
    return root


def made(folder: pathlib.Path, name: str) -> BaseModel:
    """The model, sharded in a process group."""
    return CLASSES[name].from_pretrained(folder / name, dtype="float32")


def prompts(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ids and mask of this rank; the first prompt is padded, if there are several."""
    rows, length, _ = WORK[rank]
    ids, mask = parity.token_ids(rows, length, high=VOCAB, seed=rank), torch.ones(rows, length)
    mask[:-1, :2] = 0
    return ids, mask


def results(model: BaseModel, rank: int) -> list[Any]:
    """What comes of all searches: tokens and scores."""
    ids, mask = prompts(rank)
    out = []
    for search in SEARCHES:
        found = generate(model, ids, mask, **WORK[rank][2], **search, return_scores=True)
        out.append((found.rows(), found.scores))
    return out


def all_results(folder: pathlib.Path, name: str) -> list[Any]:
    model = made(folder, name)
    assert Peers(model)._are_several == (bmt.world_size() > 1), "the model is not sharded"
    return results(model, bmt.rank())


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_rank_gets_what_one_process_gets(
    folder: pathlib.Path, name: str, world_size: int
) -> None:
    """Other numbers of prompts, other lengths, other ends on each rank, and none at all."""
    alone = made(folder, name)
    found = run_ranks(all_results, world_size, folder, name)
    assert {len(row) for rows, _ in results(alone, 0) for row in rows} > {9}, (
        "no row of rank 0 ended early"
    )
    for rank in range(world_size):
        for (rows, scores), (expected, their_scores) in zip(
            found[rank], results(alone, rank), strict=True
        ):
            assert rows == expected
            parity.assert_close(scores, their_scores, "scores")


def full_buffers(folder: pathlib.Path) -> int:
    """The most tensors as large as a whole layer that are there after a step."""
    torch.manual_seed(0)
    model = GPT2(GPT2Config(**SIZES, num_layers=8, position_size=20))
    bmt.init_parameters(model)
    size = min(storage_of(layer).layout.numel for layer in model.encoder.layers) * 4
    steps = stream(model, prompts(0)[0], max_new_tokens=3 + bmt.rank())
    return max(sum(nbytes >= size for nbytes in tensors().values()) for _ in steps)


def test_layers_are_gathered_one_by_one(folder: pathlib.Path) -> None:
    """Of 8 layers the three buffers of the ring are all that is ever whole."""
    assert all(1 <= count <= 3 for count in run_ranks(full_buffers, 2, folder))


@contextlib.contextmanager
def counted_gathers(engine: Engine) -> Iterator[list[int]]:
    """How many shards were gathered, each time that some were."""
    counts: list[int] = []
    gather = engine.transport.gather_together

    def counted(gathers: Sequence[Gather], *args: Any) -> Any:
        counts.append(len(gathers))
        return gather(gathers, *args)

    with mock.patch.object(engine.transport, "gather_together", counted):
        yield counts


def gathers_of(folder: pathlib.Path, fits: bool) -> tuple[list[Any], int, list[int], list[int]]:
    """What comes of a generation, its gathers, and the buffers before and after, of the ring and
    in memory.
    """
    torch.manual_seed(0)
    model = GPT2(GPT2Config(**SIZES, num_layers=8, position_size=20))
    bmt.init_parameters(model)
    engine = storage_of(model.encoder.layers[0]).engine
    size = min(storage_of(layer).layout.numel for layer in model.encoder.layers) * 4

    def buffers() -> list[int]:
        return [engine.num_ring_buffers(), sum(nbytes >= size for nbytes in tensors().values())]

    ids, _ = prompts(0)
    with mock.patch.object(Resident, "fits", lambda *_: False):
        generate(model, ids, max_new_tokens=2)
    before = buffers()
    # only one rank decides otherwise
    with (
        counted_gathers(engine) as counts,
        mock.patch.object(Resident, "fits", lambda *_: fits or bmt.rank() == 0),
    ):
        rows = generate(model, ids, max_new_tokens=9 - bmt.rank()).rows()
    return rows, sum(counts), before, buffers()


def test_weights_are_gathered_once_if_all_ranks_have_room(folder: pathlib.Path) -> None:
    """And given back at the end. Ranks without room are not left behind: all gather in each step."""
    whole, stepwise = (run_ranks(gathers_of, 2, folder, fits) for fits in (True, False))
    for rank, (once, often) in enumerate(zip(whole, stepwise, strict=True)):
        assert once[0] == often[0] and len(once[0][0]) == 9 - rank
        assert 8 < once[1] < 16 and often[1] > 8 * 8, "gathers"
        assert once[2] == once[3] == often[3] and max(once[3]) <= 3, "buffers"


def trained_between(folder: pathlib.Path) -> tuple[list[Any], list[Any], list[float]]:
    """Generation before, after and between steps of training, and the model's values at the end."""
    model: Any = made(folder, "gpt2")
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


@pytest.mark.parametrize("world_size", [1, 2])
def test_training_and_generation_take_turns(folder: pathlib.Path, world_size: int) -> None:
    """Each generation has the weights of its time, a stream those of each token; training goes on
    as without it.
    """
    alone = trained_between(folder)
    assert alone[0][0] != alone[0][1] != alone[0][2]
    assert alone[1][:4] != alone[1][4:]
    for found, streamed, norms in run_ranks(trained_between, world_size, folder):
        assert found == alone[0] and streamed == alone[1]
        assert norms == pytest.approx(alone[2], rel=1e-5)


def in_a_session(folder: pathlib.Path) -> tuple[list[Any], list[Any], list[int]]:
    """What comes of generations by themselves and in a session, weights written in between, and how
    many steps were recorded by then.
    """
    found: list[list[Any]] = [[], []]
    counts = []
    for kept in (False, True):
        model: Any = made(folder, "gpt2")
        with recorded(2) as recorder, Session() as session:
            shared: dict[str, Any] = {"session": session} if kept else {}
            for number in range(4):
                ids = parity.token_ids(2, 5 + number, high=VOCAB, seed=bmt.rank())
                out = generate(model, ids, max_new_tokens=9, return_scores=True, **shared)
                found[kept].append((out.rows(), out.scores))
                counts += [recorder.num_recorded] if kept else []
                with torch.no_grad():
                    if number == 0:
                        model.encoder.output_layernorm.weight.mul_(-1)
                    if number == 2:
                        bias = model.encoder.output_layernorm.bias
                        other = bmt.DistributedParameter(torch.ones(32))
                        model.encoder.output_layernorm.bias = (
                            other
                            if bmt.is_initialized()
                            else (torch.nn.Parameter(torch.ones_like(bias)))
                        )
    return found[0], found[1], counts


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_session_gives_the_same(folder: pathlib.Path, world_size: int) -> None:
    """Steps are kept until there is another parameter; on several ranks weights stay in place."""
    for alone, together, counts in run_ranks(in_a_session, world_size, folder):
        assert [rows for rows, _ in alone] == [rows for rows, _ in together]
        for (_, scores), (_, others) in zip(alone, together, strict=True):
            parity.assert_close(scores, others, "scores")
        assert len({str(rows) for rows, _ in alone}) == 4
        assert counts == [1, 1, 1, 2]


def left_early(folder: pathlib.Path) -> tuple[list[Any], list[Any]]:
    """Rank 0 leaves its stream after two tokens, the others do not; then all generate."""
    model = made(folder, "gpt2")
    steps = []
    for tokens in stream(model, prompts(0)[0], max_new_tokens=8):
        steps.append(tokens)
        if bmt.rank() == 0 and len(steps) == 2:
            break
    return steps, results(model, bmt.rank())


def test_a_stream_can_be_left_on_one_rank(folder: pathlib.Path) -> None:
    """The others get all their tokens, and nobody hangs then or later."""
    alone = made(folder, "gpt2")
    expected = list(stream(alone, prompts(0)[0], max_new_tokens=8))
    (short, after), (whole, others_after) = run_ranks(left_early, 2, folder)
    assert short == expected[:2] and whole == expected and len(expected) == 8
    for found, rank in ((after, 0), (others_after, 1)):
        assert [rows for rows, _ in found] == [rows for rows, _ in results(alone, rank)]


def wrong_on_one(folder: pathlib.Path) -> tuple[list[str], list[Any]]:
    """Rank 1 calls wrongly in several ways; then all generate."""
    model, ids = made(folder, "gpt2"), prompts(0)[0]
    told = []
    for wrong in (
        {"temperatur": 1},
        {"max_new_tokens": 100},
        {"eos_token_id": 99},
        {"attention_mask": torch.zeros(3, 5)},
        {"session": Session()},
    ):
        try:
            generate(model, ids, **(wrong if bmt.rank() == 1 else {}))
        except (ConfigError, InputError) as error:
            told.append(str(error))
    try:
        generate(model, ids if bmt.rank() == 0 else "a text")  # type: ignore[arg-type]
    except (AttributeError, InputError) as error:
        told.append(type(error).__name__)
    return told, results(model, bmt.rank())


def test_an_error_on_one_rank_is_one_on_all(folder: pathlib.Path) -> None:
    """Before anything is computed; the rank that made it says what it is."""
    alone = made(folder, "gpt2")
    (told, after), (own, others_after) = run_ranks(wrong_on_one, 2, folder)
    assert (
        told[:5]
        == ["generate was called wrongly on rank 1, which says how: no rank generates."] * 5
    )
    assert (
        "nearest: 'temperature'" in own[0]
        and "20 positions" in own[1]
        and "token 99" in own[2]
        and "prompt 0" in own[3]
        and "session is not open" in own[4]
    )
    assert told[5] == "InputError" and len(own) == 6
    for found, rank in ((after, 0), (others_after, 1)):
        assert [rows for rows, _ in found] == [rows for rows, _ in results(alone, rank)]


def alone_on_rank_0() -> list[list[int]]:
    """A model that is not sharded: generating with it concerns one rank only."""
    torch.manual_seed(0)
    model = GPT2(GPT2Config(**SIZES, num_layers=1, position_size=20))
    bmt.init_distributed(device="cpu")
    assert not Peers(model)._are_several
    ids = torch.tensor([[1, 2, 3]])
    rows = generate(model, ids, max_new_tokens=4).rows() if bmt.rank() == 0 else []
    bmt.synchronize()
    return rows


def test_a_model_that_is_not_sharded_needs_no_other_rank() -> None:
    first, second = run_ranks(alone_on_rank_0, 2, join=False)
    assert len(first[0]) == 4 and second == []
