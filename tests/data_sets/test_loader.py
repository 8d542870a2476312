"""DistributedDataLoader: against the plain order of rows, at 1, 2 and 4 ranks, with workers,
interrupted anywhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.ranks.runner import run_ranks
from torch.utils.data import Dataset, IterableDataset, Subset

import bmtrain as bmt
from bmtrain.errors import RanksPartedError
from model_center.dataset.loader import DistributedDataLoader, on_device
from model_center.dataset.order import permutation
from model_center.dataset.protocols import Epoch
from model_center.errors import DataError

Steps = tuple[list[list[int]], dict[str, Any]]  # rows of each step on one rank, and the place after


class Numbers(Dataset[int]):
    """Row i is i."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> int:
        return index


class Words(Numbers):
    """Rows of different lengths, padded by the dataset itself; they differ from epoch to epoch."""

    def __init__(self, rows: int) -> None:
        super().__init__(rows)
        self.epoch = Epoch()

    def set_epoch(self, epoch: int) -> None:
        self.epoch.number = epoch

    def __getitem__(self, index: int) -> list[int]:  # type: ignore[override]
        return [self.epoch.number] + [index] * (index % 3)

    def collate(self, rows: list[list[int]]) -> list[list[int]]:
        return [row + [-1] * (3 - len(row)) for row in rows]


class Stream(IterableDataset[int]):
    """0, 1, ... 9, from where it is."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < 10:
            self.at += 1
            yield self.at - 1
        self.at = 0


class KeptStream(Stream):
    """The same, with a place."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def numbers(loader: DistributedDataLoader) -> list[list[int]]:
    """One pass as lists."""
    return [batch.tolist() for batch in loader]


def test_without_a_process_group() -> None:
    """One rank reads what torch's DataLoader reads; len() is what comes."""
    loader = DistributedDataLoader(Numbers(10), batch_size=4)
    assert numbers(loader) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert len(loader) == 3
    assert len(DistributedDataLoader(Numbers(10), batch_size=4, drop_last=True)) == 2
    assert numbers(DistributedDataLoader(Numbers(2))) == [[0], [1]]
    assert loader.batch_size == 4


def test_each_epoch_has_its_own_order() -> None:
    """Passes count; set_epoch goes anywhere; the seed matters."""
    loader = DistributedDataLoader(Numbers(50), shuffle=True, seed=3, batch_size=50)
    passes = [numbers(loader)[0] for _ in range(3)]
    assert passes == [permutation(50, 3, epoch).tolist() for epoch in range(3)]
    assert loader.epoch == 3
    loader.set_epoch(1)
    assert numbers(loader)[0] == passes[1]
    assert (
        numbers(DistributedDataLoader(Numbers(50), shuffle=True, seed=4, batch_size=50))[0]
        != passes[0]
    )


def test_a_pass_left_early_is_over() -> None:
    """The next one is the next epoch, from its start; two iterators do not disturb each other."""
    loader = DistributedDataLoader(Numbers(9), shuffle=True, batch_size=2)
    first = iter(loader)
    assert next(first).tolist() == permutation(9, 0, 0).tolist()[:2]
    second = iter(loader)
    assert next(second).tolist() == permutation(9, 0, 1).tolist()[:2]
    assert [row for batch in first for row in batch.tolist()] == permutation(9, 0, 0).tolist()[2:]
    assert loader.state_dict() == {"epoch": 1, "row": 2, "num_rows": 9, "shuffle": True, "seed": 0}


@pytest.mark.parametrize(
    "workers",
    [{}, {"num_workers": 2, "prefetch_factor": 3}, {"num_workers": 1, "persistent_workers": True}],
)
def test_the_dataset_collates_and_knows_the_epoch(workers: dict[str, Any]) -> None:
    """In the process and in workers, those that outlive an epoch too; under Subset as well."""
    dataset = Words(6)
    loader = DistributedDataLoader(Subset(dataset, [1, 2, 5]), batch_size=2, **workers)
    for epoch in range(3):
        assert list(loader) == [[[epoch, 1, -1], [epoch, 2, 2]], [[epoch, 5, 5]]]
    assert list(DistributedDataLoader(dataset, batch_size=6, collate_fn=len)) == [6]


