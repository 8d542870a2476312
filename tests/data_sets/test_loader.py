"""DistributedDataLoader: against the plain order of rows, at several numbers of ranks, with
workers, interrupted anywhere.
"""

from typing import Any

import pytest
import torch
from tests.data_sets.common import refused
from tests.ranks.runner import run_ranks
from torch.utils.data import Dataset, IterableDataset, Subset

import bmtrain as bmt
from bmtrain.errors import RanksDivergedError
from model_center.dataset.loader import DistributedDataLoader, on_device
from model_center.dataset.protocols import Epoch
from model_center.dataset.sampler import permutation
from model_center.errors import DataError

Steps = tuple[list[list[int]], dict[str, Any]]  # rows of each step on one rank, and the place after


class Numbers(Dataset[int]):
    """Row i is i."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return self.rows

    def __getitem__(self, index):
        return index


class Words(Numbers):
    """Rows of different lengths, padded by the dataset itself; they differ from epoch to epoch."""

    def __init__(self, rows):
        super().__init__(rows)
        self.epoch = Epoch()

    def set_epoch(self, epoch):
        self.epoch.number = epoch

    def __getitem__(self, index):
        return [self.epoch.number] + [index] * (index % 3)

    def collate(self, rows):
        return [row + [-1] * (3 - len(row)) for row in rows]


class Stream(IterableDataset[int]):
    """0, 1, ... 9, from where it is."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        while self.at < 10:
            self.at += 1
            yield self.at - 1
        self.at = 0


class KeptStream(Stream):
    """The same, with a place."""

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class ToldStream(Stream):
    """The same, with epochs."""

    def set_epoch(self, epoch):
        pass


class Told(Numbers):
    """Keeps the epoch in an attribute, of which every worker process has its own."""

    epoch = -1

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, index):
        return 100 * self.epoch + index


def loader_of(rows, **options):
    return DistributedDataLoader(Numbers(rows), **options)


def numbers(loader):
    """One pass as lists."""
    return [batch.tolist() for batch in loader]


def test_one_rank_reads_what_torchs_loader_reads():
    """len() is what comes; each epoch has its own order, passes count, set_epoch goes anywhere, the
    seed matters. torch's generator, which dropout uses, is left alone.
    """
    before = torch.random.get_rng_state()
    loader = loader_of(10, batch_size=4)
    assert numbers(loader) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert (len(loader), loader.batch_size) == (3, 4)
    short = loader_of(10, batch_size=4, drop_last=True)
    assert len(short) == len(numbers(short)) == 2
    assert numbers(loader_of(2)) == [[0], [1]]
    shuffled = loader_of(50, shuffle=True, seed=3, batch_size=50)
    passes = [numbers(shuffled)[0] for _ in range(3)]
    assert passes == [permutation(50, 3, epoch).tolist() for epoch in range(3)]
    assert shuffled.epoch == 3
    with refused("set_epoch got -1"):
        shuffled.set_epoch(-1)
    next(iter(shuffled))
    for epoch in (1, 0):
        shuffled.set_epoch(epoch)
        assert numbers(shuffled)[0] == passes[epoch]
    assert numbers(loader_of(50, shuffle=True, seed=4, batch_size=50))[0] != passes[0]
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_pass_left_early_is_over():
    """The next one is the next epoch, from its start; two iterators do not disturb each other."""
    loader = loader_of(9, shuffle=True, batch_size=2)
    first = iter(loader)
    assert next(first).tolist() == permutation(9, 0, 0).tolist()[:2]
    second = iter(loader)
    assert next(second).tolist() == permutation(9, 0, 1).tolist()[:2]
    assert [row for batch in first for row in batch.tolist()] == permutation(9, 0, 0).tolist()[2:]
    assert loader.state_dict() == {"epoch": 1, "row": 2, "num_rows": 9, "shuffle": True, "seed": 0}


def test_rows_since_a_place():
    """The row numbers of a rank's batches; None of another epoch, and of a stream."""
    loader = loader_of(9, shuffle=True, batch_size=2)
    order, places = permutation(9, 0, 0).tolist(), [loader.position]
    batches = []
    for batch in loader:
        places.append(loader.position)
        batches.append(batch.tolist())
        for number, place in enumerate(places):
            assert loader.rows_since(place) == batches[number:]
    assert places == [(0, row) for row in (0, 2, 4, 6, 8, 9)] and loader.position == (1, 0)
    assert loader.rows_since((0, 6)) == [order[6:8], order[8:]]
    next(iter(loader))
    assert loader.rows_since((0, 6)) is None
    stream = DistributedDataLoader(Stream(), batch_size=4)
    next(iter(stream))
    assert stream.rows_since((0, 0)) is None


