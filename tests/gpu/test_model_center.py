"""Language models on real GPUs: the kernels that attention chooses there, and what tests/ranks runs
on the CPU, over NCCL.
"""

import contextlib
import types
from typing import Any
from unittest import mock

import pytest
import torch
from tests.garbage import given_back
from tests.gpu.test_programs import run_compiled_on_gpus, run_on_gpus
from tests.models import parity
from tests.ranks import test_generation, test_generation_session, test_model_center
from tests.ranks.runner import run_ranks
from tests.tensors import own_slice

import bmtrain as bmt
from bmtrain.distributed import transport
from model_center.generation.engine import generate
from model_center.generation.recording import ReplayedWork
from model_center.generation.resident import ResidentWeights
from model_center.generation.session import Session
from model_center.layer.dense_attention import Attention
from model_center.layer.mask import AttentionMask
from model_center.layer.scaled_dot_product import attend, attend_visibly
from model_center.model.llama import Llama, LlamaConfig

pytestmark = pytest.mark.gpu
SIZE = torch.cuda.device_count()
BATCH, HEADS, TOKENS, DIM = 3, 4, 96, 64
RECORD = ReplayedWork._record
ON_TWO = pytest.mark.skipif(SIZE < 2, reason="needs two GPUs")


def keys_of(side):
    """Valid keys (BATCH, TOKENS): all, half of them, none in the last row."""
    valid = torch.ones(BATCH, TOKENS, dtype=torch.bool, device="cuda")
    valid[1, : TOKENS // 2] = False
    valid[2] = False
    return valid.flip(1) if side == "right" else valid


MASKS = {
    "none": AttentionMask,
    "causal": lambda: AttentionMask(causal=True),
    "window": lambda: AttentionMask(causal=True, window=17),
    "keys": lambda: AttentionMask(keys=keys_of("right")),
    "causal, right": lambda: AttentionMask(causal=True, keys=keys_of("right")),
    "causal, left": lambda: AttentionMask(causal=True, keys=keys_of("left")),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("key_heads", [HEADS, 2])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_kernels_compute_what_the_formula_says(name, biased, key_heads, dtype):
    """Values and gradients, also where a row sees nothing: finite, and right to the precision of
    the dtype.
    """
    torch.manual_seed(0)
    shapes = [
        (BATCH, HEADS, TOKENS, DIM),
        (BATCH, key_heads, TOKENS, DIM),
        (BATCH, key_heads, TOKENS, DIM),
    ]
    wide = [torch.randn(shape, device="cuda", requires_grad=True) for shape in shapes]
    if biased:
        wide.append(torch.randn(1, HEADS, TOKENS, TOKENS, device="cuda", requires_grad=True))
    narrow = [x.detach().to(dtype).requires_grad_() for x in wide]
    mask, towards = MASKS[name](), torch.randn(shapes[0], device="cuda")

    def arguments(tensors):
        return (*tensors[:3], mask, *tensors[3:])

    expected, _ = attend_visibly(*arguments(wide))
    found = attend(*arguments(narrow))
    (expected * towards).sum().backward()
    (found.float() * towards).sum().backward()
    pairs = [
        (found, expected),
        *((one.grad, other.grad) for one, other in zip(narrow, wide, strict=True)),
    ]
    for one, other in pairs:
        assert one is not None and other is not None and bool(torch.isfinite(one).all())
        error, eps = one.float() - other, torch.finfo(dtype).eps
        assert error.norm() <= 2 * eps * other.norm()
        assert error.abs().max() <= 4 * eps * other.abs().max()


def test_no_mask_is_made_where_causality_says_it_all():
    """8192 tokens in one long row: all pairs would be 64 MiB a head."""
    with torch.device("cuda"):
        layer = Attention(256, 64, 4, dtype=torch.bfloat16)
        x = torch.randn(1, 8192, 256, dtype=torch.bfloat16)
    mask = AttentionMask(causal=True)
    # makes what is made once: gradients, workspaces of the matrix library
    layer(x[:, :8], x[:, :8], mask).sum().backward()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    layer(x, x, mask).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 60 * 2**20


@pytest.mark.parametrize("name", test_model_center.CLASSES)
def test_training(name, tmp_path, monkeypatch):
    """Sharded over GPUs, compiled, in every mode, as one process on the CPU: scores, gradients,
    parameters after some steps.
    """
    monkeypatch.setattr(test_model_center, "run_ranks", run_compiled_on_gpus)
    test_model_center.test_training(name, SIZE, tmp_path)


def searched(model, rank):
    """Tokens of the searches that draw nothing: devices draw differently."""
    ids, mask = (x.to(next(model.parameters()).device) for x in test_generation.prompts(rank))
    options = test_generation.WORK[rank][2]
    return [
        generate(model, ids, mask, **options, **search).rows()
        for search in test_generation.SEARCHES[:2]
    ]


def searched_on_its_gpu(folder, name):
    return searched(test_generation.made(folder, name), bmt.rank())


@pytest.mark.parametrize("name", test_generation.CLASSES)
def test_generation_on_gpus(name, tmp_path):
    """Ranks with other prompts, lengths and ends get what one process on the CPU gets."""
    torch.manual_seed(0)
    model_class = test_generation.CLASSES[name]
    sizes = {
        **test_generation.SIZES,
        **({"num_layers": 3, "position_size": 20} if name == "gpt2" else {}),
    }
    alone = parity.randomized(model_class(model_class._CONFIG_TYPE(**sizes)), std=0.3)
    alone.save_pretrained(tmp_path / name, format="model_center")
    size = min(SIZE, len(test_generation.WORK))
    found = run_on_gpus(searched_on_its_gpu, size, tmp_path, name)
    assert found == [searched(alone, rank) for rank in range(size)]


@contextlib.contextmanager
def opened_session():
    """As test_generation_session's, with the recordings of the GPU."""
    counts = types.SimpleNamespace(num_recorded=0)

    def record(*args):
        counts.num_recorded += 1
        RECORD(*args)

    with (
        mock.patch.object(ReplayedWork, "_record", record),
        Session() as session,
        test_generation.counted_gathers(test_generation_session.engine()) as gathers,
    ):
        yield session, counts, gathers


def by_replay(model):
    """On one rank, past torch: no version tells."""
    weight = test_generation_session.weight_of(model)
    values, graph = own_slice(weight), torch.cuda.CUDAGraph()
    if bmt.rank() == 0:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            values.neg_()
    before = weight.storage_of.version()
    if bmt.rank() == 0:
        graph.replay()
        torch.cuda.synchronize()
    assert weight.storage_of.version() == before


def assert_same_tokens(found, expected):
    assert found[0] == expected[0]
    torch.testing.assert_close(found[1], expected[1], rtol=1e-3, atol=1e-3)


def follow_on_its_gpu(folder, part):
    there = test_generation_session
    changes = {
        by_replay if change is there.past_torch else change: costs
        for change, costs in there.CHANGES.items()
    }
    with (
        mock.patch.object(there, "opened", opened_session),
        mock.patch.object(there, "assert_near", assert_same_tokens),
        mock.patch.object(there, "CHANGES", changes),
        mock.patch.object(transport, "SMALLEST_SHARED_BYTES", 0),
    ):
        there.follow(folder, part)


@ON_TWO
@pytest.mark.parametrize("init", [{}, {"zero_level": 2}, {"transport": "collective"}], ids=str)
@pytest.mark.parametrize("part", range(2))
def test_a_session_of_two_gpus(part, init, tmp_path):
    """Two recordings in all, whatever is written; what was not written is not gathered again."""
    test_generation.saved(tmp_path)
    run_compiled_on_gpus(follow_on_its_gpu, 2, tmp_path, part, init=init)


def hold_and_free():
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 1000, "dim_model": 256, "dim_head": 64, "dim_ff": 512}
    model = Llama(LlamaConfig(**sizes, num_heads=4, num_layers=6, dtype="float32"))
    bmt.init_parameters(model)
    ids = parity.token_ids(2 + bmt.rank(), 60, high=1000)
    whole = sum(param.numel() * param.dtype.itemsize for param in model.parameters())
    # all that stays by itself: rings, workspaces of libraries
    with mock.patch.object(ResidentWeights, "fits", lambda *_: False):
        generate(model, ids, max_new_tokens=200)
    expected = generate(model, ids, max_new_tokens=200).rows()
    with given_back() as allocated, Session() as session:
        held = []
        for _ in range(5):
            assert generate(model, ids, max_new_tokens=200, session=session).rows() == expected
            held.append(torch.cuda.memory_allocated() - allocated)
        assert whole <= held[0] and held[4] <= held[2]  # the first pass is kept from then on
        with mock.patch.object(ResidentWeights, "fits", lambda *_: bmt.rank() == 0):
            generate(model, ids, max_new_tokens=200, session=session)
        assert torch.cuda.memory_allocated() <= allocated
        assert generate(model, ids, max_new_tokens=200, session=session).rows() == expected


@ON_TWO
def test_a_session_of_two_gpus_gives_its_memory_back():
    """At its end, and on both where one has no room."""
    run_ranks(hold_and_free, 2, device=None, timeout=300)


def take_turns_on_streams(folder):
    model = test_generation.made(folder, "gpt2")
    ids = test_generation_session.prompt()
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with Session() as session:
        for number in range(8):
            test_generation_session.in_place(model)
            torch.cuda.synchronize()
            expected = test_generation_session.layer_by_layer(model, ids)[0]
            torch.cuda.synchronize()
            with torch.cuda.stream(other if number % 2 else None):
                found = generate(model, ids, max_new_tokens=9, session=session)
                assert found.rows() == expected


@ON_TWO
def test_a_session_of_two_gpus_on_several_streams(tmp_path):
    """Weights are written in between, and lie in the same memory."""
    test_generation.saved(tmp_path)
    run_compiled_on_gpus(take_turns_on_streams, 2, tmp_path)
