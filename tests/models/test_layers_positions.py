"""Relative, segment and rotary positions against formulas written out here."""

from __future__ import annotations

import math

import pytest
import torch
from tests.models.parity import assert_close
from transformers.models.t5.modeling_t5 import T5Attention

from model_center.errors import ConfigError, InputError
from model_center.layer.dense_attention import Attention
from model_center.layer.position_embedding.relative import RelativePositionEmbedding, bucket_of
from model_center.layer.position_embedding.rotary import RotaryEmbedding, RotaryEmbeddingESM
from model_center.layer.position_embedding.segment import SegmentPositionEmbedding


def bucket(distance: int, num_buckets: int, max_distance: int, bidirectional: bool) -> int:
    """The bucket of one distance, key minus query, by plain arithmetic."""
    first = 0
    if bidirectional:
        num_buckets //= 2
        first = num_buckets if distance > 0 else 0
    steps = abs(distance) if bidirectional else max(-distance, 0)
    exact = num_buckets // 2
    if steps < exact:
        return first + steps
    far = exact + int(
        math.log(steps / exact) / math.log(max_distance / exact) * (num_buckets - exact)
    )
    return first + min(far, num_buckets - 1)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(
    ("num_buckets", "max_distance"), [(32, 128), (64, 256), (12, 20), (512, 2048)]
)
def test_buckets(num_buckets: int, max_distance: int, bidirectional: bool) -> None:
    """As the formula says, and as transformers' T5 has it."""
    distances = torch.arange(-300, 301)
    found = bucket_of(
        distances, num_buckets=num_buckets, max_distance=max_distance, bidirectional=bidirectional
    )
    theirs = T5Attention._relative_position_bucket(
        distances, bidirectional, num_buckets, max_distance
    )
    assert torch.equal(found, theirs)
    expected = [
        bucket(distance, num_buckets, max_distance, bidirectional)
        for distance in distances.tolist()
    ]
    apart = [
        step
        for step, one, other in zip(distances.tolist(), found.tolist(), expected, strict=True)
        if one != other
    ]
    assert len(apart) <= 4, apart  # where a logarithm is a whole number, rounding decides
    assert found.dtype == torch.int64


def test_buckets_of_some_distances() -> None:
    found = bucket_of(
        torch.tensor([0, 1, -1, -500, 500]), num_buckets=32, max_distance=128, bidirectional=True
    )
    assert found.tolist() == [0, 17, 1, 15, 31]
    found = bucket_of(
        torch.tensor([0, 1, -1, -500, 500]), num_buckets=32, max_distance=128, bidirectional=False
    )
    assert found.tolist() == [0, 0, 1, 31, 0]


def test_relative_positions() -> None:
    """Lengths, positions and positions with a batch; the last bucket learns, too."""
    layer = RelativePositionEmbedding(3, 8, 16, bidirectional=True, dtype=torch.float32)
    table = layer.relative_attention_bias
    out = layer(4, 6)
    assert out.shape == (3, 4, 6)
    for query in range(4):
        for key in range(6):
            assert torch.equal(out[:, query, key], table[bucket(key - query, 8, 16, True)])
    assert torch.equal(layer(torch.arange(2, 4), torch.arange(6)), out[:, 2:])
    positions = torch.tensor([[0, 1, 5], [30, 2, 2]])
    batched = layer(positions[:, 1:], positions)
    assert batched.shape == (2, 3, 2, 3)
    for row in range(2):
        assert torch.equal(batched[row], layer(positions[row, 1:], positions[row]))
    far = layer(torch.tensor([0]), torch.tensor([100]))
    (grad,) = torch.autograd.grad(far.sum(), [table])
    assert grad.tolist() == [[0.0] * 3] * 7 + [[1.0] * 3]


def test_segment_positions() -> None:
    """Distances inside of a segment, a number per pair of segments between them."""
    torch.manual_seed(0)
    layer = SegmentPositionEmbedding(2, 3, 8, 16, bidirectional=True, dtype=torch.float32)
    table = layer.relative_attention_bias
    assert table.shape == (3 * 3 + 8, 2)
    positions, segments = (
        torch.tensor([[0, 1, 2, 9], [4, 3, 2, 1]]),
        torch.tensor([[0, 0, 2, 1], [1, 1, 1, 0]]),
    )
    out = layer(positions, positions[:, 2:], segments, segments[:, 2:])
    assert out.shape == (2, 2, 2, 4)
    for row in range(2):
        for query in range(2):
            of_query, at_query = int(segments[row, 2 + query]), int(positions[row, 2 + query])
            for key in range(4):
                of_key, at_key = int(segments[row, key]), int(positions[row, key])
                index = (
                    bucket(at_key - at_query, 8, 16, True)
                    if of_query == of_key
                    else 8 + of_query * 3 + of_key
                )
                assert torch.equal(out[row, :, query, key], table[index])
    apart = SegmentPositionEmbedding(2, 3, 8, 16, dtype=torch.float32, absolute_inner_segment=False)
    found = apart(4, 4, segments, segments)
    assert torch.equal(found[0, :, 2, 2], apart.relative_attention_bias[8 + 2 * 3 + 2])
    assert torch.equal(layer(4, 4), layer(torch.arange(4)[None], torch.arange(4)[None]))
    assert torch.equal(
        layer(key_segment=segments, query_segment=segments), layer(4, 4, segments, segments)
    )
    with pytest.raises(InputError, match="query_pos and query_segment are both None"):
        layer(key_pos=4)