def read_otherwise(how: str) -> str:
    """Each way but the first would take some rows twice and leave out others."""
    rank, rows = bmt.rank(), Numbers(12)
    options: dict[str, Any] = {"shuffle": True, "batch_size": 2}
    loader = DistributedDataLoader(rows, **options)
    if how == "seed":
        loader = DistributedDataLoader(rows, seed=rank, **options)
    if how == "rows":
        loader = DistributedDataLoader(Numbers(12 + 2 * rank), **options)
    if how == "batch_size":
        loader = DistributedDataLoader(rows, shuffle=True, batch_size=1 + rank)
    if how == "look" and rank == 0:
        next(iter(loader))
    next(iter(loader))
    try:
        bmt.synchronize()
    except RanksPartedError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("how", ["alike", "seed", "rows", "batch_size", "look"])
def test_ranks_that_read_in_other_orders_are_told(how: str) -> None:
    """At the next collective."""
    messages = run_ranks(read_otherwise, 2, how)
    assert len(set(messages)) == 1
    assert ("a pass over rows" in messages[0]) == (how != "alike")


class Told(Numbers):
    """Keeps the epoch in an attribute, of which every worker process has its own."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> int:
        return 100 * self.epoch + index


class ToldStream(IterableDataset[int]):
    def set_epoch(self, epoch: int) -> None:
        pass

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_that_outlive_an_epoch_are_told_the_next(workers: int) -> None:
    """After a pass that was left early, and in a resumed one, too."""
    options: dict[str, Any] = {"batch_size": 2, "num_workers": workers, "persistent_workers": True}
    loader = DistributedDataLoader(Subset(Told(6), range(6)), **options)
    for epoch in (0, 1):
        first = 100 * epoch
        assert numbers(loader) == [[first + row, first + row + 1] for row in (0, 2, 4)]
    assert next(iter(loader)).tolist() == [200, 201]
    state = loader.state_dict()
    assert numbers(loader) == [[300, 301], [302, 303], [304, 305]]
    loader.load_state_dict(state)
    assert numbers(loader) == [[202, 203], [204, 205]]


def test_streams_with_epochs_have_workers_for_each() -> None:
    """Nothing reaches the copies of a stream."""
    DistributedDataLoader(ToldStream(), num_workers=1)
    with pytest.raises(DataError, match="leave persistent_workers=False"):
        DistributedDataLoader(ToldStream(), num_workers=1, persistent_workers=True)


def test_random_numbers_of_the_program_are_left_alone() -> None:
    """A pass draws nothing from torch's generator, which dropout uses; its own seeds differ between
    epochs.
    """
    before = torch.random.get_rng_state()
    loader = DistributedDataLoader(Numbers(4), shuffle=True, batch_size=2)
    numbers(loader)
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("workers", [0, 2])
def test_the_place_counts_what_was_handed_out(workers: int) -> None:
    """Not what workers fetched ahead: from every place, the rest is what an uninterrupted run
    reads.
    """
    loader = DistributedDataLoader(Numbers(11), shuffle=True, batch_size=3, num_workers=workers)
    states, read = [loader.state_dict()], []
    for _ in range(2):
        for batch in loader:
            read.append(batch.tolist())
            states.append(loader.state_dict())
    for step, state in list(enumerate(states))[:: 1 if not workers else 3]:
        again = DistributedDataLoader(Numbers(11), shuffle=True, batch_size=3)
        again.load_state_dict(state)
        assert again.state_dict() == state
        assert (
            list(itertools.chain(*(numbers(again) for _ in range(2))))[: len(read) - step]
            == read[step:]
        )


def test_a_place_in_another_order_is_refused() -> None:
    """Other rows, other seed, shuffled or not: going on would repeat and leave out rows."""
    state = DistributedDataLoader(Numbers(11), shuffle=True, seed=1).state_dict()
    for rows, shuffle, seed, complaint in (
        (12, True, 1, "num_rows 11"),
        (11, False, 1, "shuffle"),
        (11, True, 2, "seed 1"),
    ):
        with pytest.raises(DataError, match=complaint):
            DistributedDataLoader(Numbers(rows), shuffle=shuffle, seed=seed).load_state_dict(state)
    plain = DistributedDataLoader(Numbers(11), seed=1).state_dict()
    # the seed of no order does not matter
    DistributedDataLoader(Numbers(11), seed=2).load_state_dict(plain)


def test_streams_pass_through() -> None:
    """They keep their order, and their place if they can tell it."""
    loader = DistributedDataLoader(KeptStream(), batch_size=4)
    assert numbers(loader) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    next(iter(loader))
    state = loader.state_dict()
    assert state == {"epoch": 1, "dataset": {"at": 4}}
    again = DistributedDataLoader(KeptStream(), batch_size=4)
    again.load_state_dict(state)
    assert again.epoch == 1
    assert numbers(again) == [[4, 5, 6, 7], [8, 9]]
    with pytest.raises(DataError, match="num_workers=0"):
        DistributedDataLoader(Stream()).state_dict()
    with pytest.raises(DataError, match="num_workers=0"):
        DistributedDataLoader(KeptStream(), num_workers=1).state_dict()
    with pytest.raises(DataError, match="shuffle=False"):
        DistributedDataLoader(Stream(), shuffle=True)


class Part(Numbers):
    """One of two parts."""

    num_shards = 2


class Endless(Dataset[int]):
    """Rows without a number of rows."""

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("dataset", "arguments", "complaint"),
    [
        (Numbers(0), {}, "empty"),
        (Numbers(4), {"sampler": [1, 2]}, "got sampler"),
        (Numbers(4), {"batch_sampler": [[1]]}, "got batch_sampler"),
        (Numbers(4), {"batch_size": 0}, "batch_size is 0"),
        (Numbers(4), {"batch_size": None}, "batch_size is None"),
        (Numbers(4), {"batch_size": 5, "drop_last": True}, "drop_last leaves no batch"),
        (Part(4), {}, "one of 2 parts"),
        (Endless(), {}, "no length"),
    ],
)
def test_bad_arguments(dataset: Dataset[int], arguments: dict[str, Any], complaint: str) -> None:
    """Each is an error that says what to do."""
    with pytest.raises(DataError, match=complaint):
        DistributedDataLoader(dataset, **arguments)


# --- several ranks


def _evaluate(rows: int, batch_size: int) -> tuple[list[int], int]:
    """The quick start's evaluation: a collective per batch, then all rows gathered."""
    seen: list[int] = []
    steps = 0
    for batch in DistributedDataLoader(Numbers(rows), batch_size=batch_size):
        bmt.sum_loss(batch.float().mean())  # stands for the gathers of a sharded forward pass
        seen.extend(batch.tolist())
        steps += 1
    return bmt.gather_result(torch.tensor(seen).int()).tolist(), steps


