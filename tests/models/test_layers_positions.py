"""Relative, segment and rotary positions against their formulas."""

import math

import pytest
import torch
from tests.models.by_hand import assert_alike, noise
from tests.models.parity import assert_close
from transformers.models.t5.modeling_t5 import T5Attention

from model_center.errors import ConfigError, InputError
from model_center.layer.dense_attention import Attention
from model_center.layer.position_embedding.relative import bucket_of
from model_center.layer.position_embedding.rotary import RotaryEmbedding, RotaryEmbeddingESM
from model_center.layer.position_embedding.segment import SegmentPositionEmbedding


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def buckets(distance, *sizes, both=True):
    """As transformers' T5 has it."""
    return T5Attention._relative_position_bucket(distance, both, *sizes)


@pytest.mark.parametrize("sizes", [(32, 128), (64, 256), (12, 20), (512, 2048)])
def test_buckets(sizes):
    distances = torch.arange(-300, 301)
    for both in (False, True):
        options = {"num_buckets": sizes[0], "max_distance": sizes[1]}
        found = bucket_of(distances, **options, bidirectional=both)
        assert torch.equal(found, buckets(distances, *sizes, both=both))


def test_segment_positions():
    """Distances inside of a segment, a number per pair of segments between them."""
    positions, segments = torch.randint(30, (2, 4)), torch.arange(8).view(2, 4) % 3
    sizes = (2, 3, 8, 16, True, torch.float32)
    for inner in (True, False):
        layer = SegmentPositionEmbedding(*(*sizes, inner))
        assert layer.relative_attention_bias.shape == (3 * 3 + 8, 2)
        of_query, of_key = segments[:, 2:, None], segments[:, None]
        near = buckets(positions[:, None] - positions[:, 2:, None], 8, 16)
        apart = 8 + of_query * 3 + of_key
        rows = near.where((of_query == of_key) & torch.tensor(inner), apart)
        found = layer(positions, positions[:, 2:], segments, segments[:, 2:])
        assert_alike(found, layer.relative_attention_bias[rows].movedim(-1, -3), layer)
        counted = torch.arange(4)[None]
        assert torch.equal(layer(4, 4), layer(counted, counted))
        expected = layer(4, 4, segments, segments)
        assert torch.equal(layer(key_segment=segments, query_segment=segments), expected)
        with pytest.raises(InputError, match="query_pos and query_segment are both None"):
            layer(key_pos=4)
        with pytest.raises(InputError, match="the table of segments of 3 rows got ids from 1 to 3"):
            layer(4, 4, segments + 1, segments)


def turned(x, positions, interleaved, base=10000):
    """Pairs of channels are complex numbers: the k-th is multiplied by e^(i position / base^(k /
    number of pairs)).
    """
    pairs = x.unflatten(-1, (-1, 2)) if interleaved else x.unflatten(-1, (2, -1)).mT
    count = pairs.shape[-2]
    angles = positions[..., None] * base ** (-torch.arange(count) / count)
    numbers = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones(()), angles)
    out = torch.view_as_real(numbers)
    return (out if interleaved else out.mT).flatten(-2)


def test_rotary_layouts():
    """GPT-J's pairs are neighbours, channels from `rotary_dim` on left alone; LLaMA's are half of
    them apart, and distances are scaled. Keys count from 0, queries are the last ones.
    """
    q, k, places = noise(2, 3, 2, 8), noise(2, 3, 5, 8), torch.arange(5.0)
    for module, channels, scale in (
        (RotaryEmbedding(4), 4, 1.0),
        (RotaryEmbeddingESM(8), 8, 1.0),
        (RotaryEmbeddingESM(8, base=500, distance_scale=0.5), 8, 0.5),
    ):
        for found, x, at in zip(module(q, k), (q, k), (places[3:], places), strict=True):
            part = turned(x[..., :channels], at * scale, channels == 4, module.base)
            assert_alike(found, torch.cat([part, x[..., channels:]], -1), x)
    with pytest.raises(InputError, match="seq_dim is 1: positions go along the last but one"):
        module(q, k, 1)
    for place in (2, -2):
        assert torch.equal(module(q=q, k=k, seq_dim=place)[1], module(q, k)[1])
    assert_alike(RotaryEmbedding(4)(h_q=q, h_k=k)[0], RotaryEmbedding(4)(q, k)[0], q)


def test_rotary_scalings():
    """Linear scaling divides all frequencies; llama3's leaves the fast ones, divides the slow ones,
    and mixes between.
    """
    places, frequencies = torch.tensor([7, 30]), 10000 ** (-torch.arange(8) / 8)
    llama3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    share = ((64 * frequencies / (2 * math.pi) - 1) / 3).clamp(0, 1)
    assert {0.0, 1.0} < set(share.tolist())
    for scaling, expected in (
        ({}, frequencies),
        ({"type": "linear", "factor": 7.0}, frequencies / 7),
        (
            llama3 | {"rope_type": "llama3", "original_max_position_embeddings": 64},
            share * frequencies + (1 - share) * frequencies / 8,
        ),
    ):
        tables = RotaryEmbeddingESM(16, scaling=scaling).tables(places)
        assert_close(tables.sin, (places[:, None] * expected).sin())
        assert_close(tables.cos, (places[:, None] * expected).cos())


def test_rotary_errors():
    with pytest.raises(ConfigError, match="5 channels: expected an even"):
        RotaryEmbedding(5)
    with pytest.raises(ConfigError, match="'yarn' is not supported"):
        RotaryEmbeddingESM(4, scaling={"rope_type": "yarn"})
    with pytest.raises(ConfigError, match="'linear' lacks factor"):
        RotaryEmbeddingESM(4, scaling={"rope_type": "linear"})
    attention = Attention(8, 4, 2, dtype=torch.float32, pos_bias_type="rotary")
    with pytest.raises(InputError, match="position_bias is NoneType: rotary"):
        attention(torch.randn(1, 2, 8), torch.randn(1, 2, 8))