def turned(
    x: torch.Tensor, position: int, pairs: list[tuple[int, int]], base: float
) -> torch.Tensor:
    """One vector with the k-th pair of its channels turned by position / base^(k / number of
    pairs).
    """
    out = x.clone()
    for number, (one, other) in enumerate(pairs):
        angle = position * base ** (-number / len(pairs))
        out[one] = x[one] * math.cos(angle) - x[other] * math.sin(angle)
        out[other] = x[one] * math.sin(angle) + x[other] * math.cos(angle)
    return out


def test_rotary_layout_of_gptj() -> None:
    """Neighbouring channels are pairs; those from `rotary_dim` on are left alone; positions are
    counted from the first key.
    """
    q, k = torch.randn(2, 3, 2, 8), torch.randn(2, 3, 5, 8)
    found_q, found_k = RotaryEmbedding(4)(q, k)
    pairs = [(0, 1), (2, 3)]
    for position in range(5):
        assert_close(found_k[1, 2, position], turned(k[1, 2, position], position, pairs, 10000))
    for place in range(2):  # the last queries of the keys
        assert_close(found_q[0, 1, place], turned(q[0, 1, place], 3 + place, pairs, 10000))
    assert torch.equal(found_k[..., 4:], k[..., 4:])


@pytest.mark.parametrize("scale", [1, 0.5])
def test_rotary_layout_of_llama(scale: float) -> None:
    """Each channel is a pair with that half of them further; distances are scaled."""
    q, k = torch.randn(1, 2, 3, 6), torch.randn(1, 2, 5, 6)
    found_q, found_k = RotaryEmbeddingESM(6, base=500, distance_scale=scale)(q, k)
    pairs = [(0, 3), (1, 4), (2, 5)]
    for position in range(5):
        expected = turned(k[0, 1, position], position * scale, pairs, 500)  # type: ignore[arg-type]
        assert_close(found_k[0, 1, position], expected)
    assert_close(found_q[0, 0, 0], turned(q[0, 0, 0], 2 * scale, pairs, 500))  # type: ignore[arg-type]


def test_rotary_scores_depend_on_distances_only() -> None:
    """Far from the start too, and angles are exact in half precision: they are made in fp32."""
    q, k = torch.randn(8), torch.randn(8)
    for module in (RotaryEmbedding(8), RotaryEmbeddingESM(8)):
        tables = module.tables(torch.tensor([3, 10, 4003, 4010]))
        turned_q, turned_k = (tables.rotate(x.expand(1, 1, 4, 8))[0, 0] for x in (q, k))
        assert_close(turned_q[0] @ turned_k[1], turned_q[2] @ turned_k[3], tolerance=2e-3)
        exact = module.tables(torch.tensor([4003])).rotate(q.expand(1, 1, 1, 8))
        half = module.tables(torch.tensor([4003])).rotate(q.bfloat16().expand(1, 1, 1, 8))
        assert half.dtype == torch.bfloat16
        assert_close(half.float(), exact, tolerance=0.03)


def test_rotary_tables_with_a_batch_and_gradients() -> None:
    """Each row its own positions; turning back is the gradient."""
    module, x = RotaryEmbeddingESM(4), torch.randn(2, 3, 2, 4, requires_grad=True)
    positions = torch.tensor([[0, 1], [5, 3]])
    out = module.tables(positions).rotate(x)
    for row in range(2):
        assert_close(out[row], module.tables(positions[row]).rotate(x[row : row + 1])[0])
    noise = torch.randn(2, 3, 2, 4)
    (grad,) = torch.autograd.grad((out * noise).sum(), [x])
    assert_close(grad, module.tables(-positions).rotate(noise))


def test_rotary_scalings() -> None:
    """Linear scaling divides all frequencies; llama3's leaves the fast ones, divides the slow ones,
    and mixes between.
    """
    plain = RotaryEmbeddingESM(16).tables(torch.tensor([7]))
    linear = RotaryEmbeddingESM(16, scaling={"type": "linear", "factor": 7.0}).tables(
        torch.tensor([7])
    )
    assert_close(linear.cos, RotaryEmbeddingESM(16).tables(torch.tensor([1])).cos)
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    llama3 = RotaryEmbeddingESM(16, scaling=scaling).tables(torch.tensor([7]))
    for number in range(8):
        frequency = 10000 ** (-number / 8)
        waves = 64 * frequency / (2 * math.pi)
        share = min(max((waves - 1) / 3, 0), 1)
        angle = 7 * (share * frequency + (1 - share) * frequency / 8)
        assert llama3.sin[0, number].item() == pytest.approx(math.sin(angle), abs=1e-5)
    assert llama3.sin[0, 0] == plain.sin[0, 0]


def test_rotary_errors() -> None:
    with pytest.raises(ConfigError, match="5 channels: expected an even"):
        RotaryEmbedding(5)
    with pytest.raises(ConfigError, match="'yarn' is not supported"):
        RotaryEmbeddingESM(4, scaling={"rope_type": "yarn"})
    with pytest.raises(ConfigError, match="'linear' lacks factor"):
        RotaryEmbeddingESM(4, scaling={"rope_type": "linear"})
    attention = Attention(8, 4, 2, dtype=torch.float32, pos_bias_type="rotary")
    with pytest.raises(InputError, match="position_bias is NoneType: rotary"):
        attention(torch.randn(1, 2, 8), torch.randn(1, 2, 8))