@pytest.mark.parametrize(
    ("ranks", "rows", "batch_size"), [(2, 7, 2), (2, 5, 1), (4, 33, 8), (4, 4, 8)]
)
def test_evaluation_counts_every_row_once(ranks: int, rows: int, batch_size: int) -> None:
    """No hang, no row twice, no row missing."""
    results = run_ranks(_evaluate, ranks, rows, batch_size)
    assert all(result == results[0] for result in results)
    assert sorted(results[0][0]) == list(range(rows))


def _train(
    rows: int, batch_size: int, state: dict[str, Any] | None, steps: int, workers: int = 0
) -> Steps:
    """Some steps, over the ends of epochs, from a place; the rows of every step on this rank, and
    the place after.
    """
    loader = DistributedDataLoader(
        Numbers(rows), shuffle=True, seed=5, batch_size=batch_size, num_workers=workers
    )
    if state is not None:
        loader.load_state_dict(state)
    read: list[list[int]] = []
    while True:
        for batch in loader:
            read.append(batch.tolist())
            if len(read) == steps:
                return read, loader.state_dict()


def _joined(results: list[Steps]) -> list[int]:
    """The rows of all steps and ranks, in order."""
    assert all(state == results[0][1] for _, state in results)
    return [
        row
        for step in zip(*(read for read, _ in results), strict=True)
        for batch in step
        for row in batch
    ]