@pytest.mark.parametrize(
    "workers",
    [{}, {"num_workers": 2, "prefetch_factor": 3}, {"num_workers": 1, "persistent_workers": True}],
)
def test_the_dataset_collates_and_knows_the_epoch(workers):
    """In the process and in workers, those that outlive an epoch too; under Subset as well."""
    dataset = Words(6)
    loader = DistributedDataLoader(Subset(dataset, [1, 2, 5]), batch_size=2, **workers)
    for epoch in range(3):
        assert list(loader) == [[[epoch, 1, -1], [epoch, 2, 2]], [[epoch, 5, 5]]]
    assert list(DistributedDataLoader(dataset, batch_size=6, collate_fn=len)) == [6]


USUAL = {"shuffle": True, "batch_size": 2}


def read_otherwise(how):
    """Each way but the first would take some rows twice and leave out others. What is said at the
    next collectives.
    """
    rank, options, rows = bmt.rank(), dict(USUAL), 12
    if how == "rows":
        rows += 2 * rank
    elif how in ("seed", "batch_size"):
        options[how] = 1 + rank
    loader = loader_of(rows, **options)
    said = []
    if how == "look" and rank == 0:
        next(iter(loader))
    next(iter(loader))
    for _ in range(2):
        try:
            bmt.synchronize()
            said.append("")
        except RanksDivergedError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("how", ["alike", "seed", "rows", "batch_size", "look"])
def test_ranks_that_read_in_other_orders_are_told(how):
    """At the next collective, and again at the one after it."""
    messages = run_ranks(read_otherwise, 2, how)
    assert len({*messages[0], *messages[1]}) == 1
    assert ("a pass over rows" in messages[0][0]) == (how != "alike")


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_that_outlive_an_epoch_are_told_the_next(workers):
    """After a pass that was left early, and in a resumed one, too. Nothing reaches the copies of a
    stream: it has workers for each.
    """
    options = {"batch_size": 2, "num_workers": workers, "persistent_workers": True}
    loader = DistributedDataLoader(Subset(Told(6), range(6)), **options)

    def rows(epoch, *starts):
        return [[100 * epoch + row, 100 * epoch + row + 1] for row in starts]

    for epoch in (0, 1):
        assert numbers(loader) == rows(epoch, 0, 2, 4)
    assert next(iter(loader)).tolist() == [200, 201]
    state = loader.state_dict()
    assert numbers(loader) == rows(3, 0, 2, 4)
    loader.load_state_dict(state)
    assert numbers(loader) == rows(2, 2, 4)
    DistributedDataLoader(ToldStream(), num_workers=1)
    with refused("leave persistent_workers=False"):
        DistributedDataLoader(ToldStream(), **options)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_place_counts_what_was_handed_out(workers):
    """Not what workers fetched ahead: from every place, the rest is what an uninterrupted run
    reads.
    """
    loader = loader_of(11, shuffle=True, batch_size=3, num_workers=workers)
    states, read = [loader.state_dict()], []
    for _ in range(2):
        for batch in loader:
            read.append(batch.tolist())
            states.append(loader.state_dict())
    for step, state in list(enumerate(states))[:: 1 if not workers else 3]:
        again = loader_of(11, shuffle=True, batch_size=3)
        again.load_state_dict(state)
        assert again.state_dict() == state
        rest = [*numbers(again), *numbers(again)]
        assert rest[: len(read) - step] == read[step:]


def test_a_place_in_another_order_is_refused():
    """Other rows, other seed, shuffled or not: going on would repeat and leave out rows."""
    state = loader_of(11, shuffle=True, seed=1).state_dict()
    for rows, shuffle, seed, complaint in (
        (12, True, 1, "num_rows 11"),
        (11, False, 1, "shuffle"),
        (11, True, 2, "seed 1"),
    ):
        loader = loader_of(rows, shuffle=shuffle, seed=seed)
        next(iter(loader))
        with refused(complaint):
            loader.load_state_dict(state)
        assert loader.position == (0, 1)
    # the seed of no order does not matter
    loader_of(11, seed=2).load_state_dict(loader_of(11, seed=1).state_dict())


def test_streams_pass_through():
    """They keep their order, and their place if they can tell it."""
    loader, again = (DistributedDataLoader(KeptStream(), batch_size=4) for _ in range(2))
    assert numbers(loader) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    next(iter(loader))
    state = loader.state_dict()
    assert state == {"epoch": 1, "dataset": {"at": 4}}
    again.load_state_dict(state)
    assert again.epoch == 1
    assert numbers(again) == [[4, 5, 6, 7], [8, 9]]
    for dataset, workers in ((Stream(), 0), (KeptStream(), 1)):
        with refused("num_workers=0"):
            DistributedDataLoader(dataset, num_workers=workers).state_dict()
    with refused("shuffle=False"):
        DistributedDataLoader(Stream(), shuffle=True)


