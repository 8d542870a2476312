"""Ranks on the axes of the mesh, against BMTrain's formulas."""

from __future__ import annotations

import itertools

import pytest

from bmtrain.errors import ConfigurationError
from bmtrain.runtime.topology import Topology

SIZES = [(1, 1, 1), (4, 1, 1), (4, 2, 1), (4, 1, 2), (8, 2, 2), (12, 3, 2), (16, 2, 4)]
KINDS = ("world", "pipe", "tp", "tp_zero", "pp_zero", "pp_tp_zero")


@pytest.mark.parametrize(("world", "pipe", "tp"), SIZES)
def test_formulas(world: int, pipe: int, tp: int) -> None:
    """The layout of ranks that the specification gives."""
    for rank in range(world):
        place = Topology(rank=rank, world_size=world, pipe_size=pipe, tp_size=tp)
        assert place.stage_id == rank // (world // pipe)
        assert place.pipe_idx == rank % (world // pipe)
        assert place.tp_id == rank % tp
        assert place.tp_idx == rank // tp
        assert place.stages == pipe
        assert (place.zero_id, place.zero_idx) == (rank, 0)
        assert place.get_group_id("tp") == rank // tp and place.get_group_rank("tp") == rank % tp
        assert (
            place.get_group_rank("pipe") == place.stage_id
            and place.get_group_id("pipe") == place.pipe_idx
        )


@pytest.mark.parametrize(("world", "pipe", "tp"), SIZES)
def test_every_rank_is_in_one_group_of_every_kind(world: int, pipe: int, tp: int) -> None:
    """Groups of a kind are equal in size and the same seen from every rank; ids are places in
    them.
    """
    places = [
        Topology(rank=rank, world_size=world, pipe_size=pipe, tp_size=tp) for rank in range(world)
    ]
    sizes = {
        "world": world,
        "pipe": pipe,
        "tp": tp,
        "tp_zero": world // tp,
        "pp_zero": world // pipe,
        "pp_tp_zero": world // pipe // tp,
    }
    for kind in KINDS:
        groups = places[0].partition(kind)
        assert all(place.partition(kind) == groups for place in places)
        assert sorted(itertools.chain(*groups)) == list(range(world)), kind
        assert {len(group) for group in groups} == {sizes[kind]}, kind
    for kind, name in (
        ("tp", "tp_id"),
        ("tp_zero", "tp_zero_id"),
        ("pp_zero", "pp_zero_id"),
        ("pp_tp_zero", "pp_tp_zero_id"),
    ):
        for group in places[0].partition(kind):
            assert [getattr(places[rank], name) for rank in group] == list(range(len(group))), kind


@pytest.mark.parametrize(("world", "pipe", "tp"), [(3, 2, 1), (4, 1, 3), (4, 3, 2)])
def test_sizes_that_do_not_divide(world: int, pipe: int, tp: int) -> None:
    """The message has all three numbers."""
    with pytest.raises(
        ConfigurationError, match=rf"{world} ranks.*pipe_size={pipe} x tp_size={tp}"
    ):
        Topology(rank=0, world_size=world, pipe_size=pipe, tp_size=tp)


@pytest.mark.parametrize(
    ("name", "sizes"), [("pipe_size", {"pipe_size": 0}), ("tp_size", {"tp_size": -1})]
)
def test_sizes_below_one(name: str, sizes: dict[str, int]) -> None:
    """Are named."""
    with pytest.raises(ConfigurationError, match=rf"{name} is {sizes[name]}: expected at least 1"):
        Topology(rank=0, world_size=4, **sizes)


def test_an_unknown_group() -> None:
    """Names the known ones."""
    with pytest.raises(ConfigurationError, match=r"'spam'.*pipe, zero, tp_zero, tp"):
        Topology(rank=0, world_size=1).get_group_id("spam")