ROWS, GLOBAL_BATCH = 43, 8  # 43 = 5 * 8 + 3: on 4 ranks the last two steps share their rows
UNINTERRUPTED = [row for epoch in range(3) for row in permutation(ROWS, 5, epoch).tolist()]


@pytest.fixture
def trained_on(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Steps]]:
    """`_train` as each of several ranks, one after the other in this process: the loader asks only
    who it is.
    """

    def ranks(world_size: int, *arguments: Any) -> list[Steps]:
        results = []
        for rank in range(world_size):
            monkeypatch.setattr(bmt, "rank", lambda rank=rank: rank)
            monkeypatch.setattr(bmt, "world_size", lambda: world_size)
            results.append(_train(*arguments))
        return results

    return ranks


@pytest.mark.parametrize(("before", "after"), list(itertools.product((1, 2, 4), repeat=2)))
def test_resume_is_exact_at_any_number_of_ranks(
    before: int, after: int, trained_on: Callable[..., list[Steps]]
) -> None:
    """Stopped after any step of an epoch, read on into the next: bit for bit the same order of
    rows.
    """
    for steps in range(1, 7):
        first = trained_on(before, ROWS, GLOBAL_BATCH // before, None, steps)
        second = trained_on(after, ROWS, GLOBAL_BATCH // after, first[0][1], 8)
        row = first[0][1]["row"]
        start = row if ROWS - row >= after else ROWS  # rows too few for all ranks are left out
        assert _joined(first) == UNINTERRUPTED[:row]
        rows = _joined(second)
        assert rows == UNINTERRUPTED[start : start + len(rows)]
        assert start + len(rows) > ROWS


def test_resume_with_another_global_batch(trained_on: Callable[..., list[Steps]]) -> None:
    """The place is a row, so nothing has to be rounded."""
    first = trained_on(2, ROWS, 3, None, 2)
    second = trained_on(4, ROWS, 1, first[0][1], 4)
    assert _joined(first) + _joined(second) == UNINTERRUPTED[: 2 * 6 + 4 * 4]


def test_resume_on_processes() -> None:
    """The same with processes and workers that fetch ahead."""
    first = run_ranks(_train, 1, ROWS, GLOBAL_BATCH, None, 3)
    second = run_ranks(_train, 2, ROWS, GLOBAL_BATCH // 2, first[0][1], 5, 1)
    rows = _joined(first) + _joined(second)
    assert rows == UNINTERRUPTED[: len(rows)]
    assert second[0][1]["row"] == len(rows) - ROWS > 0


def _too_few() -> str:
    try:
        DistributedDataLoader(Numbers(1))
    except DataError as error:
        return str(error)
    return ""


def test_fewer_rows_than_ranks_is_an_error_everywhere() -> None:
    """On every rank, before anything waits."""
    assert all("1 rows for 2 ranks" in message for message in run_ranks(_too_few, 2))


def _built_before() -> list[list[int]]:
    loader = DistributedDataLoader(Numbers(4), batch_size=1)
    bmt.init_distributed(device="cpu")
    return numbers(loader)


def test_a_loader_built_before_the_process_group() -> None:
    """It divides the rows all the same."""
    assert run_ranks(_built_before, 2, join=False) == [[[0], [2]], [[1], [3]]]


def test_batches_of_any_shape_move_to_the_device() -> None:
    """Containers keep their kind, other values stay as they are."""
    batch = {"ids": torch.zeros(2), "pair": (torch.ones(1), ["text", 3])}
    moved = on_device(batch, torch.device("meta"))
    assert moved["ids"].is_meta and moved["pair"][0].is_meta
    assert moved["pair"][1] == ["text", 3]