class Endless(Dataset[int]):
    """Rows without a number of rows."""

    def __getitem__(self, index):
        return index


@pytest.mark.parametrize(
    ("dataset", "arguments", "complaint"),
    [
        (Numbers(0), {}, "empty"),
        (Numbers(4), {"sampler": [1, 2]}, "got sampler"),
        (Numbers(4), {"batch_sampler": [[1]]}, "got batch_sampler"),
        (Numbers(4), {"batch_size": 0}, "batch_size is 0"),
        (Numbers(4), {"batch_size": None}, "batch_size is None"),
        (Numbers(4), {"batch_size": True}, "batch_size is True"),
        (Numbers(4), {"batch_size": 5, "drop_last": True}, "drop_last leaves no batch"),
        (Endless(), {}, "no length"),
    ],
)
def test_bad_arguments(dataset, arguments, complaint):
    """Each is an error that says what to do."""
    with refused(complaint):
        DistributedDataLoader(dataset, **arguments)


# --- several ranks


def evaluate(rows, batch_size):
    """The quick start's evaluation: a collective per batch, then all rows gathered. Fewer rows than
    ranks are an error on every rank, before anything waits.
    """
    with pytest.raises(DataError, match="1 rows for 3 ranks"):
        loader_of(1)
    seen = []
    for batch in loader_of(rows, batch_size=batch_size):
        bmt.sum_loss(batch.float().mean())  # stands for the gathers of a sharded forward pass
        seen.extend(batch.tolist())
    gathered = bmt.gather_result(torch.tensor(seen).int()).tolist()
    return gathered


@pytest.mark.parametrize(("rows", "batch_size"), [(7, 2), (7, 1), (33, 8), (3, 8)])
def test_evaluation_counts_every_row_once(rows, batch_size):
    """No hang, no row twice, no row missing."""
    results = run_ranks(evaluate, 3, rows, batch_size)
    assert all(sorted(result) == list(range(rows)) for result in results)


ROWS, GLOBAL_BATCH = 43, 8  # 43 = 5 * 8 + 3: on 4 ranks the last two steps share their rows
UNINTERRUPTED = [row for epoch in range(3) for row in permutation(ROWS, 5, epoch).tolist()]


def train(batch_size, state, steps, workers=0):
    """Some steps, over the ends of epochs, from a place; the rows of every step on this rank, and
    the place after.
    """
    loader = loader_of(ROWS, shuffle=True, seed=5, batch_size=batch_size, num_workers=workers)
    if state is not None:
        loader.load_state_dict(state)
    read = []
    while True:
        for batch in loader:
            read.append(batch.tolist())
            if len(read) == steps:
                return read, loader.state_dict()


def joined(results):
    """The rows of all steps and ranks, in order."""
    assert all(state == results[0][1] for _, state in results)
    steps = zip(*(read for read, _ in results), strict=True)
    return [row for step in steps for batch in step for row in batch]


@pytest.mark.fresh
def test_resume_is_exact_at_another_number_of_ranks():
    """Read on into the next epoch, with workers that fetch ahead: bit for bit the same order of
    rows. The place is a row, so another global batch needs no rounding.
    """
    first = train(GLOBAL_BATCH, None, 5)
    second = run_ranks(train, 2, 3, first[1], 8, 1)
    rows = joined([first]) + joined(second)
    assert rows == UNINTERRUPTED[: len(rows)]
    assert second[0][1]["row"] == len(rows) % ROWS and len(rows) > ROWS


def built_before():
    batch = {"ids": torch.zeros(2), "pair": (torch.ones(1), ["text", 3])}
    moved = on_device(batch, torch.device("meta"))
    is_moved = moved["ids"].is_meta and moved["pair"][0].is_meta
    loader, few = loader_of(4, batch_size=1), loader_of(1)
    bmt.init_distributed(device="cpu")
    with refused("1 rows for 2 ranks"):
        iter(few)
    return numbers(loader), is_moved and moved["pair"][1] == ["text", 3]


def test_a_loader_built_before_the_process_group():
    """It divides the rows all the same. Batches of any shape move to the device: containers keep
    their kind, other values stay as they are.
    """
    assert run_ranks(built_before, 2, join=False) == [([[0], [2]], True), ([[1], [3]], True)]
