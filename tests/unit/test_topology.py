"""Ranks on the axes of the mesh, against BMTrain's formulas."""

import itertools

import pytest

from bmtrain.errors import ConfigurationError
from bmtrain.runtime.topology import Topology


@pytest.mark.parametrize(
    ("world", "pipe", "tp"),
    [(1, 1, 1), (4, 1, 1), (4, 2, 1), (4, 1, 2), (8, 2, 2), (12, 3, 2), (16, 2, 4)],
)
def test_formulas(world, pipe, tp):
    """The layout of ranks that the specification gives. Every rank is in one group of every kind;
    groups of a kind are equal in size and the same seen from every rank; ids are places in them.
    """
    sizes = {"world_size": world, "pipe_size": pipe, "tp_size": tp}
    places = [Topology(rank=rank, **sizes) for rank in range(world)]
    for rank, place in enumerate(places):
        assert place.stages == pipe
        assert (place.stage_id, place.pipe_idx) == divmod(rank, world // pipe)
        assert (place.tp_idx, place.tp_id) == divmod(rank, tp)
        assert (place.zero_id, place.zero_idx) == (rank, 0)
        for kind, ids in {
            "tp": (rank // tp, rank % tp),
            "pipe": (place.pipe_idx, place.stage_id),
            "zero": (0, rank),
            "tp_zero": (rank % tp, rank // tp),
        }.items():
            assert (place.get_group_id(kind), place.get_group_rank(kind)) == ids
    counts = {"world": 1, "pipe": world // pipe, "tp": world // tp, "tp_zero": tp}
    for kind, count in (counts | {"pp_zero": pipe, "pp_tp_zero": pipe * tp}).items():
        groups = places[0].partition(kind)
        assert all(place.partition(kind) == groups for place in places)
        assert sorted(itertools.chain(*groups)) == list(range(world)), kind
        assert {len(group) for group in groups} == {world // count}, kind
        if kind in ("world", "pipe"):
            continue
        for index, group in enumerate(groups):
            assert [getattr(places[rank], f"{kind}_id") for rank in group] == [*range(len(group))]
            assert {getattr(places[rank], f"{kind}_idx") for rank in group} == {index}


def test_what_is_refused():
    """The message has all three numbers."""
    for world, pipe, tp in ((3, 2, 1), (4, 1, 3), (4, 3, 2)):
        words = rf"{world} ranks.*pipe_size={pipe} x tp_size={tp}"
        with pytest.raises(ConfigurationError, match=words):
            Topology(rank=0, world_size=world, pipe_size=pipe, tp_size=tp)
    with pytest.raises(ConfigurationError, match="pipe_size is 0: expected a whole number above 0"):
        Topology(rank=0, world_size=4, pipe_size=0)
    with pytest.raises(ConfigurationError, match="tp_size is -1: expected a whole number above 0"):
        Topology(rank=0, world_size=4, tp_size=-1)
    with pytest.raises(ConfigurationError, match=r"'spam'.*pipe, zero, tp_zero, tp"):
        Topology(rank=0, world_size=1).get_group_id("spam")
