"""Generation by recorded steps on a real GPU: kernels against twins, tokens against steps that run
one by one, and memory that is given back.
"""

import contextlib
import copy
from typing import Any
from unittest import mock

import pytest
import torch
from tests.garbage import given_back
from tests.models import parity
from tests.models.test_generation_engine import VOCAB, made
from tests.models.test_generation_steps import SEARCHES, TOLD, one_by_one

from model_center.generation.engine import generate, stream
from model_center.generation.recording import ReplayedWork
from model_center.generation.session import Session
from model_center.kernels import cached_attention as attention
from model_center.kernels.gated import ACTIVATIONS, gated_by_triton, gated_reference
from model_center.kernels.largest import largest_by_triton
from model_center.kernels.rotary import rotate_by_triton, rotate_reference
from model_center.kernels.row_products import (
    RowProducts,
    row_products_by_triton,
    row_products_reference,
)
from model_center.model.llama import Llama, LlamaConfig

pytestmark = pytest.mark.gpu
RECORD = ReplayedWork._record
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
DEVICE = torch.device("cuda", 0)


def assert_near(found, expected):
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@DTYPES
@pytest.mark.parametrize(
    ("rows", "heads", "heads_kv", "capacity", "dim"),
    [
        (1, 32, 8, 384, 64),
        (1, 32, 8, 5000, 64),
        (3, 8, 8, 700, 80),
        (64, 32, 8, 384, 128),
        (2, 20, 1, 33, 8),
        (1, 16, 16, 1500, 256),
    ],
)
def test_attention_kernel_equals_twin(rows, heads, heads_kv, capacity, dim, dtype):
    """Memory that no row sees is not read."""
    torch.manual_seed(0)
    query = torch.randn(rows, heads, dim, device=DEVICE, dtype=dtype)
    keys, values = torch.randn(2, rows, heads_kv, capacity, dim, device=DEVICE, dtype=dtype)
    begin = torch.randint(0, capacity // 2, (rows,), device=DEVICE)
    reach = torch.stack([begin, begin + capacity // 2])
    arguments = (query, keys, values, reach, dim**-0.5)
    expected = attention.cached_attention_reference(*arguments)
    keys[:, :, -1], values[:, :, -1] = float("nan"), float("nan")
    assert_near(attention.cached_attention_by_triton(*arguments), expected)


@DTYPES
def test_small_kernels_equal_twins(dtype):
    """Rotary positions, gated activations, and writing to a cache."""
    torch.manual_seed(0)
    query = torch.randn(3, 5, 8, 72, device=DEVICE, dtype=dtype).transpose(1, 2)
    key = torch.randn(3, 5, 2, 72, device=DEVICE, dtype=dtype).transpose(1, 2)
    angles = torch.randn(3, 5, 32, device=DEVICE)
    for interleaved in (False, True):
        arguments = (query, key, angles.cos(), angles.sin(), interleaved)
        for found, expected in zip(
            rotate_by_triton(*arguments), rotate_reference(*arguments), strict=True
        ):
            assert_near(found, expected)
    gate, up = torch.randn(2, 3, 8192, device=DEVICE, dtype=dtype)
    for act in ACTIVATIONS:
        assert_near(gated_by_triton(gate, up, act), gated_reference(gate, up, act))
    memory = torch.randn(2, 3, 2, 20, 72, device=DEVICE, dtype=dtype)
    new = torch.randn(2, 3, 2, 1, 72, device=DEVICE, dtype=dtype)
    for place in (0, 19, 20):
        where, found, expected = (
            torch.tensor([place], device=DEVICE),
            memory.clone(),
            memory.clone(),
        )
        attention.store_tokens_by_triton(found[0], found[1], new[0], new[1], where)
        attention.store_tokens_reference(expected[0], expected[1], new[0], new[1], where)
        assert torch.equal(found, expected)


@DTYPES
@pytest.mark.parametrize(
    ("rows", "heads", "heads_kv", "capacity", "dim"),
    [(1, 32, 8, 384, 64), (1, 32, 8, 5000, 128), (5, 8, 8, 100, 72)],
)
def test_a_token_is_added_and_seen(rows, heads, heads_kv, capacity, dim, dtype):
    """Turned, written and attended to by one kernel; what is at its place is not read."""
    torch.manual_seed(0)
    both = torch.randn(rows, heads + 2 * heads_kv, dim, device=DEVICE, dtype=dtype)
    query, key, value = both.split([heads, heads_kv, heads_kv], 1)
    keys, values = torch.randn(2, rows, heads_kv, capacity, dim, device=DEVICE, dtype=dtype)
    place, angles = capacity - 7, torch.randn(rows, dim // 2, device=DEVICE)
    keys[:, :, place:], values[:, :, place:] = float("nan"), float("nan")
    reach = torch.tensor([[3] * rows, [place + 1] * rows], device=DEVICE)
    for interleaved in (False, True):
        new = attention.NewToken(
            key=key,
            value=value,
            place=torch.tensor([place], device=DEVICE),
            cos=angles.cos(),
            sin=angles.sin(),
            interleaved=interleaved,
        )
        twin = keys.nan_to_num(), values.nan_to_num()
        expected = attention.extended_attention_reference(query, *twin, reach, dim**-0.5, new)
        memory = keys.clone(), values.clone()
        found = attention.cached_attention_by_triton(query, *memory, reach, dim**-0.5, new)
        assert_near(found, expected)
        for one, other in zip(memory, twin, strict=True):
            assert_near(one[:, :, place], other[:, :, place])


@DTYPES
@pytest.mark.parametrize(
    ("columns", "sizes"),
    [
        (2048, (2048, 512, 512)),
        (2048, (128256,)),
        (2048, (8192, 8192)),
        (8192, (2048,)),
        (72, (9, 4)),
        (5000, (3,)),
    ],
)
def test_products_of_a_row_equal_twin(columns, sizes, dtype):
    """Beside each other, as a gate, and with norm, biases, activation and residual."""
    torch.manual_seed(0)

    def made(*shape):
        size = shape[-1] ** -0.5 if len(shape) > 1 else 1.0
        return (size * torch.randn(shape, device=DEVICE)).to(dtype)

    weights, biases = [made(size, columns) for size in sizes], [made(size) for size in sizes]
    common: dict[str, Any] = {"x": made(columns), "norm": made(columns), "eps": 1e-5}
    cases = [
        RowProducts(x=common["x"], weights=weights, biases=[None] * len(sizes)),
        RowProducts(**common, weights=weights, biases=biases),
        RowProducts(**common, weights=weights[:1], biases=biases[:1], residual=made(sizes[0])),
    ]
    for act in ACTIVATIONS:
        cases.append(RowProducts(**common, weights=weights[:1], biases=biases[:1], act=act))
        if len(sizes) > 1 and sizes[0] == sizes[1]:
            cases.append(RowProducts(**common, weights=weights[:2], biases=biases[:2], act=act))
    for case in cases:
        assert_near(row_products_by_triton(case), row_products_reference(case))


def test_a_row_alone_is_a_row_of_many():
    """By kernels for one row, and by products of matrices: in fp32 token by token."""
    model = copy.deepcopy(made("llama")).to(DEVICE)
    ids = parity.token_ids(4, 7, high=VOCAB).to(DEVICE)
    together = generate(model, ids, max_new_tokens=20).sequences
    for row in range(4):
        alone = generate(model, ids[row : row + 1], max_new_tokens=20).sequences
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("name", TOLD)
def test_recorded_is_one_by_one(name, search, padded):
    """Token by token in fp32; and the program's random numbers afterwards."""
    model, ids = copy.deepcopy(made(name)).to(DEVICE), parity.token_ids(4, 7, high=45)
    mask = torch.ones_like(ids)
    mask[0, :3] = mask[2, :1] = 0
    found = []
    for context in (one_by_one, mock.MagicMock):
        torch.manual_seed(3)
        with context():
            out = generate(
                model, ids, mask if padded else None, max_new_tokens=14, **SEARCHES[search]
            )
        found.append((out.sequences.tolist(), torch.rand(3, device=DEVICE).tolist()))
    assert found[0] == found[1]


@DTYPES
@pytest.mark.parametrize("shape", [(1, 128256), (64, 50257), (3, 2049), (5, 7), (1, 1)])
def test_the_largest_is_that_of_torch(shape, dtype):
    """Of many equal ones the first; zeros of both signs, the smallest numbers, what is no number."""
    torch.manual_seed(0)
    drawn = torch.randn(shape, device=DEVICE)
    smallest = torch.finfo(dtype).tiny / 4
    cases = [drawn, -drawn.abs(), drawn.round(), torch.zeros_like(drawn), -1e30 * drawn.abs()]
    cases += [drawn.round() * smallest, torch.where(drawn > 0, 0.0, -0.0)]
    for value in (float("nan"), -float("nan"), float("inf"), -float("inf")):
        cases += [drawn.masked_fill(drawn > 1, value), torch.full_like(drawn, value)]
    for x in (case.to(dtype) for case in cases):
        assert torch.equal(largest_by_triton(x), x.cpu().argmax(-1).to(DEVICE))
        assert torch.equal(largest_by_triton(x.t().contiguous().t()), x.cpu().argmax(-1).to(DEVICE))


def test_a_session_replays_one_recording():
    """Of prompts of other lengths, padded or not; token by token what each gives by itself."""
    model = copy.deepcopy(made("llama")).to(DEVICE)
    mask = torch.ones(4, 5)
    mask[0, :3] = mask[2, :1] = 0
    calls = [(7, None, 14), (5, mask, 9), (9, None, 11), (2, None, 14)]
    prompts = [parity.token_ids(4, length, high=VOCAB, seed=length) for length, *_ in calls]
    for search in SEARCHES.values():
        found: list[Any] = [[], []]
        contexts: list[contextlib.AbstractContextManager[Session | None]]
        contexts = [contextlib.nullcontext(), Session()]
        for place, session in enumerate(contexts):
            torch.manual_seed(3)
            with (
                session as kept,
                mock.patch.object(
                    ReplayedWork, "_record", autospec=True, side_effect=RECORD
                ) as record,
            ):
                for ids, (_, padding, num_new) in zip(prompts, calls, strict=True):
                    out = generate(
                        model, ids, padding, max_new_tokens=num_new, session=kept, **search
                    )
                    found[place].append(out.rows())
            found[place].append(torch.rand(3, device=DEVICE).tolist())
            assert record.call_count == (1 if place else 4)
        assert found[0] == found[1]


@pytest.mark.parametrize("name", TOLD)
@pytest.mark.parametrize("rows", [1, 4])
def test_first_passes_are_replayed(name, rows):
    """From the third generation with prompts of one shape on."""
    model = copy.deepcopy(made(name)).to(DEVICE)
    prompts = [parity.token_ids(rows, 9, high=VOCAB, seed=seed).to(DEVICE) for seed in range(6)]
    expected = [generate(model, ids, max_new_tokens=14).rows() for ids in prompts]
    with (
        mock.patch.object(ReplayedWork, "_record", autospec=True, side_effect=RECORD) as record,
        Session() as session,
    ):
        found = [generate(model, ids, max_new_tokens=14, session=session).rows() for ids in prompts]
    assert found == expected and record.call_count == 2


def written(model):
    with torch.no_grad():
        model.encoder.output_layernorm.weight.mul_(-1)


def put(model):
    table = model.input_embedding
    table.weight = torch.nn.Parameter(table.weight.flip(0))


def windowed(model):
    model.config.sliding_window = 2


def other_base(model):
    """The frequencies of before are freed."""
    model.position_bias.base = 3.0


def trained(model):
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    model(parity.token_ids(4, 7, high=VOCAB).to(DEVICE)).logits.log_softmax(-1)[
        ..., 5
    ].mean().backward()
    optimizer.step()


def moved(model):
    """All weights lie elsewhere; what they were is overwritten."""
    values = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter, value in zip(model.parameters(), values, strict=True):
        parameter.data.fill_(float("nan"))
        parameter.data = value


@pytest.mark.parametrize("change", [written, put, windowed, other_base, trained, moved])
def test_a_session_follows_the_model(change):
    model, ids = copy.deepcopy(made("llama")).to(DEVICE), parity.token_ids(4, 7, high=VOCAB)
    with Session() as session:
        for _ in range(4):  # the first pass is recorded too
            before = generate(model, ids, max_new_tokens=14, session=session).rows()
        change(model)
        torch.cuda.empty_cache()
        expected = generate(model, ids, max_new_tokens=14).rows()
        assert (expected != before) == (change is not moved)
        for _ in range(4):
            assert generate(model, ids, max_new_tokens=14, session=session).rows() == expected


def test_a_session_on_several_streams():
    """Nothing orders what is on one with what is on another."""
    model, ids = copy.deepcopy(made("llama")).to(DEVICE), parity.token_ids(4, 7, high=VOCAB)
    expected = generate(model, ids, max_new_tokens=14).rows()
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with Session() as session:
        for number in range(8):
            with torch.cuda.stream(other if number % 2 else None):
                found = generate(model, ids, max_new_tokens=14, session=session)
                assert found.rows() == expected


def test_a_session_gives_its_memory_back():
    """At its end, and before it records anew; without Python's collector."""
    model, ids = copy.deepcopy(made("llama")).to(DEVICE), parity.token_ids(4, 7, high=VOCAB)
    generate(model, ids, max_new_tokens=600)
    with given_back() as allocated, Session() as session:
        held = []
        for rows in (4, 2, 4):
            generate(model, ids[:rows], max_new_tokens=600, session=session)
            held.append(torch.cuda.memory_allocated() - allocated)
        assert held[0] >= held[2] > held[1] > 0


def test_steps_are_recorded():
    """And a stream has the same tokens as a generation."""
    model, ids = copy.deepcopy(made("llama")).to(DEVICE), parity.token_ids(4, 7, high=VOCAB)
    replays = []
    call = ReplayedWork.__call__

    def counted(repeated, work):
        out = call(repeated, work)
        replays.append(repeated.is_recorded)
        return out

    with mock.patch.object(ReplayedWork, "__call__", counted):
        rows = generate(model, ids, max_new_tokens=14).rows()
    assert replays == [False] + 12 * [True]
    steps = list(stream(model, ids, max_new_tokens=14))
    assert [list(row) for row in zip(*steps, strict=True)] == rows


def test_what_cannot_be_recorded_runs():
    """A look at the device breaks the recording: the tokens are right, and so are random numbers
    and recordings afterwards.
    """
    model, ids = copy.deepcopy(made("gpt2")).to(DEVICE), parity.token_ids(2, 6, high=VOCAB)
    expected = generate(model, ids, max_new_tokens=12).sequences
    enter = model.enter

    def looks(hidden, *rest):
        float(hidden.sum())
        return enter(hidden, *rest)

    with mock.patch.object(model, "enter", looks), pytest.warns(UserWarning, match="CUDA graph"):
        assert torch.equal(generate(model, ids, max_new_tokens=12).sequences, expected)
    assert torch.rand(2, device=DEVICE).isfinite().all()
    assert torch.equal(generate(model, ids, max_new_tokens=12).sequences, expected)


def test_memory_is_given_back():
    """All of it, by the end of a generation, without Python's collector."""
    config = LlamaConfig(
        vocab_size=1000, dim_model=256, num_heads=4, dim_head=64, dim_ff=512, num_layers=4
    )
    model = Llama(config).to(DEVICE)
    ids = torch.randint(0, 1000, (8, 100), device=DEVICE)
    generate(model, ids, max_new_tokens=20)
    with given_back() as allocated:
        for length in (100, 90, 80):
            generate(model, ids[:, :length], max_new_tokens=200)
            assert torch.cuda.memory_allocated() <= allocated
