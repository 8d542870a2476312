"""Where parameters lie in flat buffers and shards: integers only."""

import pytest

from bmtrain.shard.layout import ALIGNMENT, Layout, round_up

SHAPES = [("a", (7, 13)), ("scalar", ()), ("tiny", (2,)), ("empty", (0, 5))]
SHAPES += [("prime", (101,)), ("one", (1, 1))]


@pytest.mark.parametrize("num_shards", [1, 2, 3, 4, 7, 8])
def test_shards_cover_every_element_once(num_shards):
    """Slots start at aligned places, in order, without overlap; shards are equal and aligned. Over all
    shards the pieces of each slot are its elements in order, none twice, at their place in the buffer.
    """
    layout = Layout.build(SHAPES, num_shards)
    assert [(slot.name, slot.shape) for slot in layout.slots] == SHAPES
    end = 0
    for index, slot in enumerate(layout.slots):
        assert slot.offset >= end and slot.offset % ALIGNMENT == 0
        end = slot.end
        covered = []
        for shard in range(num_shards):
            piece = layout.piece(index, shard)
            assert 0 <= piece.begin <= piece.end <= layout.shard_numel
            assert 0 <= piece.start <= piece.stop <= slot.numel
            covered += range(piece.start, piece.stop)
            if piece.numel:
                assert shard * layout.shard_numel + piece.begin == slot.offset + piece.start
        assert covered == list(range(slot.numel)), slot
    assert layout.numel == layout.shard_numel * num_shards >= end
    assert layout.shard_numel % ALIGNMENT == 0


def test_padding_is_small():
    """Below one percent for GPT-2's layer over 8 ranks; nothing to place takes no memory."""
    shapes = [(768,), (2304, 768), (768, 768), (3072, 768), (768, 3072), (3072,)]
    layout = Layout.build([(str(shape), shape) for shape in shapes], 8)
    assert layout.numel <= 1.01 * sum(slot.numel for slot in layout.slots)
    assert Layout.build([], 4).numel == 0
    found = [round_up(*each) for each in ((0, 64), (1, 64), (64, 64), (65, 64), (5, 1))]
    assert found == [0, 64, 64, 128, 5]
