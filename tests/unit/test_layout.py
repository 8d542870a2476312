"""Where parameters lie in flat buffers and shards: integers only."""

from __future__ import annotations

import pytest

from bmtrain.shard.layout import ALIGNMENT, Layout, round_up

SHAPES = [
    ("a", (7, 13)),
    ("scalar", ()),
    ("tiny", (2,)),
    ("empty", (0, 5)),
    ("prime", (101,)),
    ("one", (1, 1)),
]


@pytest.mark.parametrize("num_shards", [1, 2, 3, 4, 7])
def test_shards_cover_every_element_once(num_shards: int) -> None:
    """Over all shards the pieces of each slot are its elements in order, none twice, at their place
    in the buffer.
    """
    layout = Layout.build(SHAPES, num_shards)
    for index, slot in enumerate(layout.slots):
        covered: list[int] = []
        for shard in range(num_shards):
            piece = layout.piece(index, shard)
            assert 0 <= piece.begin <= piece.end <= layout.shard_numel
            assert 0 <= piece.start <= piece.stop <= slot.numel
            covered += range(piece.start, piece.stop)
            if piece.numel:
                assert shard * layout.shard_numel + piece.begin == slot.offset + piece.start
        assert covered == list(range(slot.numel)), slot


@pytest.mark.parametrize("num_shards", [1, 2, 3, 8])
def test_slots_and_shards_are_aligned_and_apart(num_shards: int) -> None:
    """Slots start at aligned places, in order, without overlap; shards are equal and aligned."""
    layout = Layout.build(SHAPES, num_shards)
    assert [slot.name for slot in layout.slots] == [name for name, _ in SHAPES]
    end = 0
    for slot in layout.slots:
        assert slot.offset >= end and slot.offset % ALIGNMENT == 0
        end = slot.end
    assert layout.numel >= end
    assert layout.shard_numel % ALIGNMENT == 0
    assert layout.numel == layout.shard_numel * num_shards


def test_a_scalar_has_one_element_and_a_parameter_below_the_world_size_some_empty_pieces() -> None:
    """0-dim and tiny parameters lie on one rank; the other ranks' pieces are empty, not
    negative.
    """
    layout = Layout.build([("scalar", ()), ("tiny", (2,))], 4)
    assert [slot.numel for slot in layout.slots] == [1, 2]
    for index, count in ((0, 1), (1, 2)):
        assert sum(layout.piece(index, shard).numel for shard in range(4)) == count


def test_padding_of_a_transformer_layer_is_below_one_percent() -> None:
    """GPT-2's layer over 8 ranks."""
    shapes = [
        ("ln1", (768,)),
        ("qkv", (2304, 768)),
        ("proj", (768, 768)),
        ("up", (3072, 768)),
        ("down", (768, 3072)),
        ("b", (3072,)),
    ]
    layout = Layout.build(shapes, 8)
    used = sum(slot.numel for slot in layout.slots)
    assert layout.numel <= 1.01 * used


@pytest.mark.parametrize(
    ("value", "multiple", "want"), [(0, 64, 0), (1, 64, 64), (64, 64, 64), (65, 64, 128), (5, 1, 5)]
)
def test_round_up(value: int, multiple: int, want: int) -> None:
    """To the least multiple not below."""
    assert round_up(value, multiple) == want


def test_no_parameters_give_an_empty_layout() -> None:
    """Nothing to place takes no memory."""
    assert Layout.build([], 4).numel == 0
