"""The arithmetic of batches and orders, tried on every small case."""

import itertools

import numpy as np
from tests.data_sets.common import refused

from model_center.dataset.order import draw, permutation
from model_center.dataset.sampler import BatchSplit, RankBatches, check_rows

CASES = [
    (rows, batch, ranks)
    for rows, batch, ranks in itertools.product(range(1, 41), (1, 2, 3, 5), (1, 2, 3, 4))
    if rows >= ranks
]


def batches(rows, cut, *, epoch=0, row=0, shuffle=True):
    """Per rank, the batches of an epoch from `row` on."""
    out = []
    for rank in range(cut.world_size):
        sampler = RankBatches(rows, shuffle=shuffle, seed=7)
        sampler.start(cut, rank, epoch, row)
        out.append(list(sampler))
    return out


def flat(per_rank):
    """All rows in the order of the epoch: step by step, rank by rank."""
    return [row for step in zip(*per_rank, strict=True) for batch in step for row in batch]


def test_every_row_once_and_equally_many_batches():
    """Over all ranks each row once, in the order of the epoch; no batch is empty; len() is what
    comes; the work of a step is even.
    """
    for rows, batch_size, ranks in CASES:
        cut = BatchSplit(batch_size=batch_size, world_size=ranks)
        got = batches(rows, cut)
        assert flat(batches(rows, cut, shuffle=False)) == list(range(rows))
        assert flat(got) == permutation(rows, 7, 0).tolist()
        assert {len(of_rank) for of_rank in got} == {cut.count(rows)}
        sizes = [len(batch) for of_rank in got for batch in of_rank]
        assert 1 <= min(sizes) <= max(sizes) <= max(batch_size, 2)
        full = max((rows - ranks) // (batch_size * ranks) - 1, 0)
        assert all(len(batch) == batch_size for of_rank in got for batch in of_rank[:full])
        for step in zip(*got, strict=True):
            assert max(map(len, step)) - min(map(len, step)) <= 1


def test_drop_last_keeps_full_batches_only():
    """As torch's: what does not fill a step is left out."""
    for rows, batch_size, ranks in CASES:
        cut = BatchSplit(batch_size=batch_size, world_size=ranks, drop_last=True)
        got = batches(rows, cut, shuffle=False)
        kept = rows // (batch_size * ranks) * batch_size * ranks
        assert flat(got) == list(range(kept))
        assert {len(batch) for of_rank in got for batch in of_rank} <= {batch_size}
        assert {len(of_rank) for of_rank in got} == {cut.count(rows)}


def test_an_epoch_goes_on_from_any_step():
    """What is left after k steps is the same batches, whoever asks; at another number of ranks the
    rest of the epoch's order, once: only fewer rows than ranks are left out.
    """
    for rows, batch_size, ranks in CASES:
        cut = BatchSplit(batch_size=batch_size, world_size=ranks)
        whole, row = batches(rows, cut), 0
        for step in range(cut.count(rows) + 1):
            assert batches(rows, cut, row=row) == [of_rank[step:] for of_rank in whole]
            row += sum(len(of_rank[step]) for of_rank in whole if step < len(of_rank))
        for others, row in itertools.product((1, 2, 3, 4), (1, rows // 2, rows - 1)):
            rest = flat(
                batches(rows, BatchSplit(batch_size=batch_size, world_size=others), row=row)
            )
            assert rest == (flat(whole)[row:] if rows - row >= others else [])


def test_too_few_rows_are_an_error():
    """Nothing to read, fewer rows than ranks, and drop_last of everything."""
    for rows, ranks, drop_last, complaint in (
        (0, 1, False, "empty"),
        (3, 4, False, "3 rows for 4 ranks"),
        (7, 4, True, "drop_last leaves no batch"),
    ):
        with refused(complaint):
            check_rows(rows, BatchSplit(batch_size=2, world_size=ranks, drop_last=drop_last))
    check_rows(8, BatchSplit(batch_size=2, world_size=4, drop_last=True))
    check_rows(4, BatchSplit(batch_size=2, world_size=4))


def test_orders_are_permutations_of_their_key():
    """Every number once; equal keys equal orders; other keys others; and the first order is this
    one for ever.
    """
    assert permutation(8, 0, 0).tolist() == [0, 3, 7, 5, 1, 2, 6, 4]
    for count in (0, 1, 2, 100):
        assert sorted(permutation(count, 1, -2).tolist()) == list(range(count))
    keys = list(itertools.product((0, 1, -1), (0, 1, 2)))
    assert len({tuple(permutation(100, *key).tolist()) for key in keys * 2}) == 9


def test_draws_cover_their_range():
    """Both ends, about equally often."""
    counts = np.bincount([draw(2, 5, 11, number) for number in range(4000)], minlength=6)
    assert counts[:2].tolist() == [0, 0]
    assert (counts[2:] > 900).all()
